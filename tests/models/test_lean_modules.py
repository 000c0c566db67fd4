"""Our modules in the place of transformers' and PEFT's: the same numbers, names and adapters, with less memory."""

import copy
from typing import Any

import peft
import pytest
import torch
from memory import LiveStorage
from small_models import FAMILIES, FUSED, SPLIT, random_model, scatter
from tables import every_row
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowmem_grpo import FastLanguageModel, GRPOConfig
from lowmem_grpo.models.lean_modules import LeanMLP, LeanRMSNorm, make_lean
from lowmem_grpo.models.lora_layers import use_kernel_layers
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
IDS = torch.arange(3, 40)[None]


def adapted(model: PreTrainedModel, lean: bool, tile_rows: int | None = 8, **options: Any) -> peft.PeftModel:
    """The model with LoRA of which both factors matter, by our layers or by PEFT's."""
    targets = FUSED if model.config.model_type == "phi3" else SPLIT
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    if lean:
        use_kernel_layers(config, model)
    result = scatter(peft.get_peft_model(model.requires_grad_(False), config), 0.2, of="lora_")
    if lean:
        make_lean(result.get_base_model(), tile_rows)
    return result


def outcome(model: peft.PeftModel) -> dict[str, Tensor]:
    """Logits, and the gradient of every adapter tensor."""
    model.zero_grad()
    logits = model(IDS).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    logits.backward(direction.to(logits.dtype))
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(values: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each tensor, as a part of its largest true value."""
    assert values.keys() == truth.keys()
    return {name: float((values[name].double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
            for name, exact in truth.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tile_rows"), [(torch.float32, None), (torch.float32, 8), (torch.bfloat16, 8)])
@pytest.mark.every(2)
def test_errors_are_no_larger_than_those_of_transformers_and_peft(
    family: str, dtype: torch.dtype, tile_rows: int | None
) -> None:
    base = random_model(family).to(dtype)
    truth = outcome(adapted(copy.deepcopy(base).double(), lean=False))
    theirs = distance(outcome(adapted(copy.deepcopy(base), lean=False)), truth)
    ours = distance(outcome(adapted(base, lean=True, tile_rows=tile_rows)), truth)
    # deep random nets multiply a rounding by chance: the worst of all tensors is steadier than each of them
    assert max(ours.values()) <= 1.5 * max(theirs.values()) + 4 * ROUNDING[dtype]
    assert ours["logits"] <= 1.5 * theirs["logits"] + 4 * ROUNDING[dtype]


def test_modules_that_nobody_checked_stay_as_they_are() -> None:
    class LlamaMLP(nn.Module):
        """Of somebody else, by chance of the same name."""

    class LlamaAttention(nn.Module):
        """Likewise."""

    model = random_model("Llama")
    model.model.layers[0].mlp, model.model.layers[0].self_attn = LlamaMLP(), LlamaAttention()
    model.config.hidden_act = "relu2"
    make_lean(model, 8)
    assert not any(isinstance(module, LeanMLP) for module in model.modules())
    assert isinstance(model.model.layers[0].mlp, LlamaMLP)
    assert isinstance(model.model.layers[0].self_attn, LlamaAttention)
    assert isinstance(model.model.norm, LeanRMSNorm)


@pytest.mark.parametrize("four_bit", [False, True])
def test_a_layer_keeps_its_input_and_nothing_else(four_bit: bool) -> None:
    model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=four_bit, max_seq_length=64)
    layer = FastLanguageModel.get_peft_model(model, r=4).get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(50, layer.in_features, requires_grad=True)
    with LiveStorage() as storage:
        y = layer(x)
    assert storage.live == y.nbytes


def test_a_layer_and_an_mlp_go_pefts_own_way_where_the_kernel_does_not_cover_it() -> None:
    """Dropout in training, autocast, another dtype, merged weights."""
    plain, lean = (adapted(random_model("Llama"), kind, lora_dropout=0.5).train() for kind in (False, True))
    for autocast in (False, True):
        found = []
        for model in (plain, lean):
            torch.manual_seed(5)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found.append(model(IDS).logits.float())
        torch.testing.assert_close(*found, rtol=0.05 if autocast else 1e-4, atol=0.05 if autocast else 1e-4)
    plain.eval(), lean.eval()
    plain.merge_adapter(), lean.merge_adapter()
    torch.testing.assert_close(lean(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)


def test_the_adapter_can_be_turned_off_switched_and_merged() -> None:
    plain, lean = (adapted(random_model("Qwen3"), kind).eval() for kind in (False, True))
    for model in (plain, lean):
        targets = list(model.peft_config["default"].target_modules)
        torch.manual_seed(9)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))

    def check() -> None:
        torch.testing.assert_close(lean(IDS).logits, plain(IDS).logits, rtol=1e-4, atol=1e-4)

    with plain.disable_adapter(), lean.disable_adapter():
        check()
    for name in ("other", "default"):
        plain.set_adapter(name), lean.set_adapter(name)
        check()
    torch.testing.assert_close(
        lean.merge_and_unload()(IDS).logits, plain.merge_and_unload()(IDS).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
def test_training_with_checkpointing_makes_less_than_half_of_what_pefts_layers_make() -> None:
    model = random_model("Llama").to(torch.bfloat16)
    wide = copy.deepcopy(model.config)
    wide.hidden_size, wide.intermediate_size, wide.num_attention_heads = 64, 512, 4
    peaks = []
    for lean in (False, True):
        torch.manual_seed(0)
        small = adapted(type(model)(wide).to(torch.bfloat16), lean, tile_rows=64).train()
        base = small.get_base_model()
        base.gradient_checkpointing_enable({"use_reentrant": False})
        with LiveStorage() as storage:
            hidden = base.model(torch.ones(1, 1024, dtype=torch.long), use_cache=False).last_hidden_state
            hidden.sum().backward()
        peaks.append(storage.peak)
    assert peaks[1] < 0.5 * peaks[0]


def test_the_tile_of_the_mlp_can_be_set_where_there_is_checkpointing() -> None:
    def tile(**options: Any) -> int | None:
        model, _ = FastLanguageModel.from_pretrained("tiny", load_in_4bit=False, max_seq_length=64)
        model = FastLanguageModel.get_peft_model(model, r=4, **options)
        (found,) = {module.tile_rows for module in model.modules() if isinstance(module, LeanMLP)}
        return found

    assert tile() == 4096
    assert tile(mlp_tile=16, use_gradient_checkpointing=True) == 16
    assert tile(use_gradient_checkpointing=False) is None
    with pytest.raises(ValueError, match="mlp_tile is 0; it must be at least 1"):
        tile(mlp_tile=0)
    with pytest.raises(ValueError, match="mlp_tile is 16 and use_gradient_checkpointing=False"):
        tile(mlp_tile=16, use_gradient_checkpointing=False)


def test_the_chunk_of_logits_can_be_set_and_changes_nothing() -> None:
    model = adapted(random_model("Llama"), lean=True)
    rollout = Rollout(list(range(5, 30)), [0.0] * 25, "stop")
    (batch,) = pack([RolloutGroup({}, [3, 4], [rollout])])
    chunked, whole = (Policy(model, logits_chunk=chunk).logprobs(batch, 1.0) for chunk in (3, None))
    torch.testing.assert_close(chunked, whole)
    with pytest.raises(ValueError, match="logits_chunk is 0; it must be a whole number, at least 1"):
        GRPOConfig(logits_chunk=0)


@every_row("family", FAMILIES)
def test_attention_has_every_attribute_of_the_module_that_it_stands_for(family: str) -> None:
    plain, lean = random_model(family), random_model(family)
    make_lean(lean, None)
    for one, other in zip(plain.model.layers, lean.model.layers, strict=True):
        public = {name: value for name, value in vars(one.self_attn).items() if not name.startswith("_")}
        assert {name: getattr(other.self_attn, name) for name in public if name != "config"} == {
            name: value for name, value in public.items() if name != "config"
        }
        assert other.self_attn.config is lean.config


@every_row("family", FAMILIES)
def test_decoding_with_a_cache_gives_what_transformers_attention_gives(family: str) -> None:
    plain, lean = random_model(family), random_model(family)
    make_lean(lean, None)
    results = []
    for model in (plain, lean):
        with torch.no_grad():
            first = model(IDS[:, :20], use_cache=True)
            results.append(model(IDS[:, 20:], past_key_values=first.past_key_values).logits)
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


def test_an_attention_function_that_is_not_registered_is_refused_by_name() -> None:
    model = random_model("Llama")
    make_lean(model, None)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation is 'eager'"):
        model(IDS)
