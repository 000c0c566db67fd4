"""FP8 weights: every code, every kind of scales, bands, quantizing, the Triton kernel."""

from dataclasses import replace

import pytest
import torch
from accuracy import assert_as_accurate, interpreted
from card import gpu
from fp8_weights import KINDS, all_codes, block_of, by_definition, in_fp8
from tables import every_row
from torch import Tensor

from lowmem_grpo.kernels import fp8
from lowmem_grpo.kernels.fp8 import (
    FP8Weight,
    fp8_dequantize,
    fp8_dequantize_op,
    fp8_dequantize_ref,
    fp8_dequantize_triton,
    fp8_quantize,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 7), (63, 500), (129, 128), (256, 256), (257, 385)]


def in_triton(weight: FP8Weight, row: int = 0, column: int = 0, shape: tuple[int, int] | None = None) -> Tensor:
    """What the kernel writes, in float32."""
    out = torch.empty(shape or weight.shape, device=weight.codes.device)
    fp8_dequantize_triton(out, *weight.tensors, *weight.block, row, column)
    return out


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether all values are equal, NaN to NaN."""
    return torch.equal(found.nan_to_num(nan=1e30), expected.nan_to_num(nan=1e30))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_has_torchs_value(dtype: torch.dtype) -> None:
    for block in ((1, 256), (3, 256), (2, 100)):
        weight = all_codes(block, dtype)
        found = fp8_dequantize(weight)
        assert found.dtype == dtype
        assert same(found, by_definition(weight).float().to(dtype)), block
        assert found.isnan().nonzero()[:, 1].tolist() == [127, 255] * 3


@interpreted
@pytest.mark.parametrize("block", [(1, 256), (3, 256), (3, 128), (2, 100)])
def test_kernel_decodes_every_code_as_torch_does(block: tuple[int, int]) -> None:
    weight = all_codes(block)
    assert same(in_triton(weight), fp8_dequantize_ref(weight))


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_kernel_has_the_references_bits(kind: str) -> None:
    for shape in SHAPES:
        weight = in_fp8(shape, kind)
        assert torch.equal(in_triton(weight), fp8_dequantize_ref(weight)), shape


BANDS = [(0, 0, (5, 385)), (128, 0, (129, 385)), (3, 0, (7, 385)), (0, 128, (257, 128)), (0, 384, (257, 1)),
         (130, 17, (1, 300))]


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=interpreted)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_a_band_takes_its_own_codes_and_scales(kind: str, kernel: bool) -> None:
    weight = in_fp8((257, 385), kind)
    whole = fp8_dequantize_ref(weight)
    for row, column, shape in BANDS:
        found = torch.empty(shape)
        if kernel:
            found = in_triton(weight, row, column, shape)
        else:
            weight.fill(found, row, column)
        assert torch.equal(found, whole[row : row + shape[0], column : column + shape[1]]), (row, column, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_is_off_by_at_most_half_a_step(kind: str) -> None:
    for shape in SHAPES:
        weight = in_fp8(shape, kind)
        values = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) / shape[1] ** 0.5
        height, width = block_of(kind, shape)
        largest = torch.stack([torch.stack([part.abs().max() for part in band.split(width, 1)])
                               for band in values.split(height)])
        torch.testing.assert_close(weight.scales * 448, largest)
        step = fp8.spread_scales(weight.scales, weight.block, shape) * 2.0**-9  # of the smallest codes
        off = (fp8_dequantize(weight) - values).abs()
        assert (off <= torch.maximum(values.abs() / 16, step / 2) * (1 + 1e-5)).all(), shape


def test_zeros_stay_zeros_and_nan_is_not_hidden() -> None:
    values = torch.zeros(3, 8)
    values[1, 2] = float("nan")
    found = fp8_dequantize(fp8_quantize(values))
    assert found[0].eq(0).all()
    assert found[2].eq(0).all()
    assert found[1].isnan().all()
    for shape in ((0, 4), (4, 0)):
        assert fp8_dequantize(fp8_quantize(torch.zeros(shape))).shape == shape


def test_quantizing_in_pieces_changes_nothing_and_leaves_the_source_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(300, 260, generator=torch.Generator().manual_seed(0))
    before = values.clone()
    for kind in KINDS:
        block = block_of(kind, (300, 260))
        whole = fp8_quantize(values, block)
        with monkeypatch.context() as patch:
            patch.setattr(fp8, "REFERENCE_ELEMENTS", 2000)
            pieces = fp8_quantize(values, block)
            assert torch.equal(fp8_dequantize(pieces), fp8_dequantize_ref(whole))
        assert torch.equal(pieces.codes, whole.codes)
        assert torch.equal(pieces.scales, whole.scales)
    assert torch.equal(values, before)


@every_row(("codes", "scales", "block", "message"), [
    (torch.zeros(4, 6), torch.ones(4, 1), (1, 6), "expected contiguous codes"),
    (torch.zeros(6, 4, dtype=torch.uint8).T, torch.ones(4, 1), (1, 6), "expected contiguous codes"),
    (torch.zeros(4, 6, dtype=torch.uint8), torch.ones(4), (1, 6), r"expected float32 scales \(4, 1\)"),
    (torch.zeros(4, 6, dtype=torch.uint8), torch.ones(4, 1).bfloat16(), (1, 6), "float32 scales .*bfloat16"),
    (torch.zeros(4, 6, dtype=torch.uint8), torch.ones(4, 1), (2, 3), r"float32 scales \(2, 2\)"),
])
def test_what_does_not_fit_is_refused(codes: Tensor, scales: Tensor, block: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FP8Weight.from_codes(codes, scales, block, torch.float32)


def test_a_place_that_does_not_fit_is_refused() -> None:
    weight = in_fp8((4, 6))
    for out in (torch.empty(6, 4), torch.empty(4, 6, dtype=torch.int32), torch.empty(6, 4).T):
        with pytest.raises(ValueError, match=r"expected out \(4, 6\)"):
            fp8_dequantize(weight, out)


def test_operation_passes_torchs_checks() -> None:
    weight = in_fp8((5, 33), "ragged")
    torch.library.opcheck(fp8_dequantize_op, (torch.empty(4, 9), *weight.tensors, *weight.block, 1, 3))


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_on_a_card_has_the_references_bits(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        weight = in_fp8(shape, kind, dtype, device="cuda")
        truth = fp8_dequantize_ref(replace(weight, dtype=torch.float64))
        assert_as_accurate("values", fp8_dequantize(weight), fp8_dequantize_ref(weight), truth, 0.0)
    codes = all_codes(dtype=dtype)
    there = replace(codes, codes=codes.codes.cuda(), scales=codes.scales.cuda())
    assert same(fp8_dequantize(there).cpu(), fp8_dequantize_ref(codes))
