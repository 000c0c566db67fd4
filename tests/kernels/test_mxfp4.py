"""MXFP4 weights: every code with every scale as transformers decodes them, quantizing, bands, products,
refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import ROUNDING, assert_as_accurate, interpreted
from card import gpu
from tables import every_row, not_refused
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lowmem_grpo.kernels import frozen_weight, mxfp4
from lowmem_grpo.kernels.frozen import frozen_linear
from lowmem_grpo.kernels.mxfp4 import (
    MXFP4Weight,
    e2m1_values,
    mxfp4_dequantize,
    mxfp4_dequantize_op,
    mxfp4_dequantize_ref,
    mxfp4_dequantize_triton,
    mxfp4_quantize,
    variants,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX 1.0, table 5
SHAPES = [(1, 32), (7, 96), (257, 64), (3, 4096)]


def every_code(dtype: torch.dtype = torch.float32, device: str = "cpu") -> MXFP4Weight:
    """(255, 512): all 256 bytes in each row, which has one of the 255 finite scales."""
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(255, 1)
    scales = torch.arange(255, dtype=torch.uint8, device=device)[:, None].repeat(1, 16)
    return MXFP4Weight.from_codes(codes, scales, dtype)


def by_transformers(weight: MXFP4Weight, dtype: torch.dtype) -> Tensor:
    blocks = weight.codes.view(1, weight.shape[0], -1, 16)
    return convert_moe_packed_tensors(blocks, weight.scales[None], dtype=dtype)[0].T


def random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def by_hand(values: Tensor) -> Tensor:
    """A block (32,) in float64, by trying all scales and numbers: the largest magnitude decides about the scale."""
    largest = values.abs().max().item()
    exponents = [power for power in range(-127, 128) if 3.5 * 2.0**power <= largest <= 7 * 2.0**power] or [-127]
    grid = [number * 2.0 ** min(exponents) for number in NUMBERS]
    nearest = [min(range(8), key=lambda code, v=v: (abs(abs(v) - grid[code]), code % 2)) for v in values.tolist()]
    return torch.tensor([grid[code] for code in nearest], dtype=torch.float64).copysign(values)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_every_code_with_every_finite_scale_has_the_value_of_transformers(dtype: torch.dtype) -> None:
    weight = every_code(dtype)
    found = mxfp4_dequantize(weight)
    assert found.dtype == dtype and torch.equal(found, by_transformers(weight, dtype))
    assert torch.equal(found, mxfp4_dequantize_ref(weight))
    exact = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)], dtype=torch.float64)
    low, high = exact.repeat(16), exact.repeat_interleave(16)
    for scale in (0, 1, 127, 254):
        assert torch.equal(found[scale], (torch.stack((low, high), 1).flatten() * 2.0 ** (scale - 127)).to(dtype))


def test_codes_alone_have_their_values_in_any_shape() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(4, 2, 32)
    found = e2m1_values(codes, torch.float32)
    assert found.shape == (4, 2, 64)
    assert found.flatten()[2 * 0x7A : 2 * 0x7A + 2].tolist() == [-1, 6]


def test_blocks_of_a_checkpoint_are_borrowed_as_they_lie() -> None:
    blocks, scales = torch.randint(256, (6, 3, 16), dtype=torch.uint8), torch.full((6, 3), 120, dtype=torch.uint8)
    weight = MXFP4Weight.from_codes(blocks, scales, torch.bfloat16)
    assert weight.shape == (6, 96) and weight.out_features == (6,) and weight.sizes == []
    assert [part.data_ptr() for part in weight.tensors] == [blocks.data_ptr(), scales.data_ptr()]
    assert torch.equal(weight.rows(2, 5).dequantized(), weight.dequantized()[2:5])
    assert weight.rows(2, 5).tensors[0].data_ptr() == blocks[2].data_ptr()


def in_triton(weight: MXFP4Weight, row: int = 0, column: int = 0, shape: tuple[int, int] | None = None,
              dtype: torch.dtype = torch.float32) -> Tensor:
    """What the kernel writes."""
    out = torch.empty(shape or weight.shape, dtype=dtype, device=weight.device)
    mxfp4_dequantize_triton(out, *weight.tensors, row, column)
    return out


@interpreted
@pytest.mark.filterwarnings("ignore:overflow")
@every_row("dtype", [torch.float32, torch.float16])
def test_kernel_decodes_every_code_with_every_finite_scale_as_transformers_does(dtype: torch.dtype) -> None:
    weight = every_code(dtype)
    assert torch.equal(in_triton(weight, dtype=dtype), by_transformers(weight, dtype))


@interpreted
def test_kernel_has_the_references_bits_in_any_size() -> None:
    for shape in SHAPES:
        weight = mxfp4_quantize(random(*shape))
        assert torch.equal(in_triton(weight), mxfp4_dequantize_ref(weight)), shape


@pytest.mark.parametrize("how", ["whole", "in pieces", pytest.param("by the kernel", marks=interpreted)])
def test_a_band_takes_its_own_codes_and_scales(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "in pieces":
        monkeypatch.setattr(mxfp4, "REFERENCE_ELEMENTS", 1000)
    weight = mxfp4_quantize(random(57, 384))
    whole = mxfp4_dequantize_ref(weight)
    for row, column, shape in [(0, 0, (57, 384)), (3, 0, (5, 384)), (0, 32, (57, 64)), (56, 352, (1, 32))]:
        found = torch.empty(shape)
        if how == "by the kernel":
            found = in_triton(weight, row, column, shape)
        else:
            weight.fill(found, row, column)
        assert torch.equal(found, whole[row : row + shape[0], column : column + shape[1]]), (row, column, shape)


def test_quantizing_takes_the_nearest_number_of_the_best_scale() -> None:
    ties = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 0.1, -0.6, 2.4, 2.6] + [0.0] * 17)
    tops = [ties / 6 * top for top in (3.49, 3.5, 3.51, 5, 6, 6.9, 7, 7.01, 7.9, 8)]
    extreme = [ties * 2.0**power for power in (125, 124, -120, -126, -127, -130, -149)]
    for values in (ties, *tops, *extreme, *random(20, 32), torch.zeros(32), torch.full((32,), 1e38)):
        found = mxfp4_dequantize(mxfp4_quantize(values[None]))[0]
        assert torch.equal(found.double(), by_hand(values.double())), values


@every_row("dtype", DTYPES)
def test_values_of_mxfp4_stay_the_same_when_they_are_quantized_again(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        once = mxfp4_dequantize(mxfp4_quantize(random(*shape).to(dtype)))
        assert torch.equal(mxfp4_dequantize(mxfp4_quantize(once)), once)
    finite = every_code(torch.float32).rows(0, 253)  # 6 * 2^126 is infinite
    assert torch.equal(mxfp4_dequantize(mxfp4_quantize(mxfp4_dequantize(finite))), mxfp4_dequantize(finite))


def test_quantizing_in_pieces_changes_nothing_and_leaves_the_source_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values = random(70, 160)
    before, whole = values.clone(), mxfp4_quantize(values)
    monkeypatch.setattr(mxfp4, "REFERENCE_ELEMENTS", 1000)
    pieces = mxfp4_quantize(values)
    assert torch.equal(values, before) and all(map(torch.equal, pieces.tensors, whole.tensors))
    for shape in ((0, 32), (4, 0)):
        assert mxfp4_dequantize(mxfp4_quantize(torch.zeros(shape))).shape == shape


BYTES: dict[str, Any] = {"dtype": torch.uint8}
GOOD = {"codes": torch.zeros(4, 3, 16, **BYTES), "scales": torch.zeros(4, 3, **BYTES)}


def test_what_does_not_fit_is_refused_with_what_was_got() -> None:
    assert not_refused(lambda changes: MXFP4Weight.from_codes(**(GOOD | changes), dtype=torch.float32), [
        ({"codes": torch.zeros(4, 47, **BYTES)}, "got (4, 47)"),
        ({"codes": torch.zeros(4, 6, 8, **BYTES)}, "got (4, 6, 8)"),  # NVFP4's blocks of 16
        ({"codes": torch.zeros(1, 4, 3, 16, **BYTES)}, "got (1, 4, 3, 16)"),
        ({"codes": torch.zeros(4, 2, 16, **BYTES)}, "scales (4, 2) in uint8 for codes (4, 2, 16); got (4, 3)"),
        ({"codes": torch.zeros(4, 48)}, "float32"), ({"codes": torch.zeros(48, 4, **BYTES).T}, "strides (1, 4)"),
        ({"scales": torch.zeros(4, 4, **BYTES)}, "got (4, 4)"), ({"scales": torch.zeros(3, 4, **BYTES).T}, "(1, 4)"),
        ({"scales": torch.zeros(4, 3, dtype=torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ({"scales": torch.tensor([[0, 255, 254]] * 4, **BYTES)}, "4 of 12 scales are NaN (255)"),
    ]) == []
    assert not_refused(lambda weight: mxfp4_quantize(weight), [
        (torch.zeros(4, 33), "(4, 33)"), (torch.zeros(32), "(32,)"), (torch.zeros(4, 32).long(), "int64"),
        (torch.full((4, 32), torch.nan), "finite"), (torch.full((4, 32), -torch.inf), "finite"),
    ]) == []
    assert not_refused(lambda weight: mxfp4_dequantize(weight), [(torch.zeros(4, 32), "got a Tensor")]) == []
    with pytest.raises(ValueError, match=r"expected out \(4, 96\)"):
        mxfp4_dequantize(MXFP4Weight.from_codes(**GOOD, dtype=torch.float32), torch.empty(96, 4))


@every_row("dtype", ROUNDING)
def test_products_and_gradients_in_bands_are_those_of_the_dequantized_weight(dtype: torch.dtype) -> None:
    weight, x = mxfp4_quantize(random(70, 384).to(dtype)), random(9, 384).to(dtype).requires_grad_()

    def products(weight: MXFP4Weight | Tensor, x: Tensor) -> list[Tensor]:
        y = frozen_linear(x, weight)
        return [y, *torch.autograd.grad(y, x, random(9, 70).to(x.dtype))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen_weight, "BAND_BYTES", 20_000)
        found = products(weight, x)
    exact = products(mxfp4_dequantize_ref(replace(weight, dtype=torch.float64)), x.detach().double().requires_grad_())
    for name, *values in zip(("y", "x"), found, products(mxfp4_dequantize_ref(weight), x), exact, strict=True):
        assert_as_accurate(name, *values, ROUNDING[dtype])


def test_operation_passes_torchs_checks() -> None:
    weight = mxfp4_quantize(random(5, 96))
    torch.library.opcheck(mxfp4_dequantize_op, (torch.empty(4, 64), *weight.tensors, 1, 32))


def test_the_kernel_is_compiled_for_every_chip() -> None:
    assert all(len(variants(chip, torch.float16)) == 1 for chip in (75, 80, 120))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_on_a_card_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    weight = every_code(dtype, "cuda")
    assert torch.equal(mxfp4_dequantize(weight), by_transformers(weight, dtype))
    large = mxfp4_quantize(random(513, 4096).to("cuda", dtype))
    assert torch.equal(mxfp4_dequantize(large), mxfp4_dequantize_ref(large))
    assert torch.equal(in_triton(large, 3, 32, (5, 96), dtype), mxfp4_dequantize_ref(large)[3:8, 32:128])
