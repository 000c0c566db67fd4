"""The clamped activation of gpt-oss against transformers' own, on the CPU and in the kernels."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accuracy import IN_16_BITS, ROUNDING, assert_as_accurate, in_triton, interpreted
from mixtures import random
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from lowmem_grpo.kernels.clamped_swiglu import ClampedSwiGLU
from lowmem_grpo.kernels.glu import glu_backward, glu_forward
from lowmem_grpo.kernels.routed_experts import gate_and_up, gated_ref

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # of numpy, in the interpreter
OSS = ClampedSwiGLU(1.702, 7.0)
KERNEL = pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=interpreted)])


def theirs(both: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """h and the gradient of both by transformers' method, and autograd."""
    leaf = both.clone().requires_grad_()
    settings: Any = SimpleNamespace(alpha=OSS.alpha, limit=OSS.limit)
    h = GptOssExperts._apply_gate(settings, leaf)
    return {"h": h.detach(), "both": torch.autograd.grad(h, leaf, grad)[0]}


def ours(both: Tensor, grad: Tensor, kernel: bool = False) -> dict[str, Tensor]:
    """The same by the calls without autograd, of which the second also computes h."""
    both, again = both.clone(), grad.clone()
    with in_triton() if kernel else nullcontext():
        h = glu_forward(*gate_and_up(both, OSS), OSS)
        glu_backward(again, *gate_and_up(both, OSS), OSS)
    torch.testing.assert_close(h, again, rtol=0, atol=0, equal_nan=True)
    return {"h": h, "both": both}


def assert_accurate(both: Tensor, grad: Tensor, epsilon: float, kernel: bool) -> None:
    found, plain, truth = ours(both, grad, kernel), theirs(both, grad), theirs(both.double(), grad.double())
    for name, exact in truth.items():
        assert_as_accurate(name, found[name], plain[name], exact, epsilon)


@KERNEL
@pytest.mark.parametrize("shape", [(1, 2), (37, 130), (3, 2200)])
def test_values_and_gradients_are_those_of_transformers(shape: tuple[int, int], kernel: bool) -> None:
    both, grad = 6 * random(*shape), random(shape[0], shape[1] // 2, seed=1)
    assert_accurate(both, grad, 1e-6, kernel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_errors_are_those_of_one_rounding(dtype: torch.dtype) -> None:
    assert_accurate(6 * random(50, 66, dtype=dtype), random(50, 33, seed=1, dtype=dtype), ROUNDING[dtype], False)


@pytest.mark.parametrize(("device", "dtype"), IN_16_BITS)
def test_in_16_bits_the_kernel_is_as_accurate(device: str, dtype: torch.dtype) -> None:
    both, grad = 6 * random(50, 66, dtype=dtype, device=device), random(50, 33, seed=1, dtype=dtype, device=device)
    assert_accurate(both, grad, ROUNDING[dtype], device == "cpu")


@KERNEL
def test_beyond_the_limits_and_on_them_gradients_are_those_of_clamp(kernel: bool) -> None:
    edges = torch.tensor([-torch.inf, -60000.0, -7.0, 0.0, 7.0, 7.5, 60000.0, torch.inf])
    both = torch.cartesian_prod(edges[1:], edges).view(-1, 2)  # a gate of -inf is 0 times infinity in both
    grad = torch.ones(len(both), 1)
    torch.testing.assert_close(ours(both, grad, kernel), theirs(both, grad))


@KERNEL
def test_a_gate_or_up_that_is_no_number_gives_none(kernel: bool) -> None:
    both = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [1.0, 1.0]])
    assert ours(both, torch.ones(3, 1), kernel)["h"].isnan().flatten().tolist() == [True, True, False]


def test_columns_that_do_not_alternate_in_memory_are_copied_or_refused() -> None:
    both, grad = random(5, 12), random(5, 6, seed=1)
    gate, up = (part.contiguous() for part in gate_and_up(both, OSS))
    torch.testing.assert_close(glu_forward(gate, up, OSS), gated_ref(both, OSS))
    with pytest.raises(ValueError, match=r"gate is written in place .* every second column"):
        glu_backward(grad, gate, up, OSS)


def test_numbers_come_back_from_the_text_unchanged() -> None:
    for activation in (OSS, ClampedSwiGLU(1 / 3, 1e-30)):
        assert ClampedSwiGLU.from_text(activation.text) == activation


def test_a_limit_that_is_not_positive_is_refused() -> None:
    for limit in (0.0, -7.0, float("nan")):
        with pytest.raises(ValueError, match=r"limit is .* must be positive"):
            ClampedSwiGLU(1.702, limit)
