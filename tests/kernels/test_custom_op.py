"""Operations of ours as the dispatcher sees them: what they write to is known, and little runs around their body."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from accuracy import assert_as_accurate
from memory import LiveStorage
from nf4_problem import quantized
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import custom_op as products
from lowmem_grpo.kernels.custom_op import custom_op, on_its_card
from lowmem_grpo.kernels.glu import glu_bwd_all
from lowmem_grpo.kernels.logprob_kernels import logprob_rows
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize_op

LIMIT = 5  # Python functions around a body; 20 with torch.library.custom_op


def fill(out: Tensor, values: Tensor, other: Tensor | None, number: float) -> None:
    out.copy_(values * number)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def no_body(out: Tensor, values: Tensor, other: Tensor | None, number: float) -> None:
    return None


FILL = custom_op("test_fill", fill, mutates=("out",))
DOUBLED = custom_op("test_doubled", doubled, fake=lambda x: x.new_empty(x.shape))
NO_BODY = custom_op("test_no_body", no_body, mutates=("out",))


def test_what_an_operation_writes_to_gets_a_new_version_and_what_it_reads_does_not() -> None:
    out, values = torch.zeros(2, 3), torch.ones(3)
    before = out._version, values._version
    FILL(out[1], values, None, 2.0)  # a view: its base is written to
    assert out.tolist() == [[0.0] * 3, [2.0] * 3]
    assert out._version > before[0]
    assert values._version == before[1]
    NO_BODY(out, values, None, 2.0)  # as a kernel on a card, whose body no version knows of
    assert out._version > before[0] + 1
    with torch.inference_mode():
        FILL(inference := torch.zeros(3), torch.ones(3), None, 2.0)
    assert inference.tolist() == [2.0, 2.0, 2.0]


def test_a_kernel_is_launched_on_the_card_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    launch = on_its_card(lambda number, x: (current[0], number))
    with FakeTensorMode():
        for index in (1, 0):
            assert launch(5, torch.empty(3, device=f"cuda:{index}")) == (index, 5)
    assert current == [0]


def test_autograd_refuses_a_saved_tensor_that_an_operation_has_overwritten() -> None:
    x = torch.ones(3, requires_grad=True)
    saved = x * 1
    y = saved.exp() + saved * saved
    with torch.no_grad():
        FILL(saved.detach(), torch.ones(3), None, 3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_each_operation_of_ours_that_writes_in_place_says_so() -> None:
    a, b, c = (torch.randn(4, 8) for _ in range(3))
    weight = NF4Weight.from_bitsandbytes(quantized(8, 64, torch.float32))
    out, logits, targets = torch.empty(8, 64), torch.randn(3, 11), torch.zeros(3, dtype=torch.long)
    for written, call in (
        ((a, b, c), lambda: glu_bwd_all(c, a, b, "silu")),
        ((out,), lambda: nf4_dequantize_op(out, weight.tensors, weight.sizes, 0)),
        ((logits,), lambda: logprob_rows(logits, targets, None, 1.0, 1.0, None, -1, torch.float32)),
    ):
        before = [tensor._version for tensor in written]
        call()
        assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


def test_fake_tensors_pass_through_without_their_kernel() -> None:
    with FakeTensorMode():
        out = torch.empty(3)
        version = out._version
        FILL(out, torch.empty(3), None, 1.0)
        assert out._version > version
        assert DOUBLED(torch.empty(5, 2)).shape == (5, 2)


def test_a_call_runs_a_handful_of_python_functions_around_its_body() -> None:
    arguments, entered, before = (torch.zeros(0), torch.zeros(0), None, 1.0), [], sys.getprofile()
    NO_BODY(*arguments)  # torch finds its kernel in the first call
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        NO_BODY(*arguments)
    finally:
        sys.setprofile(before)
    assert "no_body" in entered and len(entered) - 1 <= LIMIT, entered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 3, 5), (7, 1003, 129), (0, 9, 4), (33, 300_001, 3)])
def test_where_the_cpu_has_no_16_bit_products_float32_ones_are_as_exact_and_nothing_old_is_read(
    rows: int, inner: int, columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300,001 numbers are summed in parts."""
    monkeypatch.setattr(products, "WITHOUT_16_BITS", True)
    generator = torch.Generator().manual_seed(1)
    left, right, bias = (torch.randn(*shape, generator=generator).div(inner**0.25).to(dtype)
                         for shape in ((rows, inner), (inner, columns), (columns,)))
    exact = left.double() @ right.double()
    total = torch.full((rows, columns + 2), torch.nan, dtype=dtype)[:, 1:-1]  # a part of other memory
    for name, found, alone, truth in (
        ("with a bias", products.matmul(left, right, bias), torch.addmm(bias, left, right), exact + bias.double()),
        ("alone", products.matmul(left, right), left @ right, exact),
        ("written over", products.addmm(total, left, right, beta=0), left @ right, exact),
        ("added", products.addmm(left @ right, left, right), 2 * (left @ right), 2 * exact),
    ):
        assert found.dtype == dtype
        assert_as_accurate(name, found, alone, truth, torch.finfo(dtype).eps / 2)
    assert products.addmm(total, left, right) is total


def test_what_is_upcast_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WITHOUT_16_BITS", True)
    monkeypatch.setattr(products, "UPCAST_BYTES", 2**20)
    left, right = torch.ones(64, 40_000, dtype=torch.bfloat16), torch.ones(40_000, 96, dtype=torch.bfloat16)
    with LiveStorage() as made:
        y = products.matmul(left, right)
    assert torch.equal(y, torch.full((64, 96), 40_000, dtype=torch.bfloat16))
    assert made.peak <= 2**20 + 3 * 4 * y.numel()


def test_only_16_bit_numbers_that_are_there_are_upcast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "WITHOUT_16_BITS", True)
    assert products.upcasts(torch.ones(1, dtype=torch.bfloat16))
    for dtype in (torch.float32, torch.float64):
        assert not products.upcasts(torch.ones(1, dtype=dtype))
    with FakeTensorMode():
        assert not products.upcasts(torch.ones(1, dtype=torch.bfloat16))
