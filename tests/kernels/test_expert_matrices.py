"""Experts with biases, the clamped activation and LoRA against transformers' GptOssExperts and PEFT's own adapters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_each_as_accurate, in_float64, outcome
from memory import CountedOps, LiveStorage
from mixtures import random
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from tables import not_refused
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from lowmem_grpo.kernels.clamped_swiglu import ClampedSwiGLU
from lowmem_grpo.kernels.expert_matrices import Matrices
from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.frozen_weight import PlainWeight
from lowmem_grpo.kernels.grouped_products import Places
from lowmem_grpo.kernels.lora_factors import LoRA
from lowmem_grpo.kernels.routed_experts import routed_experts, routed_experts_ref

routed = import_module("lowmem_grpo.kernels.routed_experts")  # whose function has its name
pytestmark = pytest.mark.filterwarnings("ignore:.*_experts_implementation")
E, K, D, INNER, RANK = 8, 3, 32, 24, 4
NAMES, STACKS = ["experts.gate_up_proj", "experts.down_proj"], ("gate_up", "down")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = GptOssConfig(num_local_experts=E, hidden_size=D, intermediate_size=INNER)
        config._experts_implementation = "eager"
        self.experts = GptOssExperts(config)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self.experts(x, ids, weights)
        return y


def adapted(adapters: list[str] = NAMES, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' experts with PEFT's adapters; a third of the gates and ups lies beyond the limit."""
    block = Block()
    for seed, parameter in enumerate(block.parameters()):
        parameter.data = 2 * random(*parameter.shape, seed=seed)
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=[], target_parameters=adapters, init_lora_weights=False)
    return (get_peft_model(block, config) if adapters else block).to(dtype)


def adapters_of(model: nn.Module) -> dict[str, LoRA]:
    """PEFT's pairs as arguments of ours, by the parameter that each adapts."""
    found: dict[str, LoRA] = {}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            a, b = (getattr(module, name)["default"].weight for name in ("lora_A", "lora_B"))
            found[module.parameter_name.replace("_proj", "_lora")] = LoRA(a, b, module.scaling["default"])
    return found


def arguments(model: nn.Module, rows: int = 40, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of routed_experts with the weights of `model`; the last two experts take no row."""
    experts = next(module for module in model.modules() if isinstance(module, GptOssExperts))
    scores = random(rows, E - 2, seed=rows)
    values, ids = scores.softmax(-1).topk(K, -1)
    return {
        "x": random(rows, D, seed=1, dtype=dtype).requires_grad_(), "ids": ids,
        "weights": values.to(torch.promote_types(dtype, torch.float32)).requires_grad_(),
        **{name: FrozenStack.from_weights(getattr(experts, f"{name}_proj").detach().mT.contiguous())
           for name in STACKS},
        **{f"{name}_bias": getattr(experts, f"{name}_proj_bias").detach() for name in STACKS},
        "activation": ClampedSwiGLU(experts.alpha, experts.limit), **adapters_of(model),
    }


def theirs(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """The output and gradients of PEFT's model for the arguments of ours."""
    def call(x: Tensor, weights: Tensor, **_: Any) -> Tensor:
        y: Tensor = model(x, given["ids"], weights)
        return y

    return outcome(call, given)


class GroupedWeight(PlainWeight, kind="plain, grouped in torch"):
    """Experts in plain numbers whose grouped products are each place by itself."""

    def can_group(self, x: Tensor) -> bool:
        return True

    def grouped(
        self, x: Tensor, experts: int, places: Places, places_a_row: int = 1, scale: Tensor | None = None,
        back: bool = False,
    ) -> Tensor:
        ids = torch.empty_like(places.order)
        ids[places.order] = torch.arange(experts).repeat_interleave(places.ends.diff())
        weights = self.tensor.to(x.dtype).view(experts, -1, self.shape[1])[ids]
        rows = x.repeat_interleave(places_a_row, 0)[:, None]
        out = (rows @ (weights if back else weights.mT))[:, 0]
        return out if scale is None else (out * scale[:, None]).to(x.dtype)


def grouped(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, whose experts take the grouped form."""
    return given | {name: replace(given[name], weight=GroupedWeight(given[name].weight.tensor)) for name in STACKS}


FORMS = pytest.mark.parametrize("form", [dict, grouped], ids=["one after the other", "grouped"])


@FORMS
@pytest.mark.parametrize("adapters", [NAMES, NAMES[:1], NAMES[1:], []])
def test_outputs_and_gradients_are_those_of_transformers_with_pefts_adapters(adapters: list[str], form: Any) -> None:
    model = adapted(adapters)
    given = form(arguments(model))
    assert len(adapters_of(model)) == len(adapters)
    torch.testing.assert_close(outcome(routed_experts, given), theirs(model, given), rtol=1e-10, atol=1e-10)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_those_of_plain_torch_in_the_same_dtype(dtype: torch.dtype, form: Any) -> None:
    model = adapted(dtype=torch.float32)
    for adapter in model.parameters():
        adapter.data /= 8  # so that sums stay in the range of float16
    given = form(narrow(arguments(model, dtype=torch.float32), dtype))
    reference = outcome(routed_experts_ref, given)
    truth = outcome(routed_experts_ref, in_float64(given))
    assert_each_as_accurate(outcome(routed_experts, given), reference, truth, 2 * ROUNDING[dtype])


def narrow(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same with rows, experts and biases in this dtype; LoRA stays in float32, as in training."""
    changed = {name: given[name].to(dtype) for name in ("gate_up_bias", "down_bias")}
    changed |= {name: replace(given[name], weight=PlainWeight(given[name].weight.tensor.to(dtype)))
                for name in STACKS}
    return given | changed | {"x": given["x"].detach().to(dtype).requires_grad_()}


@FORMS
def test_an_expert_without_rows_gets_gradients_of_zero_and_nothing_reads_uninitialised_memory(form: Any) -> None:
    given = form(arguments(adapted()))
    expected = outcome(routed_experts, given)
    with filled_with_nan():
        found = outcome(routed_experts, given)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("gate_up_lora", "down_lora"):
        idle = found[f"{name}.a"].view(E, RANK, -1)[-2:], found[f"{name}.b"].view(-1, RANK, E)[..., -2:]
        assert not any(part.any() for part in idle) and found[f"{name}.a"].view(E, RANK, -1)[:-2].any((1, 2)).all()


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """Inside, memory that torch gives out uninitialised holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@FORMS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_biases_and_lora_go_with_activations_whose_gate_rows_come_first(activation: str, form: Any) -> None:
    given = form(arguments(adapted())) | {"activation": activation}
    reference = outcome(routed_experts_ref, given)
    torch.testing.assert_close(outcome(routed_experts, given), reference, rtol=1e-10, atol=1e-10)


@FORMS
def test_lora_gets_its_gradients_where_rows_and_gates_need_none(form: Any) -> None:
    given = form(arguments(adapted()))
    alone = outcome(routed_experts, given | {name: given[name].detach() for name in ("x", "weights")})
    expected = outcome(routed_experts, given)
    assert len(alone) == 5 and all(torch.equal(alone[name], expected[name]) for name in alone)


def test_rows_in_pieces_add_up_to_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(adapted())
    whole = outcome(routed_experts, given)
    monkeypatch.setattr(routed, "PIECE", 5)
    torch.testing.assert_close(outcome(routed_experts, given), whole, rtol=1e-12, atol=1e-12)


def test_gradients_of_adapters_in_16_bits_are_summed_in_float32_and_rounded_once(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PIECE", 3)  # so that the sums have many terms
    given = narrow(arguments(adapted(dtype=torch.float32), rows=300, dtype=torch.float32), torch.bfloat16)
    rounded = {name: LoRA(*(part.detach().bfloat16().requires_grad_() for part in (pair.a, pair.b)), pair.scale)
               for name, pair in given.items() if isinstance(pair, LoRA)}
    exact = {name: LoRA(*(part.detach().float().requires_grad_() for part in (pair.a, pair.b)), pair.scale)
             for name, pair in rounded.items()}
    found, wide = (outcome(routed_experts, given | pairs) for pairs in (rounded, exact))
    for name in ("gate_up_lora.a", "gate_up_lora.b", "down_lora.a", "down_lora.b"):
        assert torch.equal(found[name], wide[name].bfloat16())


def test_a_gate_beyond_float16_once_multiplied_gives_finite_results_and_gradients() -> None:
    given = narrow(arguments(adapted(dtype=torch.float32), dtype=torch.float32), torch.float16)
    given["x"] = (given["x"].detach() * 300).requires_grad_()  # gates and ups of thousands, which are clamped
    for form in (dict, grouped):
        assert all(part.isfinite().all() for part in outcome(routed_experts, form(given)).values())


@pytest.mark.parametrize(("form", "products"), [(dict, (4, 12)), (grouped, (4, 12))])
def test_lora_takes_as_many_products_as_its_file_says(form: Any, products: tuple[int, int]) -> None:
    given = form(narrow(arguments(adapted(dtype=torch.float32), dtype=torch.float32), torch.bfloat16))
    used = E - 2 if form is dict else 1
    for backward, expected in enumerate(products):
        assert count(given, True, backward) - count(given, False, backward) == used * expected


def count(given: dict[str, Any], lora: bool, backward: int) -> int:
    """Products in one pass of the operations, which do not show what they run inside."""
    arguments = inside(given, lora)
    function = routed.routed_backward if backward else routed.routed_forward
    with CountedOps() as ops:
        function(*arguments[: 1 * backward], *arguments)
    return sum(name.split("::")[1] in ("mm", "addmm", "addmm_", "thin_products", "upcast_matmul") for name in ops.names)


def inside(given: dict[str, Any], lora: bool) -> list[Any]:
    """Arguments of the operations, with LoRA in the dtype of x or without."""
    def in_dtype(pair: LoRA) -> LoRA:
        return LoRA(*(part.detach().to(given["x"].dtype) for part in (pair.a, pair.b)), pair.scale)

    matrices = [Matrices(given[name], given[f"{name}_bias"], in_dtype(given[f"{name}_lora"]) if lora else None)
                for name in STACKS]
    return [given["x"].detach(), given["ids"], given["weights"].detach(), *routed.flat(matrices, given["activation"])]


def test_lora_takes_the_bytes_that_its_file_says() -> None:
    given = narrow(arguments(adapted(dtype=torch.float32), dtype=torch.float32), torch.bfloat16)
    peaks = []
    for lora in (False, True):
        arguments_ = inside(given, lora)
        with LiveStorage() as storage:
            routed.routed_backward(arguments_[0], *arguments_)
        peaks.append(storage.peak)
    sizes = (D, 2 * INNER), (INNER, D)  # in, out
    said = sum(4 * RANK * E * (inner + out) + 2 * RANK * E * out for inner, out in sizes) + 4 * RANK * E * D
    assert 0.8 * said <= peaks[1] - peaks[0] <= 1.2 * said


def test_torch_sees_one_operation_each_way() -> None:
    experts = inside(arguments(adapted(), rows=5), lora=True)
    for operation, first in ((routed.routed_forward_op, []), (routed.routed_backward_op, experts[:1])):
        torch.library.opcheck(operation, (*first, *experts), test_utils=("test_schema", "test_faketensor"))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gate_up_bias": torch.zeros(E, INNER)}, f"expected gate_up_bias ({E}, {2 * INNER})"),
    ({"down_bias": torch.zeros(E, D, requires_grad=True)}, "down_bias.requires_grad_(False)"),
    ({"down_lora": LoRA(torch.zeros(E * 2 + 1, INNER), torch.zeros(D, E * 2 + 1))}, f"a ({E} r, {INNER}) and b ({D}, "),
    ({"gate_up_lora": LoRA(torch.zeros(E, D), torch.zeros(D, E))}, f"b ({2 * INNER}, r {E})"),
    ({"gate_up_lora": torch.zeros(E, D)}, "expected gate_up_lora as LoRA(a, b, scale)"),
    ({"activation": "relu"}, "'relu'"),
    ({"activation": "clamped 1.702 7.0"}, "or a ClampedSwiGLU"),
]


def test_what_does_not_fit_is_refused_by_name() -> None:
    given = arguments(adapted(dtype=torch.float32), dtype=torch.float32)
    assert not_refused(lambda change: routed_experts(**(given | change)), REFUSED) == []
