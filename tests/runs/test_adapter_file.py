"""A saved adapter that is not whole, not finite or made for another model is refused by name, before it samples."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.fast_model import SAVED_ADAPTER, FastPeftModel, adapter_for
from lowmem_grpo.models.stored_model import resolve
from lowmem_grpo.runs.adapter_file import read_adapter
from lowmem_grpo.runs.saved_adapter import AdapterError, base_of_adapter, same_model

Tensors = dict[str, Tensor]
LAYER = "base_model.model.model.layers.2.self_attn.q_proj"
DOWN = "base_model.model.model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def model() -> FastPeftModel:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)


@pytest.fixture(scope="module")
def saved(model: FastPeftModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "saved"
    model.save_lora(folder)
    return folder


def changed(folder: Path, tensors: Callable[[Tensors], Any] | None = None, **settings: Any) -> Path:
    """The folder with its tensors and settings changed."""
    if tensors is not None:
        held = load_file(folder / "adapter_model.safetensors")
        tensors(held)
        save_file(held, folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_fill(0, torch.tensor([1]), value)


ATTACKS: dict[str, tuple[Callable[[Tensors], Any] | None, dict[str, Any], str]] = {
    "no B": (lambda t: t.pop(f"{LAYER}.lora_B.weight"), {}, rf"{LAYER} has no lora_B\.weight.*not whole"),
    "no A": (lambda t: t.pop(f"{LAYER}.lora_A.weight"), {}, rf"{LAYER} has no lora_A\.weight.*not whole"),
    "no layer": (lambda t: [t.pop(n) for n in list(t) if ".layers.5." in n], {}, r"lacks 7 of the layers.*layers\.5\."),
    "nothing": (lambda t: [t.pop(n) for n in list(t)], {}, "lacks 42 of the layers"),
    "int8": (put(f"{LAYER}.lora_A.weight", lambda t: (t * 99).to(torch.int8)), {},
             rf"{LAYER}\.lora_A\.weight as int8; allowed are float32"),
    "float8": (put(f"{LAYER}.lora_B.weight", lambda t: t.to(torch.float8_e4m3fn)), {}, "as float8_e4m3fn"),
    "NaN": (put(f"{LAYER}.lora_A.weight", with_value(torch.nan)), {},
            rf"{LAYER}\.lora_A\.weight holds NaN or infinity"),
    "infinity": (put(f"{DOWN}.lora_B.weight", with_value(-torch.inf)), {}, rf"{DOWN}\.lora_B\.weight holds NaN"),
    "DoRA without magnitudes": (None, {"use_dora": True}, r"no lora_magnitude_vector although .* says use_dora"),
    "another rank": (None, {"r": 8}, r"rank 4 and adapter_config\.json says r=8"),
    "ranks that do not meet": (put(f"{LAYER}.lora_B.weight", lambda t: t[:, :2].contiguous()), {},
                               "cannot be multiplied"),
    "another width": (put(f"{LAYER}.lora_A.weight", lambda t: t[:, :64].contiguous()), {}, "trained on another base"),
    "settings of fewer layers": (None, {"target_modules": ["q_proj"]}, "holds 36 layers that its own .* does not name"),
    "no alpha": (None, {"lora_alpha": None}, "holds no settings of PEFT"),
    **{f"{name}={value!r}": (None, {name: value}, f"holds no settings of PEFT: .*{name.replace('_', '.')}")
       for name, values in {
           "r": [0, -4, 2**40, "4", None, True, 4.5], "lora_alpha": ["8", [], 1e308, True], "lora_dropout": [2, "x"],
           "layers_to_transform": ["1", [[1]]], "layers_pattern": [3, {}], "exclude_modules": [5], "use_rslora": ["no"],
           "target_modules": [[1, 2], 7], "rank_pattern": [{"q_proj": 0}, [1], {"q_proj": "4"}], "task_type": [[]],
           "alpha_pattern": [{"q_proj": 1e308}, "x"], "inference_mode": ["yes"]}.items() for value in values},
    "no targets": (None, {"target_modules": None}, "target_modules is null"),
    "biases that are not there": (None, {"lora_bias": True}, r"has no lora_B\.bias although .* says lora_bias"),
    **{f"{name}={value!r}": (None, {name: value}, f"has {name}=.*only LoRA on linear layers")
       for name in ("arrow_config", "kasa_config", "monteclora_config", "velora_config", "use_bdlora", "use_qalora")
       for value in ({}, [], {"a": 1})},
    "a long value": (None, {"task_type": "x" * 10**6}, "^.{1,1400}$"),
    "NaN as alpha": (None, {"lora_alpha": math.nan}, "lora_alpha is NaN, which is no finite number"),
    "a base of no name": (None, {"base_model_name_or_path": 5}, "base_model_name_or_path is 5"),
    "another kind": (None, {"peft_type": "IA3"}, "of type IA3; only LoRA"),
    "a foreign layer": (lambda t: t.update({f"{LAYER}x.lora_A.weight": torch.ones(4, 128)}), {}, "that the one in the"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_that_is_not_a_whole_adapter_of_this_model_is_refused_by_name(
    attack: str, model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    tensors, settings, message = ATTACKS[attack]
    with pytest.raises(AdapterError, match=message):
        model.load_lora(changed(Path(shutil.copytree(saved, tmp_path / "copy")), tensors, **settings))


VALUES = [None, {}, [], [[]], True, -1, "x", {"a": {"b": [1]}}]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_every_setting_of_peft_with_any_value_works_or_is_refused_in_one_line(
    value: Any, model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    names = {field.name for field in fields(LoraConfig)} - {"peft_type", "runtime_config"}
    assert len(names) > 30
    whole, copy = json.loads((saved / "adapter_config.json").read_text()), Path(shutil.copytree(saved, tmp_path / "a"))
    for name in sorted(names):
        (copy / "adapter_config.json").write_text(json.dumps(whole | {name: value}))
        try:
            with adapter_for(model.inner, model.load_lora(copy)):
                pass
        except AdapterError as error:
            said = str(error).lower().replace("_", "").replace(" ", "")
            assert name.replace("_", "") in said or "does not name" in str(error), name  # of other layers than the file
            assert "\n" not in str(error), name


@pytest.mark.parametrize("nothing", [None, {}], ids=str)
def test_patterns_of_nothing_are_pefts_default(
    nothing: Any, model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    folder = changed(Path(shutil.copytree(saved, tmp_path / "copy")), rank_pattern=nothing, alpha_pattern=nothing)
    with adapter_for(model.inner, model.load_lora(folder)):
        used = model.inner.peft_config[SAVED_ADAPTER]
        assert (used.r, used.rank_pattern, used.alpha_pattern) == (4, {}, {})


@pytest.mark.parametrize("shape", [(4, 10**8), (10**8, 4), (1, 4, 10**8)], ids=str)
def test_a_matrix_larger_than_any_models_is_refused_before_its_values_are_read(
    shape: tuple[int, ...], saved: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    size = 4 * math.prod(shape)
    head = json.dumps({f"{LAYER}.lora_A.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    with (copy / "adapter_model.safetensors").open("wb") as file:  # of which the disk holds the header only
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    with pytest.raises(AdapterError, match="no model has more than 2,097,152 rows or columns"):
        read_adapter(copy)


@pytest.mark.parametrize(("name", "shape", "words"), [
    (f"{LAYER}x.lora_A.weight", (4, 128), "1 layers that the one in the model lacks"),
    (f"{LAYER}.lora_A.weight", (4, 96), "takes 96 numbers.*trained on another base"),
    (f"{LAYER}.lora_B.bias", (3,), r"biases of the shape \[3\] and 128 outputs"),
    ("base_model.model.model.embed_tokens.weight", (384, 96), r"brings its own .*embed_tokens.weight, \[384, 96\]"),
])
def test_values_are_not_read_before_names_and_shapes_fit_the_model(
    name: str, shape: tuple[int, ...], words: str, model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    changed(copy, lambda tensors: tensors.update({name: torch.full(shape, math.nan)}))
    with pytest.raises(AdapterError, match=words):  # and not: "holds NaN or infinity"
        model.load_lora(copy)


def test_a_header_of_more_or_longer_names_than_any_adapters_is_refused(saved: Path, tmp_path: Path) -> None:
    file = Path(shutil.copytree(saved, tmp_path / "copy")) / "adapter_model.safetensors"
    save_file({"a" * 501: torch.ones(1)}, file)
    with pytest.raises(AdapterError, match=r"'a{80}'\.\.\., has more than 500 characters"):
        read_adapter(file.parent)
    file.write_bytes((33 << 20).to_bytes(8, "little") + b"{}".ljust(33 << 20))
    with pytest.raises(AdapterError, match=r"its header has 33\.0 MiB; at most 32\.0 MiB are read"):
        read_adapter(file.parent)


@pytest.mark.parametrize(("name", "read"), [
    ("adapter_config.json", read_adapter), ("base_model.json", base_of_adapter)])
def test_a_file_of_gigabytes_beside_an_adapter_is_refused_before_it_is_read(
    name: str, read: Callable[[Path], Any], saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    with (folder / name).open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises((AdapterError, ValueError), match=rf"{name}.* has 3\.00 GiB; at most"):
        read(folder)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_torn_file_is_refused(file: str, model: FastPeftModel, saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "copy"))
    (folder / file).write_bytes((folder / file).read_bytes()[:100])
    with pytest.raises(AdapterError, match="cannot be read"):
        model.load_lora(folder)


@pytest.mark.parametrize(("record", "settings"), [
    ({"model": "Qwen/Qwen2.5-3B"}, {}), (None, {"base_model_name_or_path": "Qwen/Qwen2.5-3B"}),
])
def test_an_adapter_of_another_base_is_refused_unless_the_user_says_they_are_the_same(
    record: dict[str, str] | None, settings: dict[str, str], model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    folder = changed(Path(shutil.copytree(saved, tmp_path / "copy")), **settings)
    if record is None:
        (folder / "base_model.json").unlink()
    else:
        (folder / "base_model.json").write_text(json.dumps(record))
    with pytest.raises(AdapterError, match=r"trained on Qwen/Qwen2\.5-3B, and this model is tiny.*any_base=True"):
        model.load_lora(folder)
    assert model.load_lora(folder, any_base=True).path == folder


@pytest.mark.parametrize(("one", "other", "same"), [
    ("Qwen/Qwen3-4B", "unsloth/Qwen3-4B-unsloth-bnb-4bit", True), ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", False),
    ("/cache/models--Qwen--Qwen3-4B/snapshots/abc", "Qwen/Qwen3-4B", True), ("/data/Qwen3-4B/", "Qwen/qwen3-4b", True),
])
def test_one_model_under_two_names_is_known(one: str, other: str, same: bool) -> None:
    assert same_model(one, other) is same


def test_an_adapter_on_fewer_layers_by_its_own_settings_is_whole(model: FastPeftModel, tmp_path: Path) -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    FastLanguageModel.get_peft_model(bare, r=2, target_modules=["q_proj"]).save_lora(tmp_path / "narrow")
    assert model.load_lora(tmp_path / "narrow")


NESTED = r"(([\w.]+)+)+!"  # Python's re tries 2**n ways to match n characters with it
PATTERNS: dict[str, dict[str, Any]] = {
    "target_modules": {"target_modules": NESTED}, "exclude_modules": {"exclude_modules": NESTED},
    "layers_pattern": {"layers_to_transform": [1], "layers_pattern": ["layers", NESTED]},
    "one layers_pattern": {"layers_to_transform": [1], "layers_pattern": NESTED},
    "rank_pattern": {"rank_pattern": {"q_proj": 4, NESTED: 4}}, "alpha_pattern": {"alpha_pattern": {NESTED: 4}},
    "alternatives": {"exclude_modules": r"(\w\w?|\w|\.)*!"}, "empty ones": {"exclude_modules": "(|||||||||){30}!"},
    "many steps": {"exclude_modules": r".*" * 20 + "!"}, "refers back": {"exclude_modules": r"(.*)(.*)+\1\2!"},
    # matches its own layers at once, and never ends on a name that only the model has
    "others": {"target_modules": r".*_proj|(([\w.]+)+)+!"},
}


@pytest.mark.every(4)
@pytest.mark.parametrize("case", PATTERNS)
def test_a_pattern_that_would_be_matched_for_ever_is_refused_by_name(
    case: str, model: FastPeftModel, saved: Path, tmp_path: Path
) -> None:
    folder = changed(Path(shutil.copytree(saved, tmp_path / "copy")), **PATTERNS[case])
    name = next(name for name in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern",
                                  "alpha_pattern") if name in PATTERNS[case])
    with pytest.raises(AdapterError, match=f"has the pattern {name}.*takes too long to match"):
        model.load_lora(folder)


def test_a_file_is_not_read_where_its_own_layers_would_be_matched_for_ever(saved: Path, tmp_path: Path) -> None:
    """A teacher's adapter and a merge are read without a model whose layers would be matched first."""
    folder = changed(Path(shutil.copytree(saved, tmp_path / "copy")), rank_pattern={NESTED: 4})
    with pytest.raises(AdapterError, match=r"has the pattern rank_pattern.*takes too long to match"):
        read_adapter(folder)


def test_a_pattern_of_ones_own_that_would_be_matched_for_ever_is_refused() -> None:
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    with pytest.raises(ValueError, match=r"has the pattern target_modules='.*takes too long"):
        FastLanguageModel.get_peft_model(bare, target_modules=NESTED)


@pytest.mark.parametrize("pattern", ["(" * 5000, "(q", "*", "a{4,2}", "(?P<idx>a)", "[z-a]", "a" * 20_000 + ".*"])
def test_what_is_no_regular_expression_is_said(pattern: str, model: FastPeftModel, saved: Path, tmp_path: Path) -> None:
    folder = changed(Path(shutil.copytree(saved, tmp_path / "copy")), rank_pattern={pattern: 4},
                     layers_to_transform=[1], layers_pattern=[pattern])
    with pytest.raises(AdapterError, match=r"regular expression"):
        model.load_lora(folder)


def test_healthy_patterns_in_a_file_name_the_layers_that_they_name_in_peft(saved: Path, tmp_path: Path) -> None:
    """PEFT's own model of this file, loaded without this package's checks, has the same ranks and scales."""
    bare, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=False)
    settings: dict[str, Any] = {"target_modules": r".*\.(q|v|up)_proj", "rank_pattern": {r"layers\.[12]\..*v_proj": 2},
                                "alpha_pattern": {r".*\.(up|gate)_proj": 32}, "exclude_modules": r".*layers\.0\..*"}
    FastLanguageModel.get_peft_model(bare, r=4, **settings).save_lora(tmp_path / "mine")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(resolve("tiny")), str(tmp_path / "mine"))
    loaded, _ = FastLanguageModel.from_pretrained(str(tmp_path / "mine"), max_seq_length=128, load_in_4bit=False)
    ranks = [{name.partition("base_model.")[2]: (layer.r["default"], layer.scaling["default"])
              for name, layer in each.named_modules() if hasattr(layer, "lora_A")} for each in (plain, loaded)]
    assert ranks[0] == ranks[1] and len(ranks[0]) == 15
    assert {rank for rank, _ in ranks[0].values()} == {2, 4} and {scale for _, scale in ranks[0].values()} == {4, 8}
