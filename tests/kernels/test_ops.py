"""What all kernels owe torch: derivatives, any strides, gradients of one number, the compiler, opcheck, no second
derivative."""

import pkgutil
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from fp8_weights import in_fp8
from mixtures import problem as expert_problem
from nf4_problem import quantized
from tables import every_row
from torch import Tensor

import lowmem_grpo.models
from lowmem_grpo.kernels import linear_divergence, linear_logprobs
from lowmem_grpo.kernels.custom_op import FirstOrderOnly
from lowmem_grpo.kernels.delta_rule import delta_rule
from lowmem_grpo.kernels.draw_tokens import draw_tokens
from lowmem_grpo.kernels.frozen import frozen_linear
from lowmem_grpo.kernels.glu import geglu, swiglu
from lowmem_grpo.kernels.logits import LogitShape
from lowmem_grpo.kernels.lora import lora_linear
from lowmem_grpo.kernels.lora_factors import LoRA
from lowmem_grpo.kernels.lora_mlp import lora_mlp
from lowmem_grpo.kernels.lora_up import lora_up_op
from lowmem_grpo.kernels.nf4_linear import nf4_linear
from lowmem_grpo.kernels.packed_to_padded import packed_to_padded, padded_to_packed
from lowmem_grpo.kernels.rms_norm import rms_norm
from lowmem_grpo.kernels.rope import rope
from lowmem_grpo.kernels.routed_experts import routed_experts
from lowmem_grpo.kernels.thin_products import thin_products
from lowmem_grpo.kernels.varlen import VarlenSequences
from lowmem_grpo.models.attention_sinks import attention_with_sinks
from lowmem_grpo.models.head_groups import by_head_groups
from lowmem_grpo.models.packed_attention import parts
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.trained_embedding import RowGradients
from lowmem_grpo.types import Rollout, RolloutGroup

glu, norm, rotary, spreading = (import_module(f"lowmem_grpo.kernels.{name}")
                                for name in ("glu", "rms_norm", "rope", "packed_to_padded"))  # as functions are called
GROUP = RolloutGroup({}, [1] * 4, [])
BATCH = collate([(GROUP, Rollout([2] * length, [0.0] * length, "stop")) for length in (3, 2, 6)])
TABLES = BATCH.sources, BATCH.places, BATCH.copies, BATCH.max_seqlen
TARGETS = torch.arange(63) * 15


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors, the same for the same shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


TEACHER, HEAD = numbers((63, 33), (1003, 33))
ANGLES = numbers((2, 7, 6), (2, 7, 6))  # in place of cos and sin: both halves of each differ, as they may


def turned(q: Tensor, k: Tensor, **options: bool) -> tuple[Tensor, Tensor]:
    return rope(q, k, *(one.to(q.dtype) for one in ANGLES), **options)


def attended(q: Tensor, k: Tensor, v: Tensor, heads: slice = slice(None)) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


HEADS, NARROW = (2, 4, 7, 10), (2, 2, 7, 10)  # of q and k
# A function of tensors (which get gradients), and their shapes; "* 1" makes results of them, as in a model.
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "swiglu": (lambda gate, up: swiglu(gate * 1, up * 1), [(4, 6, 33)] * 2),
    "swiglu, fused": (lambda both: swiglu(both * 1), [(4, 6, 66)]),
    "geglu": (lambda gate, up: geglu(gate, up, approximate="none"), [(4, 6, 33)] * 2),
    "geglu by tanh, fused": (lambda both: geglu(both, approximate="tanh"), [(4, 6, 66)]),
    "rms_norm": (lambda x, weight: rms_norm(x, weight, offset=1.0), [(4, 6, 33), (33,)]),
    "rms_norm of a sum": (lambda x, weight, r: rms_norm(x, weight, residual=r), [(4, 6, 33), (33,), (4, 6, 33)]),
    "rope": (lambda q, k: turned(q * 1, k * 1), [HEADS, NARROW]),
    "rope, tokens first": (lambda q, k: turned(q, k, heads_first=False), [(2, 7, 4, 10), (2, 7, 2, 10)]),
    "packed_to_padded": (lambda q, k: packed_to_padded([q, k], *TABLES),
                         [(len(BATCH.input_ids), heads, 8) for heads in (4, 2)]),
    "padded_to_packed": (lambda x: padded_to_packed(x, *TABLES[:2]), [(3, 4, BATCH.max_seqlen, 8)]),
    "linear_divergence": (
        lambda hidden: linear_divergence(hidden, TEACHER.to(hidden), HEAD.to(hidden), beta=0.3).divergence, [(63, 33)]
    ),
    "linear_divergence of a trained head": (
        lambda hidden, weight: linear_divergence(hidden, TEACHER.to(hidden), weight, HEAD.to(hidden)).divergence,
        [(63, 33), (1003, 33)]),
    "linear_logprobs": (lambda hidden, weight: linear_logprobs(hidden, weight, TARGETS), [(63, 33), (1003, 33)]),
}


def outcome(function: Any, inputs: list[Tensor], change: Any = lambda x: x, plain: bool = False) -> list[Tensor]:
    """The results and the gradients of the inputs, for random gradients or (`plain`) ones; all `change`d before."""
    leaves = [change(one).detach().requires_grad_() for one in inputs]
    results = function(*leaves)
    results = [results] if torch.is_tensor(results) else list(results)
    grads = numbers(*(one.shape for one in results))
    grads = [change(torch.ones_like(one) if plain else one) for one in grads]
    return results + list(torch.autograd.grad(results, leaves, grads))


@every_row("name", FUNCTIONS)
def test_gradients_are_the_derivatives(name: str) -> None:
    leaves = [one.double().requires_grad_() for one in numbers(*FUNCTIONS[name][1])]
    assert torch.autograd.gradcheck(FUNCTIONS[name][0], leaves, fast_mode=True)


@every_row("name", FUNCTIONS)
def test_tensors_and_gradients_of_any_strides_are_read_right(name: str) -> None:
    def strided(x: Tensor, dimension: int) -> Tensor:
        if x.ndim == 1:
            return torch.stack((x, x), 1)[:, 0]
        last = -1 if x.ndim == 2 else dimension  # its entries lie farthest apart
        return x.movedim(last, 0).contiguous().movedim(0, last)

    function, inputs = FUNCTIONS[name][0], numbers(*FUNCTIONS[name][1])
    for dimension in (-1, -2):
        assert not any(strided(one, dimension).is_contiguous() for one in inputs)
        found = outcome(function, inputs, partial(strided, dimension=dimension))
        torch.testing.assert_close(found, outcome(function, inputs))


@every_row("name", FUNCTIONS)
def test_a_gradient_that_is_one_number_for_all_entries_is_read_right(name: str) -> None:
    function, inputs = FUNCTIONS[name][0], numbers(*FUNCTIONS[name][1])
    leaves = [one.clone().requires_grad_() for one in inputs]
    results = function(*leaves)
    total = sum(one.sum() for one in ([results] if torch.is_tensor(results) else results))
    expected = outcome(function, inputs, plain=True)[-len(leaves):]
    torch.testing.assert_close(list(torch.autograd.grad(total, leaves)), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.every(2)
def test_compiled_results_and_gradients_are_the_same(name: str) -> None:
    function, inputs = FUNCTIONS[name][0], numbers(*FUNCTIONS[name][1])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outcome(compiled, inputs), outcome(function, inputs))


EXPERTS = expert_problem(5, (3, 2, 33, 7), "plain")
SQUARE, ADAPTER = torch.randn(33, 33, generator=torch.Generator().manual_seed(1)), [(4, 33), (5, 33), (33, 5)]
MORE: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {  # which have tests of their own
    "groups of heads": (lambda q, k, v: by_head_groups(q * 1, k * 1, v * 1, attended, 2), [(1, 4, 7, 8)] * 3),
    "sinks": (lambda q, k, v: attention_with_sinks(q, k, v, SQUARE[0, :4, None], None, True, None), [(1, 4, 7, 8)] * 3),
    "ranges of heads": (lambda x: parts(x * 1, [(0, 5), (2, 7)]), [(1, 2, 7, 8)]),
    "lora_linear": (lambda x, a, b: lora_linear(x, [SQUARE], [LoRA(a, b)]), ADAPTER),
    "nf4_linear": (lambda x, a, b: nf4_linear(x, quantized(33, 33, torch.float32), a, b), ADAPTER),
    "frozen_linear": (lambda x: frozen_linear(x, in_fp8((33, 33))), [(4, 33)]),
    "lora_mlp": (lambda x, a, b: lora_mlp(x, SQUARE, SQUARE, SQUARE, up_lora=LoRA(a, b)), ADAPTER),
    "lora_mlp in tiles": (
        lambda x, a, b: lora_mlp(x, SQUARE, SQUARE, SQUARE, up_lora=LoRA(a, b), tile_rows=3), ADAPTER
    ),
    "routed_experts": (
        lambda x, weights: routed_experts(x, EXPERTS["ids"], weights, EXPERTS["gate_up"], EXPERTS["down"]),
        [(5, 33), (5, 2)],
    ),
    "delta_rule": (
        lambda q, k, v, g, beta: delta_rule(q, k, v, -g.abs(), beta, VarlenSequences((5, 2), q.device)),
        [(7, 2, 4), (7, 2, 4), (7, 2, 3), (7, 2), (7, 2)],
    ),
    "linear_logprobs of a frozen head": (lambda hidden: linear_logprobs(hidden, SQUARE, TARGETS[:2]), [(2, 33)]),
    "rows of a head": (lambda values: RowGradients.apply(
        values, SQUARE[:2], TARGETS[:2], TARGETS[:3], None, LogitShape(), SQUARE[0, :2], SQUARE[0, :2])[0], [(3, 33)]),
}


def autograd_functions() -> set[str]:
    """The names of all autograd functions of the package."""
    for part in (lowmem_grpo.kernels, lowmem_grpo.models):
        for found in pkgutil.iter_modules(part.__path__, f"{part.__name__}."):
            import_module(found.name)
    every = {one for one in torch.autograd.Function.__subclasses__() if one.__module__.startswith("lowmem_grpo.")}
    return {one.__name__ for one in every - {FirstOrderOnly}}


def graph_of(result: Tensor) -> set[str]:
    """The names of the nodes that a result was made by."""
    waiting, seen = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]
    return {node.name() for node in seen}


def test_a_gradient_penalty_through_any_autograd_function_is_refused_and_not_ignored() -> None:
    tried = set()
    for name, (function, shapes) in (FUNCTIONS | MORE).items():
        leaves = [one.requires_grad_() for one in numbers(*shapes)]
        results = function(*leaves)
        result = results if torch.is_tensor(results) else results[0]
        made_by = {node.removesuffix("Backward") for node in graph_of(result)} & autograd_functions()
        (first,) = torch.autograd.grad(result.sum(), leaves[0], create_graph=True)  # 1 came in, without gradient
        with pytest.raises(RuntimeError, match=f"^({'|'.join(made_by)}) has no second derivative, so a gradient pen"):
            (first.square().sum() + leaves[0].sum()).backward()
        assert made_by, name
        tried |= made_by
    assert tried == autograd_functions()


def calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """Operations and their arguments, in bfloat16."""
    gate, up, grad = numbers(*[(5, 33)] * 3, dtype=torch.bfloat16)
    found: list[tuple[Any, tuple[Any, ...]]] = [
        *((glu.glu_fwd, (one, up, "gelu_tanh")) for one in (gate, gate.T.contiguous().T)),
        *((glu.glu_bwd, (grad, gate, up, "silu", fused)) for fused in (False, True)),
        (glu.glu_bwd_all, (grad, gate, up, "gelu_tanh")),
    ]
    for residual, needed in product((None, up), (False, True)):
        weight, total = gate[0], None if residual is None else grad
        rstd = norm.rms_norm_fwd(gate, weight, residual, 1e-6, 0.0)[2]
        found += [(norm.rms_norm_fwd, (gate, weight, residual, 1e-6, 0.0)),
                  (norm.rms_norm_bwd, (grad, total, gate, weight, rstd, 1.0, needed))]
    q, k, angle = numbers(HEADS, NARROW, (2, 7, 6), dtype=torch.bfloat16)
    for heads_first, backward in product((True, False), (False, True)):
        first, second = (one if heads_first else one.transpose(1, 2).contiguous() for one in (q, k))
        rest = second, angle.cos(), angle.sin(), heads_first, backward
        found.append((rotary.rope_new, (first, *rest)))
    found += [(rotary.rope_new, (strided, k, angle.cos(), angle.sin(), True, False))
              for strided in (q.mT.contiguous().mT, q.transpose(0, 1).contiguous().transpose(0, 1))]
    packed = numbers(*((len(BATCH.input_ids), heads, 16) for heads in (2, 1)), dtype=torch.bfloat16)
    grads = numbers(*((3, heads, BATCH.max_seqlen, 16) for heads in (2, 1)), dtype=torch.bfloat16)
    y, low, b = numbers((5, 70), (5, 8), (40, 5), dtype=torch.bfloat16)
    found += [(lora_up_op, (list(torch.empty_like(y).split(30, 1)[:2]), list(y.split(30, 1)[:2]), low,
                            [b[:30], b[:30, :0]], [0.5, 1.0]))]
    outs = [torch.zeros(5, 40), torch.zeros(70, 5)]
    found.append((thin_products, (outs, [low[:, :5], y.T], [b.T, low[:, :5]], [0.7, 1.0], 0)))
    found += [(draw_tokens, (y.float(), torch.rand(5, 1, dtype=torch.float64), 0.7))]
    return [*found, (spreading.packed_to_padded_op, (packed, BATCH.sources, None, BATCH.max_seqlen)),
            (spreading.packed_to_padded_op, (packed[:1], BATCH.sources, BATCH.places, BATCH.max_seqlen)),
            (spreading.sum_copies, (grads, *TABLES))]


def test_operations_are_registered_right() -> None:
    for operation, arguments in calls():
        torch.library.opcheck(operation, arguments)


@every_row(("module", "columns", "widths"), [
    (glu, "BLOCK_F", [1, 64, 65, 256, 257, 1024, 14336]), (rotary, "BLOCK_R", [1, 32, 36, 48, 64, 128, 512]),
    (norm, "BLOCK_D", [1, 64, 65, 96, 128, 256, 500, 2560, 4096, 8192, 8193, 16384, 65536]),
])
def test_every_width_has_a_compiled_configuration_whose_threads_share_no_entry(
    module: Any, columns: str, widths: list[int]
) -> None:
    listed = [variant.launch for variant in module.variants(90, torch.bfloat16)]
    for width in widths:
        launch = module.launch_rule(width)
        sizes = launch.constexprs
        tile = sizes[columns] * next(size for name, size in sizes.items() if name in ("BLOCK_N", "BLOCK_H"))
        assert launch in listed and 32 <= 32 * launch.num_warps <= min(tile, 512)
        assert sizes[columns] >= width or module is glu or not sizes.get("WHOLE_ROW", True), "rows are in one piece"
