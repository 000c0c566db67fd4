"""4-bit weights: the bits of bitsandbytes, its storage borrowed and joined, bands and rows, the Triton kernel."""

from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from accuracy import assert_as_accurate, interpreted
from card import gpu
from nf4_problem import in_4_bit
from tables import every_row, pairwise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from lowmem_grpo.kernels.nf4 import (
    NF4Weight,
    nf4_dequantize,
    nf4_dequantize_op,
    nf4_dequantize_ref,
    nf4_dequantize_triton,
    variants,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WHOLE = [(33, 64), (48, 256), (7, 4096)]  # rows made of whole blocks of 64
RAGGED = [(7, 100), (5, 33), (3, 7), (513, 65)]  # blocks that span rows, odd sizes, a last block that is not full
ULP = {torch.float32: 2e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def quantized(
    shape: tuple[int, int], dtype: torch.dtype = torch.float32, blocksize: int = 64, double: bool = True,
    quant_type: str = "nf4", storage: torch.dtype = torch.uint8, device: str = "cpu",
) -> Any:
    """A random weight as bitsandbytes quantizes it, the same for the same shape."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)
    return in_4_bit(values, double, device, quant_type, blocksize=blocksize, quant_storage=storage)


def element_by_element(param: Any) -> Tensor:
    """The definition, one Python number at a time, in float64."""
    state, (rows, columns) = param.quant_state, param.quant_state.shape
    data, scales = param.data.reshape(-1).view(torch.uint8).tolist(), state.absmax
    if state.nested:
        scales = bnb.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    code, scales = state.code.tolist(), scales.tolist()
    nibbles = [nibble for byte in data for nibble in (byte >> 4, byte & 15)][: rows * columns]
    values = [code[nibble] * scales[i // state.blocksize] for i, nibble in enumerate(nibbles)]
    return torch.tensor(values, dtype=torch.float64).view(rows, columns)


def in_triton(weight: NF4Weight, first_column: int = 0, width: int | None = None) -> Tensor:
    """What the kernel writes, in float32."""
    out = torch.empty(weight.shape[0], weight.shape[1] if width is None else width)
    nf4_dequantize_triton(out, weight.tensors, weight.sizes, first_column)
    return out


@pytest.mark.parametrize(*pairwise(dtype=DTYPES, quant_type=["nf4", "fp4"], double=[False, True]))
@pytest.mark.every(2)
def test_dequantized_weight_has_the_bits_of_bitsandbytes(dtype: torch.dtype, quant_type: str, double: bool) -> None:
    for shape in [*WHOLE, (5, 33), (3, 7)]:
        for blocksize in (64, 128, 256, 1024):
            if shape[1] % 2 == 0 and shape[1] % blocksize:
                continue  # its own kernel for the CPU (0.50) takes a wrong scale where a block spans rows
            param = quantized(shape, dtype, blocksize, double, quant_type)
            expected = bnb.functional.dequantize_4bit(param.data, param.quant_state)
            found = nf4_dequantize(NF4Weight.from_bitsandbytes(param))
            assert found.dtype == dtype
            assert torch.equal(found, expected), f"{shape}, blocks of {blocksize}"


@pytest.mark.parametrize("blocksize", [32, 64, 256])
def test_blocks_that_span_rows_take_their_own_scale(blocksize: int) -> None:
    for shape in (*RAGGED[:3], (33, 64)):
        param = quantized(shape, blocksize=blocksize)
        found = nf4_dequantize(NF4Weight.from_bitsandbytes(param))
        torch.testing.assert_close(found.double(), element_by_element(param), rtol=1e-6, atol=1e-7)


@every_row("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@every_row("double", [False, True])
def test_storage_is_borrowed_whatever_its_dtype(storage: torch.dtype, double: bool) -> None:
    param = quantized((48, 256), double=double, storage=storage)
    assert param.data.dtype == storage
    weight, state = NF4Weight.from_bitsandbytes(param), param.quant_state
    theirs = [param.data, state.absmax, state.code]
    if double:
        theirs += [state.state2.code, state.state2.absmax, state.offset]
    assert [part.data_ptr() for part in weight.tensors] == [part.data_ptr() for part in theirs]
    assert torch.equal(nf4_dequantize(weight), bnb.functional.dequantize_4bit(param.data, state))


def test_a_weight_that_was_never_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match="has no quant_state"):
        NF4Weight.from_bitsandbytes(torch.nn.Parameter(torch.zeros(4, 4)))
    param = quantized((48, 256), double=False)
    param.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="repacked"):
        NF4Weight.from_bitsandbytes(param)
    param = quantized((48, 256), double=False)
    param.quant_state.absmax = param.quant_state.absmax.half()
    with pytest.raises(ValueError, match=r"float32 scales; got \[torch.float16\]"):
        NF4Weight.from_bitsandbytes(param)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
def test_adjacent_weights_are_one_buffer_that_bitsandbytes_still_reads(double: bool, storage: torch.dtype) -> None:
    params = [quantized((rows, 256), torch.bfloat16, double=double, storage=storage) for rows in (128, 64, 33)]
    before = [bnb.functional.dequantize_4bit(param.data, param.quant_state) for param in params]
    old = [StorageWeakRef(param.data.untyped_storage()) for param in params]
    weight = NF4Weight.adjacent(params)
    assert weight.shape == (225, 256)
    assert weight.out_features == (128, 64, 33)
    assert all(storage.expired() for storage in old), "the separate weights are still in memory"
    assert torch.equal(nf4_dequantize(weight), torch.cat(before))
    for param, values in zip(params, before, strict=True):
        assert torch.equal(bnb.functional.dequantize_4bit(param.data, param.quant_state), values)
        assert param.data.untyped_storage().data_ptr() == weight.packed.untyped_storage().data_ptr()
        state, joined = param.quant_state, [weight.absmax, weight.nested_absmax, weight.offset][: 3 if double else 1]
        parts = [state.absmax] + ([state.state2.absmax, state.offset] if double else [])
        for part, whole in zip(parts, joined, strict=True):
            assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    params[1].data.zero_()
    assert torch.equal(nf4_dequantize(weight)[128:192], nf4_dequantize(NF4Weight.from_bitsandbytes(params[1])))


def test_weights_that_do_not_fit_are_refused_and_left_alone() -> None:
    first = quantized((64, 256))
    pointer = first.data.data_ptr()
    for other, message in [
        (quantized((64, 128)), "weight 1 does not fit"),
        (quantized((64, 256), blocksize=128), "weight 1 does not fit"),
        (quantized((64, 256), torch.bfloat16), "weight 1 does not fit"),
        (quantized((64, 256), double=False), "weight 1 does not fit"),
        (quantized((64, 256), quant_type="fp4"), "weight 1 has other code tables"),
    ]:
        with pytest.raises(ValueError, match=message):
            NF4Weight.adjacent([first, other])
    with pytest.raises(ValueError, match=r"weight 0, .33, 256., does not end at a multiple of 16384"):
        NF4Weight.adjacent([quantized((33, 256)), first])
    assert first.data.data_ptr() == pointer
    assert NF4Weight.adjacent([quantized((33, 256), double=False), quantized((64, 256), double=False)])


@pytest.mark.parametrize("double", [False, True])
def test_a_band_of_rows_is_a_view_with_its_own_scales(double: bool) -> None:
    params = [quantized((128, 256), double=double), quantized((97, 256), double=double)]
    weight = NF4Weight.adjacent(params)
    full = nf4_dequantize(weight)
    for start, stop in [(0, 225), (0, 1), (63, 130), (100, 225), (224, 225), (9, 9)]:
        band = weight.rows(start, stop)
        assert torch.equal(nf4_dequantize(band), full[start:stop]), f"rows {start} to {stop}"
        assert band.packed.untyped_storage().data_ptr() == weight.packed.untyped_storage().data_ptr()
        assert torch.equal(nf4_dequantize(band.rows(0, (stop - start) // 2)), full[start : (start + stop) // 2])
    with pytest.raises(ValueError, match="do not begin with a block"):
        NF4Weight.from_bitsandbytes(quantized((7, 100))).rows(1, 3)
    with pytest.raises(ValueError, match="rows 3 to 226"):
        weight.rows(3, 226)


def test_out_is_filled_in_its_own_dtype() -> None:
    weight = NF4Weight.from_bitsandbytes(quantized((33, 64), torch.bfloat16))
    out = torch.empty(33, 64, dtype=torch.float16)
    assert nf4_dequantize(weight, out) is out
    assert torch.equal(out, nf4_dequantize_ref(replace(weight, dtype=torch.float16)))
    for wrong in (torch.empty(33, 65), torch.empty(64, 33).T, torch.empty(33, 64, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"expected out .33, 64., contiguous, floating"):
            nf4_dequantize(weight, wrong)


def test_the_cpu_path_works_through_large_weights_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowmem_grpo.kernels.nf4.REFERENCE_ELEMENTS", 1000)
    for shape in [*WHOLE[:2], *RAGGED]:
        weight = NF4Weight.from_bitsandbytes(quantized(shape))
        assert torch.equal(nf4_dequantize(weight), nf4_dequantize_ref(weight))


@interpreted
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("blocksize", [32, 64, 256])
@pytest.mark.every(2)
def test_triton_writes_the_same_bits(blocksize: int, double: bool) -> None:
    for shape in [(33, 64), (1, 4096), (3, 1500), *RAGGED]:
        weight = NF4Weight.from_bitsandbytes(quantized(shape, blocksize=blocksize, double=double))
        assert torch.equal(in_triton(weight), nf4_dequantize_ref(weight)), f"{shape}"


@interpreted
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.every(2)
def test_triton_writes_bands_of_columns_and_rows(double: bool) -> None:
    weight = NF4Weight.adjacent([quantized((64, 512), double=double), quantized((33, 512), double=double)])
    full = nf4_dequantize_ref(weight)
    band = weight.rows(35, 97)
    assert torch.equal(in_triton(band), full[35:])
    assert torch.equal(in_triton(band, first_column=128, width=320), full[35:, 128:448])
    out = torch.empty(62, 320)
    nf4_dequantize_op(out, band.tensors, band.sizes, 128)
    assert torch.equal(out, full[35:, 128:448])


def test_operator_is_sound_and_it_compiles_and_fakes() -> None:
    for double in (False, True):
        weight = NF4Weight.from_bitsandbytes(quantized((33, 64), torch.bfloat16, double=double))
        torch.library.opcheck(nf4_dequantize_op, (torch.zeros(33, 64), weight.tensors, weight.sizes, 0))
    compiled = torch.compile(lambda index: nf4_dequantize(weight)[index], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.tensor([3, 1])), nf4_dequantize(weight)[[3, 1]])
    with FakeTensorMode() as mode:
        parts = [mode.from_tensor(part) for part in weight.tensors]
        fake = NF4Weight(*parts[:3], (33, 64), 64, torch.bfloat16, (33,), *parts[3:])
        assert nf4_dequantize(fake).dtype == torch.bfloat16


def test_every_compilation_is_listed_once() -> None:
    for capability in (75, 80, 86, 89, 90, 100, 120):
        names = [variant.name for variant in variants(capability, torch.float16)]
        assert len(names) == len(set(names)) == 4


@gpu
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_dequantizes_like_the_reference(dtype: torch.dtype, double: bool) -> None:
    for shape in [*WHOLE, *RAGGED, (4096, 1024)]:
        for blocksize in (64, 128):
            weight = NF4Weight.from_bitsandbytes(quantized(shape, dtype, blocksize, double, device="cuda"))
            reference = nf4_dequantize_ref(weight)
            truth = nf4_dequantize_ref(replace(weight, dtype=torch.float64)).double()
            found = nf4_dequantize(weight)
            assert_as_accurate(f"{shape}", found, reference, truth, ULP[dtype])
            if not double:
                assert torch.equal(found, reference)


@gpu
@pytest.mark.parametrize("double", [False, True])
def test_gpu_dequantizes_bands(double: bool) -> None:
    params = [quantized((rows, 512), torch.float16, double=double, device="cuda") for rows in (64, 33)]
    band = NF4Weight.adjacent(params).rows(35, 97)
    out = torch.empty(62, 320, dtype=torch.float16, device="cuda")
    nf4_dequantize_op(out, band.tensors, band.sizes, 128)
    expected = nf4_dequantize_ref(band)[:, 128:448]
    assert_as_accurate("band", out, expected, expected.double(), ULP[torch.float16])
