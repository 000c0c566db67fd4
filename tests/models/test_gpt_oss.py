"""gpt-oss with its experts in MXFP4, as it is stored: log-probabilities, LoRA on experts, and sampling."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import NEAR, SAMPLED, assert_alike, sampled_apart
from gpt_oss import STACKS, gpt_oss_folder, plain_gpt_oss
from packed_problem import batch_of, learned, learned_alone
from safetensors.torch import load_file, save_file
from small_models import scatter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize
from lowmem_grpo.memory import cutting
from lowmem_grpo.models.policy import Policy

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NAMED = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]  # as the public notebooks name them
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GROUPS = [(150, [40, 7]), (9, [5, 12]), (1, [7])]  # (prompt, completions), in tokens; the window is 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_folder(tmp_path_factory.mktemp("gpt_oss"))


def adapted(folder: Path, targets: Any = NAMED, four_bit: bool = False, **options: Any) -> tuple[Any, Any]:
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=512, dtype=torch.float32, load_in_4bit=four_bit)
    model = FastLanguageModel.get_peft_model(
        model, r=3, target_modules=targets, **{"use_gradient_checkpointing": False, **options})
    return scatter(model, 0.1, of="lora_"), tokenizer


def twin(ours: Any, folder: Path) -> Any:
    """transformers' own model with the experts decoded, under PEFT's own LoRA with the same values."""
    plain = peft.get_peft_model(plain_gpt_oss(folder), peft.LoraConfig(
        r=3, lora_alpha=16, target_modules=ATTENTION, target_parameters=PARAMETERS))
    values = {}
    for name, value in ours.state_dict().items():
        if "lora_" in name:  # PEFT wraps the experts once for each parameter, the last one outside
            name = name.replace("experts.gate_up_proj.lora", "experts.base_layer.lora")
            values[name.replace("experts.down_proj.lora", "experts.lora")] = value
    missing, unexpected = plain.load_state_dict(values, strict=False)
    assert not unexpected and not [name for name in missing if "lora_" in name]
    return plain


def decoded_in_place(twin: Any, ours: Any) -> Any:
    """The same model, its linear layers with the values of ours in NF4."""
    for name, module in ours.named_modules():
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            weight = nf4_dequantize(NF4Weight.from_bitsandbytes(module.weight))
            twin.get_submodule(name).weight.data = weight
    return twin


def in_our_names(learned: Any) -> Any:
    logprobs, gradients = learned
    return logprobs, {name.replace("experts.base_layer.lora", "experts.gate_up_proj.lora").replace(
        "experts.lora", "experts.down_proj.lora"): value for name, value in gradients.items()}


@pytest.mark.parametrize("once", [False, True], ids=["side by side", "prompts once"])
def test_packed_logprobs_and_every_lora_gradient_are_those_of_plain_transformers_and_peft(
    once: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if once:
        monkeypatch.setattr(cutting, "PAIRS_A_CALL", -(10**9))
    model, _ = adapted(folder)
    batch = batch_of(GROUPS)
    ours, theirs = learned(Policy(model), batch), in_our_names(learned_alone(twin(model, folder), batch))
    assert sum("experts" in name for name in theirs[1]) == 8
    assert_alike(ours, theirs)


def test_in_4_bits_attention_is_in_nf4_and_experts_are_as_they_are_stored(folder: Path) -> None:
    model, _ = adapted(folder, four_bit=True)
    batch = batch_of(GROUPS)
    plain = decoded_in_place(twin(model, folder), model)
    assert not torch.equal(plain.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight,
                           plain_gpt_oss(folder).model.layers[0].self_attn.q_proj.weight)
    assert_alike(learned(Policy(model), batch), in_our_names(learned_alone(plain, batch)))


def test_our_engine_samples_with_the_trainers_logprobs_with_lora_on_experts(folder: Path) -> None:
    assert sampled_apart(*adapted(folder)) <= SAMPLED


@pytest.mark.parametrize("targets", [NAMED, ["o_proj"]])
def test_the_base_model_below_an_adapter_is_sampled_with_its_logprobs(targets: list[str], folder: Path) -> None:
    model, tokenizer = adapted(folder, targets)
    with Policy(model).base_model():
        assert sampled_apart(model, tokenizer) <= SAMPLED


def test_checkpointed_layers_give_the_same_gradients(folder: Path) -> None:
    batch = batch_of(GROUPS)
    expected = learned(Policy(adapted(folder)[0]), batch)
    assert_alike(learned(Policy(adapted(folder, use_gradient_checkpointing="offload")[0].train()), batch), expected,
                 NEAR)


@pytest.mark.parametrize("targets", [NAMED, [*ATTENTION, "gate_up_proj", "down_proj"],
                                     [*ATTENTION, "experts.gate_up_proj", "experts.down_proj"],
                                     r".*\.(\w_proj|experts\.\w+_proj)"])
def test_each_way_to_name_experts_puts_lora_on_all_of_them(targets: Any, folder: Path) -> None:
    model, _ = adapted(folder, targets)
    assert sum(hasattr(module, "lora_A") for module in model.modules()) == 2 * (4 + 2)


def test_target_parameters_name_experts_as_in_peft(folder: Path) -> None:
    model, _ = adapted(folder, ATTENTION, target_parameters=PARAMETERS)
    assert sum(hasattr(module, "lora_A") for module in model.modules()) == 2 * (4 + 2)
    assert model.get_submodule("base_model.model.model.layers.1.mlp.experts.down_proj").lora_A.default.weight.shape == (
        32 * 3, 96)


SECOND = ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"]


@pytest.mark.parametrize("options", [
    {"targets": "all-linear", "target_parameters": ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"]},
    {"targets": [*ATTENTION, *(f"layers.1.mlp.{part}_proj" for part in ("gate", "up", "down"))]},
])
def test_names_of_experts_in_one_layer_put_no_lora_on_those_of_others(options: Any, folder: Path) -> None:
    model, _ = adapted(folder, **options)
    paths = [name.removeprefix("base_model.model.") for name, each in model.named_modules() if hasattr(each, "lora_A")]
    assert [path for path in paths if ".self_attn." not in path] == SECOND and len(paths) == 8 + 2


@pytest.mark.parametrize("options", [
    {"lora_dropout": 0.1}, {"init_lora_weights": "eva"}, {"init_lora_weights": "orthogonal"}])
def test_after_refused_settings_the_model_is_as_it_was(options: Any, folder: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, load_in_4bit=False)
    with pytest.raises(ValueError, match="LoRA on experts"):
        FastLanguageModel.get_peft_model(model, target_modules=NAMED, **options)
    assert not [name for name, _ in model.named_parameters() if "lora_" in name]


def test_a_merge_in_place_is_refused_before_anything_is_merged(folder: Path) -> None:
    model, _ = adapted(folder)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(ValueError, match="not merged into experts in place"):
            merge()
        assert not any(getattr(module, "merged", False) for module in model.modules())


@pytest.mark.parametrize(("options", "words"), [
    ({"targets": [*ATTENTION, "gate_proj"]}, "gate_proj without up_proj"),
    ({"targets": [*ATTENTION, "router"]}, "the router, which stays frozen"),
    ({"target_parameters": ["7.mlp.experts.down_proj"]}, "target_parameters names .'7.mlp.experts.down_proj'., which"),
    ({"target_parameters": ["mlp.router.weight"]}, "target_parameters=.*gate_up_proj and down_proj of gpt-oss"),
    ({"lora_dropout": 0.1}, "LoRA on experts has no dropout"),
    ({"targets": ["experts.w1"]}, "does not have; its linear layers are q_proj.*gate_up_proj, down_proj"),
])
def test_what_cannot_be_trained_of_experts_is_refused_by_name(options: Any, words: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=words):
        adapted(folder, **options)


def test_other_weights_in_fp8_beside_experts_in_mxfp4_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="not held in FP8 beside them: take load_in_4bit=True"):
        FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, load_in_fp8=True)


def test_without_names_of_experts_only_attention_is_trained(folder: Path) -> None:
    model, _ = adapted(folder, None)
    paths = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert len(paths) == 8 and all(".self_attn." in path for path in paths)


def test_heads_in_groups_give_the_same_gradients(folder: Path) -> None:
    policy, batch = Policy(adapted(folder)[0]), batch_of(GROUPS)
    expected = learned(policy, batch)
    policy.head_groups = 2
    assert_alike(learned(policy, batch), expected)


def test_angles_are_those_of_transformers_yarn_where_weights_are_in_16_bits(folder: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(folder), max_seq_length=512, dtype=torch.bfloat16)
    rotary, fresh = model.inner.model.rotary_emb, GptOssRotaryEmbedding(model.config)
    positions = torch.arange(512)[None]
    assert type(rotary) is GptOssRotaryEmbedding and fresh.attention_scaling > 1
    for ours, theirs in zip(*(one(torch.zeros(1), positions) for one in (rotary, fresh)), strict=True):
        assert torch.equal(ours, theirs)


def changed(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a checkpoint whose tensors went through `change`."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


NAME = "model.layers.1.mlp.experts.down_proj"


def nan_scale(tensors: Any) -> None:
    tensors[f"{NAME}_scales"][3, 5, 1] = 255


def short_rows(tensors: Any) -> None:
    for part in ("blocks", "scales"):
        tensors[f"{NAME}_{part}"] = tensors[f"{NAME}_{part}"][:, :, :-1].contiguous()  # 64 columns of 96


def other_blocks(tensors: Any) -> None:
    tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"].view(32, 64, 6, 8)


def other_names(tensors: Any) -> None:
    for name in [name for name in tensors if name.endswith("_blocks")]:
        tensors[name.replace("_blocks", ".codes")] = tensors.pop(name)


def no_scales(tensors: Any) -> None:
    del tensors[f"{NAME}_scales"]


@pytest.mark.parametrize(("change", "words"), [
    (no_scales, r"lacks 1 tensors .* such as model\.layers\.1\.mlp\.experts\.down_proj\.scales"),
    (nan_scale, r"layers\.1\.mlp\.experts\.down_proj is stored in MXFP4, and 1 of .* scales are NaN"),
    (short_rows, r"blocks and scales are \(32, 64, 2, 16\) and \(32, 64, 2\), where its config has \(32, 64, 3, 16\)"),
    (other_blocks, r"blocks and scales are \(32, 64, 6, 8\)"), (other_names, "lacks 4 tensors"),
])
def test_a_damaged_checkpoint_is_refused_with_what_is_wrong(
    change: Any, words: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        FastLanguageModel.from_pretrained(str(changed(folder, tmp_path / "changed", change)), max_seq_length=64)


@pytest.mark.parametrize("four_bit", [False, True])
def test_a_file_that_was_cut_off_is_refused_with_the_models_name(
    four_bit: bool, folder: Path, tmp_path: Path
) -> None:
    cut = changed(folder, tmp_path / "cut", lambda tensors: None) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"weights of '.*cut' cannot be read \(.*fetch the model again"):
        FastLanguageModel.from_pretrained(str(cut.parent), max_seq_length=64, load_in_4bit=four_bit)


@pytest.mark.parametrize("four_bit", [False, True])
def test_experts_in_16_bits_are_loaded_too(four_bit: bool, tmp_path: Path) -> None:
    stored = gpt_oss_folder(tmp_path, "16bit")
    model, _ = FastLanguageModel.from_pretrained(
        str(stored), max_seq_length=64, load_in_4bit=four_bit, dtype=torch.float32)
    plain = plain_gpt_oss(stored)
    for number in range(2):
        ours, theirs = (each.model.layers[number].mlp.experts for each in (model.inner, plain))
        for name in STACKS:
            held = getattr(ours, name).frozen.weight.dequantized().view(32, -1, 64 if name in STACKS[:1] else 96)
            wanted = getattr(theirs, name).mT
            assert (held - wanted).abs().max() <= (0.15 * wanted.abs().max() if four_bit else 0)
