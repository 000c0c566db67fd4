"""swiglu and geglu against float64 truth, and the memory that they take."""

from functools import partial
from typing import Any

import pytest
import torch
from accuracy import IN_16_BITS, assert_as_accurate, in_triton, interpreted
from card import CARD, DEVICES
from memory import LiveStorage
from torch import Tensor

from lowmem_grpo.kernels import glu as module
from lowmem_grpo.kernels.glu import geglu, geglu_ref, glu_backward, glu_forward, swiglu, swiglu_ref

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # of numpy, in the interpreter
FLOAT32 = 1e-6  # slack for float32 functions made of other steps than torch's, relative to the largest value
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of a gradient, once, when stored
DTYPES = list(ROUNDING)
SHAPES = [(1, 7), (63, 65), (500, 33), (2, 3, 5, 1100)]
ACTIVATIONS: dict[str, tuple[Any, Any]] = {  # the public function of each, and its reference
    "silu": (swiglu, swiglu_ref), "gelu_tanh": (geglu, geglu_ref),
    "gelu": (partial(geglu, approximate="none"), partial(geglu_ref, approximate="none")),
}


def problem(shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu") -> dict[str, Tensor]:
    """gate, up and a gradient of the result, among them large and small values."""
    generator = torch.Generator().manual_seed(shape[-1])
    return {name: (3 * torch.randn(shape, generator=generator)).to(device, dtype) for name in ("gate", "up", "grad")}


def outcome(function: Any, tensors: dict[str, Tensor], fused: bool = False, dtype: Any = None) -> dict[str, Tensor]:
    """h and the gradients of gate and up, by autograd; with `fused` from one tensor that holds both."""
    gate, up, grad = (tensors[name].to(dtype) for name in ("gate", "up", "grad"))
    leaves = [torch.cat((gate, up), -1)] if fused else [gate, up]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    h = function(*(leaf * 1 for leaf in leaves))  # not leaves, as in a model
    found = torch.autograd.grad(h, leaves, grad)
    grad_gate, grad_up = found[0].chunk(2, -1) if fused else found
    return {"h": h.detach(), "gate": grad_gate, "up": grad_up}


def assert_accurate(activation: str, tensors: dict[str, Tensor], results: dict[str, Tensor]) -> None:
    reference = ACTIVATIONS[activation][1]
    truth, plain = outcome(reference, tensors, dtype=torch.float64), outcome(reference, tensors)
    for name, exact in truth.items():
        slack = FLOAT32 + (ROUNDING[results[name].dtype] if name != "h" else 0)
        assert_as_accurate(name, results[name], plain[name], exact, slack)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_errors_are_no_larger_than_the_references(activation: str, dtype: torch.dtype, device: torch.device) -> None:
    for shape in SHAPES + ([(4099, 1536), (77, 14336)] if device == CARD else []):
        tensors = problem(shape, dtype, device)
        for fused in (False, True):
            assert_accurate(activation, tensors, outcome(ACTIVATIONS[activation][0], tensors, fused))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_without_autograd_write_where_they_are_told_and_allocate_nothing(
    dtype: torch.dtype, device: torch.device
) -> None:
    for activation in ACTIVATIONS:
        assert_written_in_place(activation, problem((333, 1536) if device == CARD else (2, 9, 33), dtype, device))


def assert_written_in_place(activation: str, tensors: dict[str, Tensor]) -> None:
    expected = outcome(ACTIVATIONS[activation][0], tensors)
    gate_up = torch.cat((tensors["gate"], tensors["up"]), -1)
    (gate, up), grad = gate_up.chunk(2, -1), tensors["grad"].clone()
    h = glu_forward(gate, up, activation)
    with LiveStorage() as storage:
        glu_backward(grad, gate, up, activation)
    assert storage.peak == 0
    for values, name in ((h, "h"), (grad, "h"), (gate, "gate"), (up, "up")):
        torch.testing.assert_close(values, expected[name], msg=name)


@interpreted
@pytest.mark.parametrize(("rows", "columns", "activation"), [
    (1, 1, "silu"), *((11, 65, activation) for activation in ACTIVATIONS), (37, 33, "gelu_tanh"), (3, 1100, "gelu"),
])
def test_the_kernels_errors_are_no_larger_than_the_references(rows: int, columns: int, activation: str) -> None:
    tensors = problem((rows, columns), torch.float32)
    with in_triton():
        for fused in (False, True):
            assert_accurate(activation, tensors, outcome(ACTIVATIONS[activation][0], tensors, fused))
        assert_written_in_place(activation, tensors)


@interpreted
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_stay_finite_where_exponentials_do_not(activation: str) -> None:
    gate = torch.tensor([[-60000.0, -1000.0, -100.0, 100.0, 1000.0, 60000.0]])
    one = torch.ones_like(gate)
    grad_gate, _ = module.glu_bwd_triton(one, gate, one, activation, False)
    assert torch.equal(module.glu_fwd_triton(gate, one, activation), gate.clamp(min=0))
    assert torch.equal(grad_gate, (gate > 0).float())


@pytest.mark.parametrize(("device", "dtype"), IN_16_BITS)
def test_the_kernel_rounds_the_activation_before_the_product(device: str, dtype: torch.dtype) -> None:
    tensors = problem((200, 130), dtype, device)
    gate, up = tensors["gate"] / 3, tensors["up"]  # beyond three deviations torch's own gelu loses digits
    for activation in ACTIVATIONS:
        same = module.glu_fwd_triton(gate, up, activation) == ACTIVATIONS[activation][1](gate, up)
        assert same.double().mean() > 0.99, activation  # one rounding instead of two agrees on 80 %


@pytest.mark.parametrize("shape", [(0, 33), (2, 0, 33), (3, 0)])
def test_no_entries_give_no_results(shape: tuple[int, ...]) -> None:
    tensors = problem(shape, torch.float32)
    for fused in (False, True):
        assert all(values.shape == shape for values in outcome(swiglu, tensors, fused).values())
    assert glu_forward(tensors["gate"], tensors["up"], "gelu").shape == shape
    glu_backward(tensors["grad"], tensors["gate"], tensors["up"], "gelu")


@pytest.mark.parametrize("fused", [False, True])
def test_only_the_result_is_made_and_in_backward_the_gradients(fused: bool) -> None:
    tensors = problem((500, 33), torch.float32)
    leaves = [torch.cat((tensors["gate"], tensors["up"]), -1)] if fused else [tensors["gate"], tensors["up"]]
    inputs = [leaf.requires_grad_() for leaf in leaves]
    with LiveStorage() as storage:
        h = swiglu(*inputs)
        assert storage.live == storage.peak == h.nbytes
        torch.autograd.grad(h, inputs, h.detach())
    assert storage.peak == h.nbytes + sum(values.nbytes for values in inputs)


@pytest.mark.parametrize("name", ["grad", "gate", "up"])
def test_calls_without_autograd_refuse_to_write_into_a_copy(name: str) -> None:
    tensors = problem((4, 5, 33), torch.float32)
    changes = [lambda x: x.mT.contiguous().mT, lambda x: torch.stack((x, x), 1)[:, 0].transpose(0, 1),
               lambda x: x[:1, :1].expand(4, 5, 33)]
    for change in changes:
        changed = {key: values.transpose(0, 1).contiguous() if change(values).shape[0] == 5 else values
                   for key, values in tensors.items()}
        with pytest.raises(ValueError, match=f"{name} is written in place"):
            glu_backward(activation="silu", **(changed | {name: change(tensors[name])}))
