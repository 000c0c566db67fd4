"""NVFP4 weights: every code and scale by compressed-tensors' own decoding, bands, what is refused, the kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import IN_16_BITS, ROUNDING, assert_as_accurate, interpreted
from card import HALVES, gpu
from nvfp4_weights import decoded, in_nvfp4, packed, random_parts
from tables import every_row
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.few_rows import decode_ref, narrow_launch
from lowmem_grpo.kernels.few_rows_kernels import nvfp4_decode_triton, nvfp4_variants
from lowmem_grpo.kernels.frozen_weight import can_decode, decode
from lowmem_grpo.kernels.nvfp4 import NVFP4Weight, nvfp4_dequantize_op, nvfp4_dequantize_triton
from lowmem_grpo.kernels.triton_utils import SHARED_MEMORY

SHAPES = [(1, 16), (3, 48), (33, 512), (17, 272), (40, 1040)]
BANDS = [(0, 0, 33, 512), (5, 0, 28, 512), (0, 16, 33, 16), (32, 496, 1, 16), (3, 64, 20, 288)]


def in_triton(weight: NVFP4Weight, dtype: torch.dtype = torch.float32, band: tuple[int, ...] | None = None) -> Tensor:
    """What the kernel writes: all, or a band (row, column, rows, width)."""
    row, column, *shape = band or (0, 0, *weight.shape)
    out = torch.empty(shape, dtype=dtype, device=weight.device)
    nvfp4_dequantize_triton(out, *weight.tensors, row, column)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_with_every_scale_has_the_value_of_compressed_tensors(dtype: torch.dtype) -> None:
    """Each of 254 finite scales beside all 16 codes, low and high in a byte."""
    codes = torch.tensor([low | (low * 7 + 3) % 16 << 4 for low in range(16)], dtype=torch.uint8).repeat(1, 254)
    scales = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    for divisor in (1.0, 2688.7, 1e-3):
        parts = {"weight_packed": codes, "weight_scale": scales.repeat_interleave(2)[None],
                 "weight_global_scale": torch.tensor([divisor])}
        weight = NVFP4Weight.from_codes(*parts.values(), dtype)
        assert torch.equal(weight.dequantized(), decoded(parts, dtype)), divisor


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=interpreted)])
def test_weights_and_bands_of_them_are_decoded_as_by_compressed_tensors(kernel: bool) -> None:
    for shape in SHAPES:
        weight = in_nvfp4(*shape)
        found = in_triton(weight) if kernel else weight.dequantized()
        assert torch.equal(found, decoded(random_parts(*shape))), shape
    weight, whole = in_nvfp4(33, 512), decoded(random_parts(33, 512))
    for row, column, rows, width in BANDS:
        found = torch.empty(rows, width)
        weight.fill(found, row, column)
        found = in_triton(weight, band=(row, column, rows, width)) if kernel else found
        assert torch.equal(found, whole[row : row + rows, column : column + width]), (row, column)
    assert torch.equal(weight.rows(4, 9).dequantized(), whole[4:9])


@interpreted
def test_the_kernels_read_no_scale_beyond_a_row() -> None:
    """Scales in a buffer with NaN after the last one: tiles and steps end beyond rows of 272 and 192 columns."""
    for columns in (272, 192):
        weight, room = in_nvfp4(17, columns), torch.full((17 * columns // 16 + 64,), 127, dtype=torch.uint8)
        inside = room[: weight.scales.numel()].view_as(weight.scales).copy_(weight.scales)
        beside = replace(weight, scales=inside)
        assert torch.equal(in_triton(beside), weight.dequantized())
    y = decoding(torch.ones(3, 192), beside)
    assert y.isfinite().all()


@every_row(("change", "message"), [
    ({"weight_packed": torch.zeros(4, 12, dtype=torch.uint8)}, "contiguous uint8 codes"),
    ({"weight_packed": torch.zeros(16, 4, dtype=torch.uint8).T}, "contiguous uint8 codes"),
    ({"weight_packed": torch.zeros(4, 16)}, "contiguous uint8 codes"),
    ({"weight_scale": torch.zeros(4, 4, dtype=torch.uint8)}, r"scales \(4, 2\)"),
    ({"weight_scale": torch.ones(4, 2)}, r"scales \(4, 2\)"),
    ({"weight_global_scale": torch.ones(1).half()}, "divisors in float32"),
    ({"weight_global_scale": torch.ones(3)}, "1 or 4 divisors"),
    ({"weight_scale": torch.full((4, 2), 255, dtype=torch.uint8)}, "scales are not finite"),
    ({"weight_global_scale": torch.zeros(1)}, "global scale is 0"),
    ({"weight_global_scale": torch.tensor([float("inf")])}, "not finite"),
])
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NVFP4Weight.from_codes(*(random_parts(4, 32) | change).values(), torch.float32)


def test_a_weight_that_was_cast_is_refused() -> None:
    weight = in_nvfp4(4, 32)
    with pytest.raises(ValueError, match=r"cast to torch.bfloat16; load the model again"):
        NVFP4Weight.from_parts([*weight.tensors[:2], weight.divisors.bfloat16()], [], [4], torch.float32)


def test_the_operation_passes_torchs_checks() -> None:
    torch.library.opcheck(nvfp4_dequantize_op, (torch.empty(4, 32), *in_nvfp4(7, 64).tensors, 1, 16))
    x, weight = torch.randn(5, 64), in_nvfp4(7, 64)
    for rest in (few_rows.given_adapters(None, None, 1.0, None),
                 few_rows.given_adapters(torch.randn(5, 3), torch.randn(7, 3), 0.5, torch.randn(7))):
        torch.library.opcheck(NVFP4Weight.decode_op, (x, weight.tensors, [], [7], *rest))


# The kernel for few rows


def decoding(x: Tensor, weight: NVFP4Weight, xa: Tensor | None = None, lora_b: Tensor | None = None,
             scale: float | Tensor = 1.0, bias: Tensor | None = None) -> Tensor:
    """What the kernel computes."""
    return nvfp4_decode_triton(x, weight.tensors, [], list(weight.out_features),
                               *few_rows.given_adapters(xa, lora_b, scale, bias))


def problem(rows: int, features: tuple[int, ...], columns: int, dtype: torch.dtype = torch.float32,
            device: str = "cpu") -> dict[str, Any]:
    """Arguments of `decode`; each matrix has a global scale of its own."""
    generator = torch.Generator().manual_seed(rows)
    each = [packed(torch.randn(size, columns, generator=generator) * size) for size in features]
    weights = [NVFP4Weight.from_codes(*(parts[f"weight_{name}"] for name in ("packed", "scale", "global_scale")), dtype)
               for parts in each]
    whole = (torch.cat(parts).to(device) for parts in zip(*(weight.tensors for weight in weights), strict=True))
    weight = NVFP4Weight(*whole, dtype, features)
    a, b, bias, x = (torch.randn(shape, generator=generator).to(device, dtype) for shape in (
        (rows, 5 * len(features)), (sum(features), 5), (sum(features),), (rows, columns)))
    return {"x": x, "weight": weight, "xa": a, "lora_b": b, "scale": 0.3, "bias": bias}


def assert_no_worse(arguments: dict[str, Any], found: Tensor) -> None:
    """The kernel's error is at most that of the dequantized weight in the same dtype."""
    weight, dtype = arguments["weight"], arguments["x"].dtype
    results = []
    for kind in (dtype, torch.float64):
        wide = {name: part.to(kind) if torch.is_tensor(part) else part for name, part in arguments.items()}
        wide.pop("weight")
        dense = weight.dequantized(torch.empty(weight.shape, dtype=dtype, device=weight.device)).to(kind)
        results.append(decode_ref(wide.pop("x"), dense, weight.out_features, **wide))
    assert_as_accurate("y", found, *results, ROUNDING[dtype])


@interpreted
@pytest.mark.parametrize("rows", [1, 7, 16, 63])
def test_a_few_rows_are_as_accurate_as_dequantized(rows: int) -> None:
    for features, columns in (((33,), 64), ((64, 16, 5), 192), ((70,), 512)):
        arguments = problem(rows, features, columns)
        assert_no_worse(arguments, decoding(**arguments))
        assert torch.equal(decode(**arguments), decode_ref(
            arguments["x"], arguments["weight"].dequantized(), features,
            *(arguments[name] for name in ("xa", "lora_b", "scale", "bias"))))


@pytest.mark.parametrize(("device", "dtype"), IN_16_BITS)
@pytest.mark.parametrize("columns", [64, 192, 512])
def test_the_kernels_round_weights_to_16_bits_as_training_rounds_them(
    device: str, dtype: torch.dtype, columns: int
) -> None:
    """A row of x with a single 1 shows a column of the weight: no sum is rounded."""
    weight = in_nvfp4(70, columns, dtype, device)
    whole = decoded(random_parts(70, columns), dtype).to(device)
    assert torch.equal(in_triton(weight, dtype), whole)
    shown = 73 * torch.arange(8) % columns
    assert torch.equal(decoding(torch.eye(columns, dtype=dtype, device=device)[shown], weight), whole[:, shown].T)


def test_a_card_takes_few_rows_of_16_bits_with_the_codes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for chip, most in ((70, 24), (75, 32), (90, 64)):
        monkeypatch.setattr(few_rows, "capability", lambda device, chip=chip: chip)
        with FakeTensorMode(), torch.device("cuda"):
            for columns, taken in ((128, True), (144, False)):
                parts = torch.empty(64, columns // 2), torch.empty(64, columns // 16)
                weight = NVFP4Weight(*(part.to(torch.uint8) for part in parts), torch.empty(64), torch.float16, (64,))
                for rows in (1, most, most + 1):
                    x = torch.empty(rows, columns, dtype=torch.float16)
                    assert can_decode(x, weight) == (taken and rows <= most)
                assert not can_decode(torch.empty(1, columns), weight)


@every_row("capability", [*SHARED_MEMORY, 87])
def test_every_launch_is_listed(capability: int) -> None:
    listed = [one.launch for one in nvfp4_variants(capability, torch.float16)]
    for rows in range(1, few_rows.taken_rows(capability, "nvfp4") + 1):
        for outputs in (1, 100, 2048, 8192, 150_000):
            for columns in (64, 2048, 14336):
                assert narrow_launch(rows, outputs, columns, capability) in listed


@gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_is_as_accurate_as_the_reference(dtype: torch.dtype) -> None:
    for rows in (1, 2, 8, 13, 33, 64):
        for features, columns in (((70,), 192), ((64, 128, 64), 2048), ((9000,), 512)):
            arguments = problem(rows, features, columns, dtype, "cuda")
            assert_no_worse(arguments, decode(**arguments))
    for shape in SHAPES:
        weight = in_nvfp4(*shape, dtype, "cuda")
        assert torch.equal(weight.dequantized().cpu(), decoded(random_parts(*shape), dtype))
