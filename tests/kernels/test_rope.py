"""rope against float64 truth, against transformers with every scaling of its frequencies, and the memory it takes."""

import importlib
from itertools import product
from typing import Any

import pytest
import torch
from accuracy import assert_each_as_accurate, interpreted
from card import CARD, DEVICES, HALVES, gpu
from memory import LiveStorage
from tables import every_row
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3 import modeling_qwen3

from lowmem_grpo.kernels.rope import rope, rope_ref

module = importlib.import_module("lowmem_grpo.kernels.rope")  # the package gives its function this name
FLOAT32 = 1e-6  # slack for products contracted into one step, relative to the largest value
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Q_HEADS, K_HEADS = 6, 2
SHAPES = [  # batch, tokens, head width, turning columns, batch of cos and sin (0: none)
    (1, 1, 2, 2, 1), (2, 63, 8, 8, 2), (2, 7, 10, 6, 1), (1, 500, 16, 16, 0), (3, 5, 96, 72, 3), (2, 3, 256, 256, 0),
]


def problem(
    shape: tuple[int, ...], dtype: torch.dtype, heads_first: bool = True, angle_dtype: Any = None, device: Any = "cpu"
) -> dict[str, Tensor]:
    """q, k, cos, sin and gradients of the results; both halves of cos and sin differ, as they may."""
    batch, tokens, width, turning, angle_batch = shape
    generator = torch.Generator().manual_seed(tokens)

    def heads(count: int) -> Tensor:
        x = torch.randn(batch, tokens, count, width, generator=generator)
        return (x.transpose(1, 2).contiguous() if heads_first else x).to(device, dtype)

    angle = 3 * torch.randn(*([angle_batch] if angle_batch else []), tokens, turning, generator=generator)
    cos, sin = (values.to(device, angle_dtype or dtype) for values in (angle.cos(), angle.sin()))
    return {"q": heads(Q_HEADS), "k": heads(K_HEADS), "cos": cos, "sin": sin,
            "grad_q": heads(Q_HEADS), "grad_k": heads(K_HEADS)}


def outcome(function: Any, tensors: dict[str, Tensor], dtype: Any = None, **options: Any) -> dict[str, Tensor]:
    """Turned q and k and the gradients of q and k."""
    q, k, cos, sin, grad_q, grad_k = (values.to(dtype) for values in tensors.values())
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    results = function(*(leaf * 1 for leaf in leaves), cos, sin, **options)  # not leaves, as in a model
    found = torch.autograd.grad(results, leaves, [grad_q, grad_k])
    return dict(zip(("q", "k", "grad_q", "grad_k"), (*results, *found), strict=True))


def assert_accurate(tensors: dict[str, Tensor], heads_first: bool, ours: dict[str, Tensor]) -> None:
    truth = outcome(rope_ref, tensors, torch.float64, heads_first=heads_first)
    reference = outcome(rope_ref, tensors, heads_first=heads_first)
    assert_each_as_accurate(ours, reference, truth, FLOAT32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_no_larger_than_the_references(dtype: torch.dtype, device: torch.device) -> None:
    larger, angle_dtypes = [(2, 1025, 128, 128, 1), (1, 4099, 128, 96, 1)], (None, torch.float32)
    shapes, angle_dtypes = (SHAPES + larger, angle_dtypes) if device == CARD else (SHAPES, angle_dtypes[:1])
    for shape, heads_first, angle_dtype in product(shapes, (True, False), angle_dtypes):
        tensors = problem(shape, dtype, heads_first, angle_dtype, device)
        for in_place in (True, False):
            assert_accurate(tensors, heads_first, outcome(rope, tensors, heads_first=heads_first, in_place=in_place))


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_results_on_a_card_are_those_of_transformers_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = problem((2, 65, 96, 72, 2), dtype, device="cuda")
    theirs, mine = outcome(modeling_phi3.apply_rotary_pos_emb, tensors), outcome(rope, tensors)
    for name, values in theirs.items():
        assert torch.equal(mine[name], values), name


def outcomes_of_kernels(tensors: dict[str, Tensor], heads_first: bool) -> list[dict[str, Tensor]]:
    """Turned q and k and gradients from both Triton launchers: into new tensors, and in place."""
    cos, sin = module.angles(tensors["cos"]), module.angles(tensors["sin"])
    results = []
    for launcher in (module.rope_new_triton, module.rope_in_place_triton):
        found = []
        for first, second, backward in (("q", "k", False), ("grad_q", "grad_k", True)):
            pair = tensors[first].clone(), tensors[second].clone()
            found += launcher(*pair, cos, sin, heads_first, backward) or pair
        results.append(dict(zip(("q", "k", "grad_q", "grad_k"), found, strict=True)))
    return results


@interpreted
@pytest.mark.parametrize(("shape", "heads_first"), [
    (SHAPES[0], True), ((1, 9, 8, 8, 1), False), ((2, 3, 10, 6, 2), True), ((2, 3, 10, 6, 2), False),
    ((1, 5, 96, 72, 0), True), (SHAPES[-1], False),
])
@pytest.mark.every(2)
def test_the_kernels_errors_are_no_larger_than_the_references(shape: tuple[int, ...], heads_first: bool) -> None:
    tensors = problem(shape, torch.float32, heads_first)
    for results in outcomes_of_kernels(tensors, heads_first):
        assert_accurate(tensors, heads_first, results)


@interpreted
def test_the_kernels_turn_more_heads_than_fit_a_tile() -> None:
    q, k, grad_q, grad_k = (torch.randn(1, heads, 2, 512) for heads in (9, 5, 9, 5))
    angle = torch.randn(2, 512)
    tensors = {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin(), "grad_q": grad_q, "grad_k": grad_k}
    assert module.launch_rule(256).constexprs["BLOCK_H"] < 5
    for results in outcomes_of_kernels(tensors, True):
        assert_accurate(tensors, True, results)


@interpreted
def test_the_kernel_rounds_each_product_as_transformers_does() -> None:
    tensors = problem((2, 3, 64, 64, 2), torch.float16)
    theirs = outcome(modeling_llama.apply_rotary_pos_emb, tensors)
    for mine in outcomes_of_kernels(tensors, True):
        for name, values in theirs.items():
            assert torch.equal(mine[name], values), name


@interpreted
def test_the_kernel_rounds_once_with_float32_angles() -> None:
    tensors = problem((2, 3, 64, 64, 2), torch.float16, angle_dtype=torch.float32)
    theirs = modeling_llama.apply_rotary_pos_emb(tensors["q"], tensors["k"], tensors["cos"], tensors["sin"])
    for mine in outcomes_of_kernels(tensors, True):
        for ours, other in zip((mine["q"], mine["k"]), theirs, strict=True):
            assert (ours == other.half()).double().mean() > 0.999  # float32 sums may differ in the last bit


@interpreted
def test_the_kernels_read_and_write_by_strides() -> None:
    tensors = problem((2, 2, 10, 6, 2), torch.float32)
    expected = outcomes_of_kernels(tensors, True)[0]
    cos, sin = module.angles(tensors["cos"].mT.contiguous().mT), module.angles(tensors["sin"])
    packed = torch.cat((tensors["q"], tensors["k"]), 1).transpose(1, 2).contiguous().transpose(1, 2)
    q, k = packed.split((Q_HEADS, K_HEADS), 1)  # as a fused projection gives them
    columns_apart = q.mT.contiguous().mT
    heads_apart = torch.stack((q, q), 2).flatten(1, 2)[:, ::2]
    for first, launcher in ((columns_apart, module.rope_new_triton), (heads_apart, module.rope_new_triton),
                            (q, module.rope_new_triton), (q, module.rope_in_place_triton)):
        results = launcher(first, k, cos, sin, True, False) or (q, k)
        assert torch.equal(results[0], expected["q"]) and torch.equal(results[1], expected["k"])


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
}
SIZES = {"hidden_size": 96, "num_attention_heads": Q_HEADS, "num_key_value_heads": K_HEADS, "head_dim": 16,
         "max_position_embeddings": 32}


def scaling(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0} | parameters}


def rotary_of(case: str) -> tuple[Any, Any, dict[str, Any]]:
    """The rotary embedding of a family, its apply_rotary_pos_emb, and more arguments of the embedding."""
    if case.startswith("Qwen3"):
        return modeling_qwen3.Qwen3RotaryEmbedding(Qwen3Config(**SIZES)), modeling_qwen3, {}
    if case.startswith("Gemma3"):
        config = Gemma3TextConfig(**SIZES, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
        return modeling_gemma3.Gemma3RotaryEmbedding(config), modeling_gemma3, {"layer_type": case.split()[1]}
    if case.startswith("Phi3"):
        turning = 12 if "partial" in case else 16
        factors = {"short_factor": [1.0 + i / 8 for i in range(turning // 2)],
                   "long_factor": [2.0 + i for i in range(turning // 2)]}
        parameters = scaling(rope_type="longrope", partial_rotary_factor=turning / 16, **factors,
                             original_max_position_embeddings=32)
        config = Phi3Config(**SIZES | {"max_position_embeddings": 128}, **parameters, pad_token_id=0,
                            original_max_position_embeddings=32)
        return modeling_phi3.Phi3RotaryEmbedding(config), modeling_phi3, {}
    config = LlamaConfig(**SIZES, **scaling(**SCALINGS[case]))
    return modeling_llama.LlamaRotaryEmbedding(config), modeling_llama, {}


CASES = [*SCALINGS, "Qwen3", "Gemma3 sliding_attention", "Gemma3 full_attention", "Phi3", "Phi3 partial"]


def angles_of(case: str, dtype: torch.dtype, tokens: int) -> tuple[Tensor, Tensor, Any]:
    """cos and sin (2, tokens, R) of a family for positions that start at 0 and at 5, and its function."""
    rotary, family, options = rotary_of(case)
    positions = torch.arange(tokens)[None] + torch.tensor([[0], [5]])
    cos, sin = rotary(torch.empty(0, dtype=dtype), positions, **options)
    return cos, sin, family.apply_rotary_pos_emb


@every_row("case", CASES)
def test_results_and_gradients_are_those_of_transformers(case: str) -> None:
    for dtype, tokens in product(DTYPES, (9, 40)):  # below and above the length that the model was trained for
        cos, sin, apply_rotary_pos_emb = angles_of(case, dtype, tokens)
        tensors = problem((2, tokens, 16, 16, 2), dtype) | {"cos": cos, "sin": sin}
        theirs = outcome(apply_rotary_pos_emb, tensors)
        ours = outcome(rope, tensors)
        for name, values in theirs.items():
            assert torch.equal(ours[name], values), (name, dtype, tokens)


def test_the_scalings_differ_so_that_each_is_seen() -> None:
    seen = [angles_of(case, torch.float32, 40)[0] for case in CASES if not case.startswith("Qwen3")]
    for index, cos in enumerate(seen):
        assert not any(cos.shape == other.shape and torch.equal(cos, other) for other in seen[:index])


@pytest.mark.parametrize("dtype", HALVES)
def test_float32_angles_give_transformers_result_rounded_once(dtype: torch.dtype) -> None:
    tensors = problem((2, 9, 16, 16, 2), dtype, angle_dtype=torch.float32)
    theirs = modeling_llama.apply_rotary_pos_emb(*list(tensors.values())[:4])
    ours = rope(*list(tensors.values())[:4])
    for mine, other in zip(ours, theirs, strict=True):
        assert other.dtype == torch.float32 and mine.dtype == dtype and torch.equal(mine, other.to(dtype))
    for mine, reference in zip(ours, rope_ref(*list(tensors.values())[:4]), strict=True):
        assert reference.dtype == dtype and torch.equal(mine, reference)


def test_packed_tokens_are_turned_like_a_batch_of_one() -> None:
    tensors = problem((1, 63, 16, 12, 1), torch.float32, heads_first=False)
    expected = outcome(rope, tensors, heads_first=False)
    packed = {name: values[0] for name, values in tensors.items()}
    for angle in (packed, packed | {name: tensors[name] for name in ("cos", "sin")}):
        for name, values in outcome(rope, angle, heads_first=False).items():
            assert torch.equal(values, expected[name][0]), name
        for name, values in outcome(rope_ref, angle, heads_first=False).items():
            assert torch.equal(values, expected[name][0]), name


def test_backward_is_the_rotation_by_minus_the_angle() -> None:
    tensors = problem((2, 9, 16, 16, 2), torch.float64)
    angle = torch.randn(2, 9, 8, dtype=torch.float64).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    ours = outcome(rope, tensors | {"cos": cos, "sin": sin})
    turned = rope_ref(tensors["grad_q"], tensors["grad_k"], cos, -sin)
    torch.testing.assert_close((ours["grad_q"], ours["grad_k"]), turned)


def test_in_place_overwrites_and_returns_its_inputs_without_gradients() -> None:
    q, k, cos, sin, *_ = problem((2, 7, 10, 6, 2), torch.bfloat16).values()
    expected, given = rope(q, k, cos, sin), (q.clone(), k.clone())
    with LiveStorage() as storage:
        results = rope(q, k, cos, sin, in_place=True)
    assert storage.peak == 0
    assert results[0] is q and results[1] is k
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    compiled = torch.compile(rope, backend="aot_eager", fullgraph=True)(*given, cos, sin, in_place=True)
    torch.testing.assert_close((*compiled, *given), (*expected, *expected))


def test_results_keep_the_layout_of_the_projections() -> None:
    q, k, cos, sin, *_ = problem((2, 7, 10, 6, 2), torch.float32).values()
    q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    for x in rope(q, k, cos, sin):
        assert x.transpose(1, 2).is_contiguous()


def test_gradients_shared_with_others_stay_as_they_are() -> None:
    tensors = problem((2, 7, 10, 10, 2), torch.float32)
    q, k = tensors["q"].requires_grad_(), tensors["k"].requires_grad_()
    turned = rope(q, k, tensors["cos"], tensors["sin"])
    grads = tensors["grad_q"].clone(), tensors["grad_k"].clone()
    torch.autograd.grad(turned, (q, k), grads)
    assert torch.equal(grads[0], tensors["grad_q"]) and torch.equal(grads[1], tensors["grad_k"])


def test_what_is_overwritten_goes_on_with_the_gradient_of_the_result() -> None:
    tensors = problem((2, 7, 10, 6, 2), torch.float32)
    expected = outcome(rope, tensors)
    leaves = tensors["q"].requires_grad_(), tensors["k"].requires_grad_()
    q, k = (leaf * 1 for leaf in leaves)
    results = rope(q, k, tensors["cos"], tensors["sin"], in_place=True)
    assert results[0] is q and results[1] is k
    found = torch.autograd.grad((q, k), leaves, (tensors["grad_q"], tensors["grad_k"]))
    torch.testing.assert_close(found, (expected["grad_q"], expected["grad_k"]))


def test_in_place_on_views_gives_the_gradient_of_what_they_view() -> None:
    tensors = problem((2, 7, 16, 16, 2), torch.float32)
    gradients = []
    for in_place in (False, True):
        projected = torch.cat((tensors["q"], tensors["k"]), 1).requires_grad_()
        views = (projected * 1)[:, :Q_HEADS], (projected * 1)[:, Q_HEADS:]
        other = views[0].square()
        turned = rope(*views, tensors["cos"], tensors["sin"], in_place=in_place)
        gradients += torch.autograd.grad(turned, projected, (tensors["grad_q"], tensors["grad_k"]))
    torch.testing.assert_close(*gradients)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()  # another operation that saved what is overwritten


def test_only_the_results_are_made_and_in_backward_the_gradients() -> None:
    tensors = problem((2, 63, 16, 16, 2), torch.bfloat16)
    q, k = tensors["q"].requires_grad_(), tensors["k"].requires_grad_()
    both = q.nbytes + k.nbytes
    with LiveStorage() as storage:
        turned = rope(q, k, tensors["cos"], tensors["sin"])
        assert storage.live == storage.peak == both
        torch.autograd.grad(turned, (q, k), (tensors["grad_q"], tensors["grad_k"]))
    assert storage.peak == 2 * both


@pytest.mark.parametrize("in_place", [True, False])
def test_no_tokens_give_no_results_and_no_k_heads_turn_q_alone(in_place: bool) -> None:
    none = problem((2, 0, 10, 6, 2), torch.float32)
    assert outcome(rope, none, in_place=in_place)["grad_q"].shape == (2, Q_HEADS, 0, 10)
    some = problem((2, 7, 10, 6, 2), torch.float32)
    expected = rope(*list(some.values())[:4])[0]
    q, k = rope(some["q"], some["k"][:, :0], some["cos"], some["sin"], in_place=in_place)
    assert torch.equal(q, expected) and k.shape == (2, 0, 7, 10)


def test_every_width_has_a_compiled_configuration_without_shared_entries() -> None:
    listed = [variant.launch for variant in module.variants(90, torch.bfloat16)]
    for turning in [2, 64, 72, 96, 128, 256, module.MAX_WIDTH]:
        launch = module.launch_rule(turning // 2)
        assert launch in listed
        tile = launch.constexprs["BLOCK_H"] * launch.constexprs["BLOCK_R"]
        assert 2 * launch.constexprs["BLOCK_R"] >= turning and tile >= 32 * launch.num_warps
