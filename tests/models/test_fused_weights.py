"""q, k, v (gate, up) in one buffer: the same parameters, the same model, the same checkpoint, and no second copy."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from accuracy import assert_as_accurate
from small_models import FUSED, SPLIT, save_wide, scatter
from torch import Tensor
from transformers import PreTrainedModel

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.fast_model import BareModel, FastPeftModel
from lowmem_grpo.kernels.frozen_weight import frozen_weight
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.models.fused_weights import fuse_weights, joined_weights
from lowmem_grpo.models.lora_layers import JoinedWeights
from lowmem_grpo.models.pretrained import Pretrained, compute_in

GROUPS = {"self_attn": SPLIT[:3], "mlp": SPLIT[4:6]}
FAMILIES = ["Llama", "Qwen2", "Gemma3Text"]  # without biases, with them, with norms of q and k
IDS = torch.tensor([[5, 6, 7, 8, 9]])
BOTH = pytest.mark.parametrize("four_bit", [False, True], ids=["16 bit", "NF4"])


def load(folder: Path, four_bit: bool) -> BareModel:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=64, load_in_4bit=four_bit)[0]


def apart(folder: Path, four_bit: bool) -> PreTrainedModel:
    """The model as it is stored, before the loader lays anything out."""
    return Pretrained(str(folder), str(folder), {}).load(torch.float32, "cpu", "nf4" if four_bit else "16bit")[0]


def adapt(model: BareModel) -> FastPeftModel:
    """The model under an adapter whose factors are both random."""
    return scatter(FastLanguageModel.get_peft_model(model, r=4, use_gradient_checkpointing=False))


def groups(model: Any) -> list[list[Any]]:
    """The weights of each group, by layer."""
    return [[getattr(getattr(layer, parent), name).weight for name in names]
            for layer in model.model.layers for parent, names in GROUPS.items()]


def storages(model: torch.nn.Module) -> dict[int, int]:
    """The bytes of every storage behind the parameters and what quantized them, each once."""
    tensors: list[Tensor] = []
    for parameter in model.parameters():
        tensors += frozen_weight(parameter).tensors
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def peak_of(run: Any) -> int:
    """The most bytes alive at once during a call, beyond those before it: every allocation and release is counted."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [(event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events()
               if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        live += change
        peak = max(peak, live)
    return peak


@BOTH
@pytest.mark.parametrize("family", FAMILIES)
def test_each_group_is_one_matrix_in_memory_with_the_values_it_had(
    family: str, four_bit: bool, tmp_path: Path
) -> None:
    model = apart(save_wide(tmp_path, family), four_bit)
    assert all(joined_weights([frozen_weight(weight) for weight in group]) is None for group in groups(model))
    before = [[dense(weight).clone() for weight in group] for group in groups(model)]
    shapes = {name: (p.shape, p.dtype, p.requires_grad, id(p)) for name, p in model.named_parameters()}
    assert fuse_weights(model) == []
    for group, values in zip(groups(model), before, strict=True):
        whole = joined_weights([frozen_weight(weight) for weight in group])
        assert whole is not None
        assert torch.equal(dense(whole), torch.cat(values))
        assert all(torch.equal(dense(weight), value) for weight, value in zip(group, values, strict=True))
    assert {name: (p.shape, p.dtype, p.requires_grad, id(p)) for name, p in model.named_parameters()} == shapes


def dense(weight: Any) -> Tensor:
    return frozen_weight(weight).dequantized()


def logits_and_gradients(folder: Path, four_bit: bool, fused: bool, wide: bool = False) -> list[Tensor]:
    """Return logits and gradients of the adapted model, its matrices apart or fused, in float32 or in float64."""
    bare = apart(folder, four_bit)
    assert not fused or fuse_weights(bare) == []
    model = adapt(BareModel(bare, load(folder, False).loaded))
    if wide:
        compute_in(bare, torch.float64)
        model.double()
    logits = model(input_ids=IDS).logits
    logits.log_softmax(-1)[0, :, 7].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@BOTH
def test_logits_and_gradients_are_those_of_separate_weights(four_bit: bool, tmp_path: Path) -> None:
    folder = save_wide(tmp_path, "Qwen2")
    separate, fused = (logits_and_gradients(folder, four_bit, fused) for fused in (False, True))
    assert len(separate) == 1 + 2 * 2 * 7
    if not four_bit:  # nothing else is computed
        assert all(torch.equal(one, other) for one, other in zip(separate, fused, strict=True))
        return
    truth = logits_and_gradients(folder, four_bit, False, wide=True)  # gradients of x are summed inside the products
    for ours, reference, exact in zip(fused, separate, truth, strict=True):
        assert_as_accurate("logits or a gradient", ours, reference, exact, 1e-6)


@BOTH
def test_nothing_is_held_twice_afterwards_and_one_group_at_most_meanwhile(four_bit: bool, tmp_path: Path) -> None:
    model = apart(save_wide(tmp_path, num_hidden_layers=4), four_bit)
    before, sizes = storages(model), [sum(w.nbytes for w in group) for group in groups(model)]
    # the profiler knows no release of what was there before it; so it sees everything laid out twice
    peak = peak_of(lambda: [fuse_weights(model) for _ in range(2)])
    scales = 1 + 1 / 16 if four_bit else 1  # beside the packed weights
    assert sum(sizes) <= peak <= (sum(sizes) + max(sizes)) * scales + 4096
    after = storages(model)
    assert len(after) < len(before)
    # each nested block of the double quantization has its own offset now: 4 bytes for 16,384 weights
    assert sum(after.values()) <= sum(before.values()) * (1.001 if four_bit else 1)


@BOTH
def test_a_saved_model_is_the_same_checkpoint(four_bit: bool, tmp_path: Path) -> None:
    folder = save_wide(tmp_path / "model")
    for name, fused in (("plain", False), ("fused", True)):
        model = load(folder, four_bit)
        assert not fused or fuse_weights(model.inner) == []
        model.save_pretrained(tmp_path / name)
        model.loaded.tokenizer.save_pretrained(tmp_path / name)
    plain, joined = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
                     for name in ("plain", "fused"))
    assert plain == joined and "model.safetensors" in plain
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "fused", four_bit)(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_layer_whose_matrices_end_inside_a_block_stays_as_it_is_and_is_named(tmp_path: Path) -> None:
    model = load(save_wide(tmp_path, num_key_value_heads=1, head_dim=32, num_attention_heads=8), four_bit=True)
    left = fuse_weights(model.inner)
    assert len(left) == 2
    assert "layers.0.self_attn.q_proj|k_proj|v_proj: weight 1, (32, 256), does not end at a multiple" in left[0]
    for group, fused in zip(groups(model), (False, True) * 2, strict=True):
        assert (joined_weights([frozen_weight(weight) for weight in group]) is not None) == fused
    with torch.no_grad():
        assert model(input_ids=IDS).logits.isfinite().all()


def test_weights_that_are_trained_or_differ_in_dtype_stay_as_they_are(tmp_path: Path) -> None:
    model = load(save_wide(tmp_path), four_bit=False)
    first, second = model.model.layers
    first.self_attn.k_proj.weight.requires_grad_(True)
    second.mlp.up_proj.to(torch.bfloat16)
    left = fuse_weights(model.inner)
    assert [entry.partition(":")[0] for entry in left] == [
        "model.layers.0.self_attn.q_proj|k_proj|v_proj", "model.layers.1.mlp.gate_proj|up_proj",
    ]
    assert all("expected frozen weights of one dtype" in entry for entry in left)
    assert joined_weights([frozen_weight(getattr(second.self_attn, name).weight) for name in SPLIT[:3]]) is not None


def test_a_family_that_stores_them_fused_is_left_alone(tmp_path: Path) -> None:
    model = load(save_wide(tmp_path, "Phi3", num_key_value_heads=4), four_bit=False)
    before = storages(model)
    assert fuse_weights(model.inner) == []
    assert storages(model) == before
    assert {name.rpartition(".")[2] for name, _ in model.named_modules()} >= set(FUSED)


@BOTH
def test_fusing_twice_changes_nothing_more_and_a_moved_model_still_computes(four_bit: bool, tmp_path: Path) -> None:
    model = load(save_wide(tmp_path), four_bit)
    with torch.no_grad():
        expected = model.eval()(input_ids=IDS).logits
        for _ in range(2):
            assert fuse_weights(model.inner) == []
            assert torch.equal(model(input_ids=IDS).logits, expected)
        if not four_bit:
            torch.testing.assert_close(model.to(torch.float64)(input_ids=IDS).logits.float(), expected, rtol=1e-3,
                                       atol=1e-3)


def test_adjacent_4_bit_weights_are_taken_as_one_and_found_anew_once_they_are_replaced(tmp_path: Path) -> None:
    attention = adapt(load(save_wide(tmp_path), four_bit=True)).get_base_model().model.layers[0].self_attn
    layers, weights = [attention.q_proj, attention.k_proj, attention.v_proj], JoinedWeights()
    (whole,) = weights.join(layers)
    assert isinstance(whole, NF4Weight) and whole.out_features == (256, 128, 128)
    assert weights.join(layers)[0] is whole
    layers[1].base_layer.weight = copy.deepcopy(layers[1].base_layer.weight)
    assert len(weights.join(layers)) == 3
