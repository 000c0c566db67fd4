"""Few rows times NF4 or FP8: the kernels in the interpreter and on a card, which weights they take, launches listed."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from accuracy import IN_16_BITS, ROUNDING, assert_as_accurate, interpreted
from card import HALVES, gpu
from fp8_weights import by_definition, in_fp8
from memory import CountedOps
from nf4_problem import quantized
from tables import every_row, pairwise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.few_rows import decode_launch, decode_ref, narrow_launch, taken_rows
from lowmem_grpo.kernels.few_rows_kernels import (
    STEP,
    fp8_decode_triton,
    fp8_variants,
    nf4_decode_triton,
    nf4_variants,
)
from lowmem_grpo.kernels.fp8 import FP8Weight, fp8_dequantize_ref, scales_shape
from lowmem_grpo.kernels.frozen_weight import FrozenWeight, can_decode, decode
from lowmem_grpo.kernels.nf4 import NF4Weight, nf4_dequantize_ref
from lowmem_grpo.kernels.triton_utils import SHARED_MEMORY

# FP8: blocks of the kinds that `in_fp8` has not.
KINDS = {"row": None, "tensor": None, "128": None, "groups": (1, 64), "tall": (3, 192)}
NF4 = ("nf4", "nested")


def problem(
    rows: int, features: tuple[int, ...], columns: int, kind: str = "row", rank: int = 5,
    dtype: torch.dtype = torch.float32, device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of `decode`."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return {"x": random(rows, columns), "weight": weight_of(features, columns, kind, dtype, device),
            "xa": random(rows, rank * len(features)), "lora_b": random(sum(features), rank), "scale": 0.3,
            "bias": random(sum(features))}


def weight_of(features: tuple[int, ...], columns: int, kind: str, dtype: torch.dtype, device: str) -> FrozenWeight:
    if kind in NF4:
        params = [quantized(size, columns, dtype, kind == "nested", device) for size in features]
        return NF4Weight.adjacent(params) if len(params) > 1 else NF4Weight.from_bitsandbytes(params[0])
    whole, block = (sum(features), columns), KINDS[kind]
    weight = in_fp8(whole, kind, dtype) if block is None else random_scales(whole, block, dtype)
    return replace(weight, codes=weight.codes.to(device), scales=weight.scales.to(device), out_features=features)


def random_scales(shape: tuple[int, int], block: tuple[int, int], dtype: torch.dtype) -> FP8Weight:
    """Random codes, and scales in blocks of this size."""
    codes = in_fp8(shape).codes
    scales = torch.rand(scales_shape(shape, block), generator=torch.Generator().manual_seed(3)) / 448
    return FP8Weight.from_codes(codes, scales, block, dtype)


def on_cpu(weight: FP8Weight) -> FP8Weight:
    return replace(weight, codes=weight.codes.cpu(), scales=weight.scales.cpu())


def by_reference(arguments: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """In plain torch of this dtype; in float64 on the values that codes and scales stand for."""
    wide = {name: part.to(dtype) if torch.is_tensor(part) else part for name, part in arguments.items()}
    weight = wide.pop("weight")
    if isinstance(weight, FP8Weight) and dtype == torch.float64:
        dense = by_definition(on_cpu(weight)).to(weight.device)
    else:
        dequantize: Any = nf4_dequantize_ref if isinstance(weight, NF4Weight) else fp8_dequantize_ref
        dense = dequantize(replace(weight, dtype=dtype))
    return decode_ref(wide.pop("x"), dense, weight.out_features, **wide)


def in_triton(x: Tensor, weight: FrozenWeight, xa: Tensor | None = None, lora_b: Tensor | None = None,
              scale: float | Tensor = 1.0, bias: Tensor | None = None) -> Tensor:
    """What the kernel computes."""
    launch: Any = nf4_decode_triton if isinstance(weight, NF4Weight) else fp8_decode_triton
    return launch(x, weight.tensors, weight.sizes, list(weight.out_features),
                  *few_rows.given_adapters(xa, lora_b, scale, bias))


def assert_no_worse(arguments: dict[str, Any], found: Tensor | None = None) -> None:
    """The kernel's error is at most that of the dequantized weight in the same dtype."""
    y = in_triton(**arguments) if found is None else found
    dtype = arguments["x"].dtype
    assert y.dtype == dtype
    reference, truth = (by_reference(arguments, kind) for kind in (dtype, torch.float64))
    assert_as_accurate("y", y, reference, truth, ROUNDING[dtype])


@interpreted
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 15, 16])
@pytest.mark.every(2)
def test_one_to_sixteen_rows_are_as_accurate_as_fp8_dequantized(rows: int) -> None:
    assert_no_worse(problem(rows, (33,), 80))
    assert_no_worse(problem(rows, (5, 64, 2), 144, "128", rank=17))


@interpreted
@pytest.mark.parametrize(("rows", "kind"), [(1, "nf4"), (3, "nested"), (8, "nf4"), (8, "nested"), (13, "nf4"),
                                            (32, "nested"), (63, "nf4")])
@pytest.mark.every(2)
def test_rows_are_as_accurate_as_nf4_dequantized(rows: int, kind: str) -> None:
    cases = (((33,), 64, 5), ((64, 128, 64), 512, 16), ((70,), 576, 40), ((64, 65), 256, 3))
    for features, columns, rank in cases[::2] if rows % 3 == 0 else cases[1::2] if rows % 2 else cases:
        arguments = problem(rows, features, columns, kind, rank)
        assert_no_worse(arguments if rank in (5, 40) else arguments | {"scale": torch.tensor(0.3)})


@interpreted
@pytest.mark.parametrize(*pairwise(
    rows=[2, 13, 63], kind=KINDS, **{"features,columns": [((33,), 64), ((128, 70), 400), ((131, 1, 64), 1104)]}
))
@pytest.mark.every(2)
def test_every_kind_of_scales_is_applied_to_its_own_weights(
    kind: str, rows: int, features: tuple[int, ...], columns: int
) -> None:
    arguments = problem(rows, features, columns, kind) | {"scale": torch.tensor(0.3)}
    assert_no_worse(arguments)
    assert_no_worse({name: arguments[name] for name in ("x", "weight")})  # without LoRA and bias


@interpreted
def test_bands_of_rows_of_nf4_take_their_own_scales_without_lora_and_bias() -> None:
    arguments = problem(5, (128, 64, 33), 256, "nf4")
    for band in (arguments["weight"], arguments["weight"].rows(37, 200), arguments["weight"].rows(200, 201)):
        assert_no_worse({"x": arguments["x"], "weight": band})


@pytest.mark.parametrize(("device", "dtype"), IN_16_BITS)
def test_weights_are_rounded_to_16_bits_as_training_rounds_them(device: str, dtype: torch.dtype) -> None:
    """A row of x with a single 1 shows a column of the weight: no sum is rounded."""
    for kind in KINDS:
        arguments = problem(9, (70,), 144, kind, dtype=dtype, device=device)
        weight = arguments["weight"]
        eye = torch.eye(9, 144, dtype=dtype, device=device)
        columns = on_cpu(weight).project(torch.eye(144, dtype=dtype))[:9].to(device)
        assert torch.equal(in_triton(eye, weight), columns), kind
        assert_no_worse(arguments)


@pytest.mark.parametrize(("device", "dtype"), IN_16_BITS)
@pytest.mark.parametrize(("columns", "read"), [(192, 32), (512, 128)])
def test_blocks_of_nf4_read_together_keep_the_bits_of_training(
    device: str, dtype: torch.dtype, columns: int, read: int
) -> None:
    assert narrow_launch(8, 70, columns, 80).constexprs["BYTES"] == read
    shown = 73 * torch.arange(8) % columns  # a column in each block of 64, even and odd
    x = torch.eye(columns, dtype=dtype, device=device)[shown]
    for kind in NF4:
        weight = weight_of((70,), columns, kind, dtype, device)
        assert isinstance(weight, NF4Weight)
        assert torch.equal(in_triton(x, weight), nf4_dequantize_ref(replace(weight, dtype=dtype))[:, shown].T), kind


@interpreted
@pytest.mark.parametrize("capability", [80, 90])
def test_zero_and_extreme_scales_and_every_code_keep_their_values(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits moved, and with the card's own conversion."""
    monkeypatch.setattr("lowmem_grpo.kernels.few_rows_kernels.capability", lambda device: capability)
    scales = torch.tensor([0.0, 1e-38, 1e-30, 1.0, 1e30, 2.0**-140, 7e35]).reshape(7, 1)
    codes = torch.arange(256, dtype=torch.uint8).repeat(7, 1)
    codes[:, [127, 255]] = 0
    weight = FP8Weight.from_codes(codes, scales, (1, 256), torch.float32)
    x = torch.eye(64, 256)
    assert torch.equal(in_triton(x, weight), weight.project(x))
    if capability == 80:  # the interpreter's own conversion knows no NaN
        spoilt = replace(weight, codes=codes.index_fill(1, torch.tensor([9]), 255))
        assert in_triton(x, spoilt).isnan().all(), "255 is NaN, and so is 0 times it"


@interpreted
def test_results_and_inputs_of_any_strides_are_read_right() -> None:
    arguments = problem(5, (70,), 144)
    strided = {name: part.T.contiguous().T if torch.is_tensor(part) and part.ndim == 2 else part
               for name, part in arguments.items()}
    assert not strided["x"].is_contiguous()
    assert torch.equal(decode(**strided), decode(**arguments))
    x = torch.full((5, 288), float("nan"))
    x[:, ::2] = arguments["x"]
    assert torch.equal(decode(**(arguments | {"x": x[:, ::2]})), decode(**arguments))


@pytest.mark.parametrize(("operation", "kind", "features"), [
    (FP8Weight.decode_op, "row", (33, 37)), (NF4Weight.decode_op, "nf4", (70,)),
    (NF4Weight.decode_op, "nested", (128, 64, 33)),
])
def test_the_operators_on_the_cpu_are_the_reference_and_pass_torchs_checks(
    operation: Any, kind: str, features: tuple[int, ...]
) -> None:
    arguments = problem(5, features, 256, kind)
    torch.testing.assert_close(decode(**arguments), by_reference(arguments, torch.float64).float())
    x, weight = arguments["x"], arguments["weight"]
    assert torch.equal(decode(x, weight), weight.project(x))
    for scale in (0.5, torch.tensor(0.3)):
        given = few_rows.given_adapters(*(arguments[name] for name in ("xa", "lora_b")), scale, arguments["bias"])
        for rest in (given, (None, None, 0.0, None, None)):
            torch.library.opcheck(operation, (x, weight.tensors, weight.sizes, list(weight.out_features), *rest))


TAKEN = {"row": (64, 144, (1, 144)), "all": (64, 144, (64, 144)), "128": (300, 384, (128, 128)),
         "groups of 64": (64, 384, (1, 64))}
NOT_TAKEN = {"rows that begin anywhere": (64, 130, (1, 130)), "blocks of 32": (64, 384, (1, 32)),
             "groups of 80": (64, 400, (1, 80)), "no rows": (0, 144, (1, 144))}


@pytest.mark.parametrize("name", TAKEN | NOT_TAKEN)
def test_a_card_multiplies_few_rows_with_the_codes_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "capability", lambda device: 90)
    out, columns, block = (TAKEN | NOT_TAKEN)[name]
    with FakeTensorMode(), torch.device("cuda"):
        weight = FP8Weight.from_codes(torch.empty(out, columns, dtype=torch.uint8),
                              torch.empty(scales_shape((out, columns), block)), block, torch.bfloat16)
        for rows, dtype in ((1, torch.bfloat16), (64, torch.float16), (65, torch.bfloat16), (4, torch.float32)):
            x = torch.empty(rows, columns, dtype=dtype)
            assert can_decode(x, weight) == (name in TAKEN and rows <= 64 and dtype != torch.float32)
            if can_decode(x, weight):
                with CountedOps() as called:
                    assert weight.project(x).shape == (rows, out)
                    assert [part.shape for part in weight.project_each(x, [None])] == [(rows, out)]
                assert [name for name in called.names if "lowmem_grpo" in name] == ["lowmem_grpo::fp8_decode"] * 2
                assert not [name for name in called.names if "zeros" in name], "none in place of a bias"
    assert not can_decode(torch.empty(1, columns, dtype=torch.bfloat16), in_fp8((4, columns))), "a CPU tensor"


def test_cards_without_tensor_cores_in_triton_take_some_more_rows_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = problem(1, (64,), 128, "nf4")["weight"]
    for capability, most in ((70, 32), (75, 40), (80, 64), (90, 64), (120, 64)):
        monkeypatch.setattr(few_rows, "capability", lambda device, chip=capability: chip)
        with FakeTensorMode(), torch.device("cuda"):
            for rows in (1, most, most + 1):
                assert can_decode(torch.empty(rows, 128, dtype=torch.float16), weight) == (rows <= most)
            assert not can_decode(torch.empty(1, 128, dtype=torch.float16, device="cpu"), weight)


@interpreted
@pytest.mark.parametrize(("features", "columns", "kind", "rank"), [
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (((33,), 80, "row", 17), ((5, 64, 2), 144, "128", 17))),
    ((70,), 576, "nf4", 40), ((64, 128, 64), 512, "nested", 3),
])
def test_rows_in_blocks_of_8_get_the_bits_that_they_get_on_their_own(
    features: tuple[int, ...], columns: int, kind: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.kernels.few_rows_kernels.capability", lambda device: 75)
    arguments = problem(24, features, columns, kind, rank)
    y = in_triton(**arguments)
    for first in (0, 8, 16):
        rows = {name: arguments[name][first : first + 8] for name in ("x", "xa")}
        assert torch.equal(y[first : first + 8], in_triton(**(arguments | rows)))
    assert_no_worse(problem(21, features, columns, kind, rank))


@every_row("capability", [*SHARED_MEMORY, 87])
def test_every_launch_is_listed(capability: int) -> None:
    for dtype in HALVES:
        fp8 = [(one.launch, one.constexprs) for one in fp8_variants(capability, dtype)]
        for rows, outputs, by_row in product(range(1, taken_rows(capability, "fp8") + 1), (1, 8191, 8192, 150_000),
                                             (True, False)):
            wanted = {"BY_ROW": by_row, "NATIVE": capability >= 89}
            assert (decode_launch(rows, outputs, capability, STEP), wanted) in fp8
        nf4 = [one.launch for one in nf4_variants(capability, dtype)]
        for rows, outputs, columns in product(range(1, taken_rows(capability, "nf4") + 1),
                                              (1, 100, 2048, 8192, 150_000), (64, 2048, 14336)):
            assert narrow_launch(rows, outputs, columns, capability) in nf4


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [*KINDS, *NF4])
def test_gpu_is_as_accurate_as_the_reference(kind: str, dtype: torch.dtype) -> None:
    for rows in (1, 2, 3, 8, 13, 17, 33, 64):
        for features, columns in (((70,), 192), ((64, 128, 64), 2048), ((9000,), 512)):
            arguments = problem(rows, features, columns, kind, 16, dtype, "cuda")
            if can_decode(arguments["x"], arguments["weight"]):
                assert_no_worse(arguments, decode(**arguments))


@gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["128", "nested"])
def test_gpu_gives_the_same_bits_every_time_and_in_a_graph(kind: str, dtype: torch.dtype) -> None:
    arguments = problem(8, (4096,), 4096, kind, 16, dtype, "cuda")
    first = decode(**arguments)
    assert all(torch.equal(decode(**arguments), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode(**arguments)
    graph.replay()
    assert torch.equal(y, first)
