"""Every family of the table trains and samples as transformers computes it: packed, prompts shared, on our modules."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed_stack import LateCopies
from families import (
    GROUPS,
    LAYER_TYPES,
    NEAR,
    SAMPLED,
    SHAPES,
    TRAINED,
    WINDOW,
    assert_alike,
    loaded,
    plain_twin,
    sampled_apart,
    saved_family,
)
from packed_problem import batch_of, learned, learned_alone
from tables import not_refused
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.memory import cutting
from lowmem_grpo.memory.families import DELTA_IN, DELTA_OUT, FAMILIES
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.models.experts import RoutedBlock
from lowmem_grpo.models.lean_modules import LeanAttention, LeanLayer, LeanMLP, LeanRMSNorm
from lowmem_grpo.models.policy import Policy

each_family = pytest.mark.parametrize("kind", TRAINED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of a family's folder, whose model is made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = saved_family(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


@pytest.mark.parametrize("once", [False, True], ids=["side by side", "prompts once"])
@each_family
@pytest.mark.every(2)
def test_packed_logprobs_and_every_gradient_are_those_of_plain_transformers(
    kind: str, once: bool, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if once:
        monkeypatch.setattr(cutting, "PAIRS_A_CALL", -(10**9))
    model, _ = loaded(folders(kind))
    batch = batch_of(GROUPS)
    assert_alike(learned(Policy(model), batch), learned_alone(plain_twin(model, folders(kind)), batch))


@each_family
@pytest.mark.every(2)
def test_our_engine_samples_with_the_trainers_logprobs(kind: str, folders: Any) -> None:
    assert sampled_apart(*loaded(folders(kind))) <= SAMPLED


@each_family
@pytest.mark.every(4)
def test_checkpointed_layers_on_the_host_give_the_same_gradients(kind: str, folders: Any) -> None:
    batch = batch_of(GROUPS)
    expected = learned(Policy(loaded(folders(kind))[0]), batch)
    model, _ = loaded(folders(kind), checkpointing="offload")
    copies = LateCopies()
    with ActivationOffload(model.train(), copies, min_bytes=1):
        ours = learned(Policy(model), batch)
    assert copies.started > model.config.num_hidden_layers
    assert_alike(ours, expected)


@each_family
def test_our_modules_are_where_the_table_says_and_only_there(kind: str, folders: Any) -> None:
    row, (model, _) = FAMILIES[kind], loaded(folders(kind))
    layer = model.get_decoder().layers[-1]
    assert isinstance(layer, LeanLayer) is bool(row.layer)
    if row.layer and not row.vision:
        recorded = model(input_ids=torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
        assert len(recorded) == len(model.get_decoder().layers) + 1
    assert isinstance(layer.self_attn, LeanAttention) is row.attention.lean
    assert isinstance(layer.mlp, LeanMLP) is (row.mlp.lean and row.experts is None)
    assert isinstance(layer.mlp, RoutedBlock) is (row.experts is not None)
    norms = [one for one in layer.children() if type(one).__name__.endswith("Norm")]
    assert len(norms) == row.norms + bool(getattr(model.config, "hidden_size_per_layer_input", 0))
    assert all(isinstance(one, LeanRMSNorm) is row.norm.lean for one in norms)
    left = {type(module).__name__ for module in model.modules()}
    assert not left & {part.kind for part in (row.attention, row.mlp, row.experts) if part and part.lean}


@each_family
@pytest.mark.every(2)
def test_lora_is_on_every_projection_of_the_table_or_on_those_of_attention_only(kind: str, folders: Any) -> None:
    row = FAMILIES[kind]
    attention, mlp = {*row.attention.inner, "o_proj"}, {*row.mlp.inner, "down_proj"} if row.experts is None else set()
    attention |= {*DELTA_IN, DELTA_OUT} if row.delta_net else set()
    for only, wanted in ((False, attention | mlp), (True, attention)):
        model, _ = FastLanguageModel.from_pretrained(str(folders(kind)), max_seq_length=64, load_in_4bit=False)
        model = FastLanguageModel.get_peft_model(model, r=2, finetune_mlp_modules=not only)
        adapted = [path for path, module in model.named_modules() if hasattr(module, "lora_A")]
        assert {path.rpartition(".")[2] for path in adapted} == wanted
        owners = [path for path, _ in model.named_modules() if path.endswith(("_attn", ".mlp"))]
        assert len(adapted) == sum(hasattr(model.get_submodule(owner), name) and getattr(
            model.get_submodule(owner), name) is not None for owner in owners for name in wanted)


@pytest.mark.slow
@each_family
def test_a_saved_adapter_and_a_merged_model_compute_what_was_trained(
    kind: str, folders: Any, tmp_path: Path
) -> None:
    model, tokenizer = loaded(folders(kind))
    batch = batch_of(GROUPS)
    expected, _ = learned(Policy(model), batch)
    model.save_pretrained(str(tmp_path / "adapter"))
    again, _ = FastLanguageModel.from_pretrained(str(tmp_path / "adapter"), max_seq_length=64)
    assert torch.equal(learned(Policy(again), batch)[0], expected)
    model.save_pretrained_merged(str(tmp_path / "merged"), tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    exact = plain_twin(model, folders(kind)).merge_and_unload().state_dict()
    assert merged.keys() == exact.keys()
    for name, tensor in exact.items():  # rounded once, to 16 bits
        torch.testing.assert_close(merged[name], tensor, rtol=2**-8, atol=1e-6, msg=name)


@each_family
@pytest.mark.every(2)
def test_in_4_bits_packed_logprobs_are_those_of_each_sequence_alone(kind: str, folders: Any) -> None:
    model, _ = loaded(folders(kind), load_in_4bit=True)
    batch = batch_of(GROUPS)
    assert_alike(learned(Policy(model), batch), learned_alone(model, batch), gradients=10 * NEAR)


def test_every_family_that_trains_has_a_small_model() -> None:
    assert SHAPES.keys() == set(TRAINED)


def test_an_unknown_family_trains_on_plain_layers_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "helium" not in FAMILIES
    model, _ = loaded(saved_family("helium", tmp_path, head_dim=8))
    said = [record.message for record in caplog.records if "not checked here" in record.message]
    assert len(said) == 1 and "(helium)" in said[0] and "docs/families.md" in said[0]
    assert not any(isinstance(module, LeanAttention | LeanMLP | LeanRMSNorm) for module in model.modules())
    batch = batch_of(GROUPS)
    assert_alike(learned(Policy(model), batch), learned_alone(plain_twin(model, tmp_path), batch))


def test_sinks_and_windows_of_an_unknown_family_are_those_of_transformers(tmp_path: Path) -> None:
    assert "granite_swa" not in FAMILIES
    saved = saved_family("granite_swa", tmp_path, sliding_window=WINDOW, layer_types=LAYER_TYPES,
                         attention_multiplier=0.25)
    model, tokenizer = loaded(saved)
    batch = batch_of(GROUPS)
    assert_alike(learned(Policy(model), batch), learned_alone(plain_twin(model, saved), batch))
    assert sampled_apart(model, tokenizer) <= SAMPLED


@pytest.mark.parametrize(("kind", "words"), [("gemma2", "Gemma 2: its attention has soft-capped"),
                                             ("deepseek_v4", "DeepSeek-V4: its attention has keys of compressed")])
def test_a_family_that_cannot_be_right_is_refused_before_its_weights_are_read(
    kind: str, words: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"is of the family {words}.*; take a model of a family that trains here"):
        FastLanguageModel.from_pretrained(str(tmp_path), max_seq_length=64, load_in_4bit=False)


def test_experts_are_not_left_in_16_bits_in_silence(tmp_path: Path) -> None:
    rows: list[tuple[Any, tuple[str, ...]]] = []
    for kind in ("mixtral", "granitemoe", "qwen3_5_moe", "qwen2_moe", "qwen3_moe"):
        AutoConfig.for_model(kind).save_pretrained(tmp_path / kind)
        advice = "Take load_in_4bit=True" if kind == "qwen3_moe" else "Take a dense model, or Qwen3-MoE, gpt-oss in"
        rows += [((kind, form), ("is a mixture of experts", "stay in 16 bits", advice))
                 for form in ("load_in_4bit", "load_in_fp8")]

    def load(given: tuple[str, str]) -> Any:
        return FastLanguageModel.from_pretrained(str(tmp_path / given[0]), max_seq_length=64, **{given[1]: True})

    ours = ("qwen3_moe", "load_in_4bit")
    assert not_refused(load, [row for row in rows if row[0] != ours]) == []
    assert not_refused(load, [(ours, "no file named model.safetensors")], OSError) == []


def test_a_template_that_writes_tokens_which_the_tokenizer_lacks_is_refused_by_name(
    folders: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders("gemma4_text"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ '<|turn>user\\n' + messages[0].content + '<turn|>' }}")
    with pytest.raises(ValueError, match=r"\(Gemma 4 \(text\)\) writes <\|turn> and <turn\|>, and its tokenizer"):
        FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, load_in_4bit=False)
