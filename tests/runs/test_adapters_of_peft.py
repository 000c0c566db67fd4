"""Adapters as PEFT itself saves them: each computes here what PEFT computes with it, or is refused by name at once."""

import copy
import json
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_settings import LOADED, REFUSED, SAMPLED
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_models import SPLIT, shallow
from torch import Tensor
from transformers import AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel, SamplingParams
from lowmem_grpo.fast_model import FastPeftModel, adapter_for
from lowmem_grpo.models.export.formats import ExportSettings, export
from lowmem_grpo.models.export.merge import read_pairs
from lowmem_grpo.runs.saved_adapter import AdapterError

IDS = torch.tensor([[5, 9, 11, 200, 31, 7, 8, 90, 14, 301]])


@cache
def plain() -> Any:
    """Two layers of the embedded model as transformers loads them. Never changed."""
    return AutoModelForCausalLM.from_pretrained(shallow())


def base() -> Any:
    """Another one, to be changed."""
    return copy.deepcopy(plain())


def save(folder: Path, **settings: Any) -> Path:
    """An adapter with random factors, saved by PEFT on the embedded model."""
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        usual = {"r": 4, "target_modules": SPLIT, "task_type": "CAUSAL_LM"}
        model = get_peft_model(base(), LoraConfig(**(usual | settings)))
        for name, parameter in model.named_parameters():
            if "lora_" in name and "magnitude" not in name:
                parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(str(folder))
    return folder


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Logits (T, V) of a few tokens."""
    return model.eval()(input_ids=IDS).logits[0].float()


def by_peft(folder: Path) -> Tensor:
    """What PEFT computes with a saved adapter."""
    with warnings.catch_warnings(action="ignore"):
        return logits_of(PeftModel.from_pretrained(base(), str(folder)))


def assert_same(got: Tensor, wanted: Tensor) -> None:
    assert (wanted - logits_of(plain())).abs().max() > 1e-2  # the adapter matters
    assert (got - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.fixture(scope="module")
def live() -> FastPeftModel:
    """The embedded model with LoRA on all its linear layers."""
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128, load_in_4bit=False)
    return FastLanguageModel.get_peft_model(bare, r=4, use_gradient_checkpointing=False)


@pytest.fixture
def untouched(live: FastPeftModel) -> Iterator[FastPeftModel]:
    """The same; afterwards each of its tensors has the name and the bits that it had."""
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    yield live
    after = live.state_dict()
    assert list(after) == list(before)
    assert [name for name, tensor in before.items() if not torch.equal(after[name], tensor)] == []


@pytest.mark.parametrize("case", [*LOADED, *SAMPLED])
@pytest.mark.every(3)
def test_a_saved_adapter_samples_with_pefts_logits_and_leaves_the_model_as_it_was(
    case: str, untouched: FastPeftModel, tmp_path: Path
) -> None:
    folder = save(tmp_path / "saved", **(LOADED | SAMPLED)[case])
    request = untouched.load_lora(folder)
    with adapter_for(untouched, request):
        got = logits_of(untouched)
    assert_same(got, by_peft(folder))
    assert untouched.fast_generate("Start", SamplingParams(max_tokens=1), lora_request=request)


@pytest.mark.parametrize("case", LOADED)
@pytest.mark.every(3)
def test_the_folder_of_a_saved_adapter_loads_with_pefts_logits_and_merges_to_them(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", **LOADED[case])
    wanted = by_peft(folder)
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, load_in_4bit=False)
    assert_same(logits_of(model), wanted)
    merged = base()
    for name, pair in read_pairs(folder).items():
        layer = merged.get_submodule(name)
        layer.weight.data += pair.rows(0, layer.out_features, torch.device("cpu"))
    assert_same(logits_of(merged), wanted)
    with model.disable_adapter():
        assert torch.equal(logits_of(model), logits_of(plain()))
    names = {name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name}
    assert names == load_file(folder / "adapter_model.safetensors").keys()  # nothing else would be trained


def test_training_goes_on_with_pefts_gradients_where_layers_have_their_own_rank_and_alpha(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", **LOADED["ranks and alphas"])
    ours, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, load_in_4bit=False)
    theirs = PeftModel.from_pretrained(base(), str(folder), is_trainable=True)
    for model in (ours, theirs):
        model(input_ids=IDS, labels=IDS).loss.backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    got = {name: parameter.grad for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert got.keys() == wanted.keys()
    assert max(float((got[name] - grad).abs().max() / grad.abs().max()) for name, grad in wanted.items()) < 1e-3


def test_the_command_merges_layers_with_their_own_rank_and_alpha(tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", **LOADED["ranks and alphas"])
    done = export(folder, "merged", tmp_path / "merged", ExportSettings(base=str(shallow()), load_in_4bit=False))
    assert done.checks["logits_difference"] < 2 * done.checks["logits_rounding"]  # against PEFT's logits


def edit(folder: Path, **settings: Any) -> Path:
    """The folder with other settings in its adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def assert_refused_everywhere(folder: Path, message: str, model: FastPeftModel, out: Path) -> None:
    """Loading, sampling and exporting all say the same, before they look for the base."""
    edit(folder, base_model_name_or_path="/there/is/no/such/base")
    for call in (
        lambda: FastLanguageModel.from_pretrained(str(folder)), lambda: model.load_lora(folder, any_base=True),
        lambda: model.fast_generate("Start", lora_request=str(folder)), lambda: read_pairs(folder),
        lambda: export(folder, "merged", out), lambda: export(folder, "adapter", out),
    ):
        with pytest.raises(AdapterError, match=message):
            call()


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_here_is_refused_by_name_and_the_base_keeps_its_bits(
    case: str, untouched: FastPeftModel, tmp_path: Path
) -> None:
    settings, message = REFUSED[case]
    assert_refused_everywhere(save(tmp_path / "saved", **settings), message, untouched, tmp_path / "out")


@pytest.mark.parametrize(("settings", "message"), [
    ({"init_lora_weights": "corda"}, "'corda'.*path_initial_model_for_weight_conversion"),
    ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}, "'loftq'"),
    ({"init_lora_weights": "OLoRA"}, "'OLoRA'"), ({"a_later_variant": {"size": 3}}, "a_later_variant={'size': 3}"),
    ({"use_qalora": True}, "use_qalora=True"), ({"megatron_config": {"x": 1}}, "megatron_config"),
    ({"peft_type": "ADALORA"}, "type ADALORA; only LoRA"), ({"r": 6}, "r=6"),
    ({"target_modules": "(", "layers_to_transform": None}, "cannot be read|no settings|regular expression"),
])
def test_settings_that_nothing_here_computes_are_refused_by_name(
    settings: dict[str, Any], message: str, untouched: FastPeftModel, tmp_path: Path
) -> None:
    folder = edit(save(tmp_path / "saved"), **settings)
    with pytest.raises(AdapterError, match=message):
        untouched.load_lora(folder)


def test_an_adapter_that_lacks_layers_adds_none_to_the_model(tmp_path: Path) -> None:
    bare, _ = FastLanguageModel.from_pretrained(str(shallow()), max_seq_length=128, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=4, target_modules=["q_proj"], use_gradient_checkpointing=False)
    before = list(model.state_dict())
    folder = save(tmp_path / "saved", target_modules=["q_proj", "k_proj"])
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if "k_proj" not in name}, file)
    with pytest.raises(AdapterError, match="lacks 2 of the layers that its own"):
        model.fast_generate("Start", lora_request=str(folder))
    assert list(model.state_dict()) == before


@pytest.mark.parametrize("later", [(), ("use_rslora", "rank_pattern", "alpha_pattern")])
def test_an_adapter_of_a_peft_before_0_7_loads_samples_and_merges(
    later: tuple[str, ...], untouched: FastPeftModel, tmp_path: Path
) -> None:
    folder = save(tmp_path / "saved", lora_alpha=24)
    path = folder / "adapter_config.json"
    old = {"base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "lora_alpha",
           "lora_dropout", "modules_to_save", "peft_type", "r", "target_modules", "task_type", *later}
    config = {name: value for name, value in json.loads(path.read_text()).items() if name in old}
    path.write_text(json.dumps(config | {"enable_lora": None, "merge_weights": False}))
    wanted = by_peft(folder)
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=128, load_in_4bit=False)
    assert_same(logits_of(model), wanted)
    with adapter_for(untouched, untouched.load_lora(folder)):
        assert_same(logits_of(untouched), wanted)
    assert {pair.scaling for pair in read_pairs(folder).values()} == {6.0}


@pytest.mark.parametrize("case", SAMPLED)
def test_a_variant_is_refused_where_it_would_be_trained_or_merged_and_is_copied(case: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "saved", **SAMPLED[case])
    with pytest.raises(AdapterError, match=r"=True, and only plain LoRA is trained here.*load_lora\(FOLDER\)"):
        FastLanguageModel.from_pretrained(str(folder))
    with pytest.raises(AdapterError, match=r"only plain LoRA is merged here.*merge_and_unload"):
        export(folder, "merged", tmp_path / "out")
    export(folder, "adapter", tmp_path / "copy")
    assert torch.equal(by_peft(tmp_path / "copy"), by_peft(folder))
