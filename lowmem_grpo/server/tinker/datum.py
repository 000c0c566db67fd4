"""`Datum`: a sequence to train on, parsed from a client's request and checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.losses.token_losses import LOSSES, checked_settings, loss_named
from lowmem_grpo.server.tinker import wire

DTYPES = {wire.FLOAT32: torch.float32, wire.INT64: torch.int64, wire.INT32: torch.int32, wire.BFLOAT16: torch.bfloat16}
MOST_WIDTH = 128  # targets per token
TARGETS = "target_tokens"
MOST_CELLS = 2**24  # targets per request, if tokens have several
KNOWN = {TARGETS, *(name for loss in LOSSES.values() for name in loss.needs)}


@dataclass(frozen=True)
class Cells:
    """The E entries of a sparse (T, K) matrix of targets and their weights, row by row."""

    rows: Tensor  # (E,) int64, 0 to T - 1
    columns: Tensor  # (E,) int64, 0 to K - 1
    tokens: Tensor  # (E,) int64
    weights: Tensor  # (E,) float32
    length: int  # T
    width: int  # K

    def matrix(self, values: Tensor) -> Tensor:
        """Return values (E,) as a (T, K) matrix, with 0 where there is no entry."""
        return values.new_zeros(self.length, self.width).index_put((self.rows, self.columns), values)


@dataclass(frozen=True)
class Entries:
    """The values that a Tensor message lists."""

    shape: list[int]  # [T], or [T, K] if tokens have several values
    cells: Tensor  # (E,) int64, t * K + k in ascending order
    values: Tensor  # (E,)


def cells_of(targets: Entries, weights: Entries) -> Cells:
    """Return the Cells that `targets` or `weights` list, with 0 where one of the two has no entry."""
    length, width = targets.shape
    cells = torch.cat([targets.cells, weights.cells]).unique()
    ids, numbers = (torch.zeros(len(cells), dtype=each.values.dtype).index_put(
        (torch.searchsorted(cells, each.cells),), each.values) for each in (targets, weights))
    return Cells(cells // width, cells % width, ids, numbers, length, width)


def entries_of(tensor: Any, where: str, length: int, dtype: torch.dtype) -> Entries:
    """Return the values of a Tensor message for `length` tokens: integers or floats, as `dtype` says."""
    sparse = tensor.WhichOneof("kind") == "sparse_csr"
    values = values_of(tensor, tensor.sparse_csr.values if sparse else tensor.dense, where, dtype)
    shape = list(tensor.shape) or [len(values)]
    if shape[0] != length or (sparse and len(shape) == 1) or shape[2:] or not 1 <= (*shape, 1)[1] <= MOST_WIDTH:
        raise ValueError(f"{where} has the shape {shape}{' and is sparse' * sparse}; it must be [{length}], or "
                         f"[{length}, K], a row for each token of model_input, with at most {MOST_WIDTH} targets")
    cells = csr_cells(tensor.sparse_csr, where, shape) if sparse else torch.arange(math.prod(shape))
    if len(cells) != len(values):
        raise ValueError(f"{where} has {len(values)} values for {len(cells)} places; each needs one")
    return Entries(shape, cells, values)


def csr_cells(matrix: Any, where: str, shape: list[int]) -> Tensor:
    """Return the places (N,) of a sparse matrix's values in the flat matrix. ValueError for damaged indices."""
    crow, columns = (from_bytes(getattr(matrix, name), torch.int64, f"{where}.{name}")
                     for name in ("crow_indices", "col_indices"))
    # neighbours are compared: differences of numbers that far apart wrap round
    if (len(crow) != shape[0] + 1 or crow[0] != 0 or crow[-1] != len(columns) or bool((crow[1:] < crow[:-1]).any())):
        raise ValueError(f"{where}.crow_indices must be {shape[0] + 1} numbers that never fall, from 0 to the number "
                         f"of columns that are listed, {len(columns)}")
    rows = torch.repeat_interleave(torch.arange(shape[0]), crow.diff())
    if bool(((columns < 0) | (columns >= shape[1])).any()) or bool(
            ((columns[1:] <= columns[:-1]) & (rows[1:] == rows[:-1])).any()):
        raise ValueError(f"{where}.col_indices must rise within a row, and be 0 to {shape[1] - 1}")
    return rows * shape[1] + columns


def values_of(tensor: Any, data: bytes, where: str, dtype: torch.dtype) -> Tensor:
    """Return the values (N,) of a Tensor message from its bytes: integers or finite floats, as `dtype` says."""
    floats = dtype.is_floating_point
    if tensor.dtype not in DTYPES or DTYPES[tensor.dtype].is_floating_point != floats:
        raise ValueError(f"{where} has the dtype {tensor.dtype}; it must be "
                         + ("1 (float32) or 4 (bfloat16): give floats" if floats else "2 (int64) or 3 (int32)"))
    values = from_bytes(data, DTYPES[tensor.dtype], where)
    if floats and not bool(values.isfinite().all()):
        raise ValueError(f"{where} holds NaN or infinity; every value must be a finite number")
    return values.to(dtype)


def from_bytes(data: bytes, dtype: torch.dtype, where: str) -> Tensor:
    """Return the values (N,) in little-endian bytes."""
    if len(data) % dtype.itemsize:
        raise ValueError(f"{where} has {len(data)} bytes; it must be a multiple of {dtype.itemsize}")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def as_bytes(values: Tensor) -> bytes:
    """Return host values as little-endian bytes."""
    return values.contiguous().numpy().tobytes()


@dataclass(frozen=True)
class Datum:
    """T tokens, a target for each, and the loss's inputs for each."""

    ids: list[int]  # (T,)
    targets: Tensor  # (T,) int64; placeholders if tokens have several targets
    values: dict[str, Tensor]  # (T,) float32 each; empty if tokens have several targets
    cells: Cells | None = None  # the targets if tokens have several


@dataclass(frozen=True)
class ModelBounds:
    vocabulary: int  # token ids are below it
    context: int  # the most tokens of a sequence


@dataclass(frozen=True)
class Pass:
    """A checked call of forward or forward_backward."""

    data: list[Datum]
    loss: str
    settings: dict[str, float]
    forward_only: bool


def pass_of(request: Any, bounds: ModelBounds) -> Pass:
    """Check a ForwardBackwardRequest, and return its Pass. ValueError names the field that is wrong."""
    newer = {key: getattr(value, value.WhichOneof("kind") or "text")
             for key, value in request.loss_fn_config_v2.items()}
    settings = checked_settings(request.loss_fn, newer or dict(request.loss_fn_config))
    if not request.data:
        raise ValueError("data is empty; send at least one datum")
    needs = loss_named(request.loss_fn).needs
    data = [datum_of(datum, f"data[{place}]", needs, bounds, request.loss_fn)
            for place, datum in enumerate(request.data)]
    if (cells := sum(datum.cells.length * datum.cells.width for datum in data if datum.cells is not None)) > MOST_CELLS:
        raise ValueError(f"data has {cells} targets; at most {MOST_CELLS} are taken where tokens have several: send "
                         "fewer datums in a call")
    return Pass(data, request.loss_fn, settings, request.forward_only)


def datum_of(datum: Any, where: str, needs: tuple[str, ...], bounds: ModelBounds, loss: str) -> Datum:
    """Check a Datum message, and return its Datum. Inputs that only other losses need are ignored."""
    ids = ids_of(datum.model_input, f"{where}.model_input", bounds)
    inputs = f"{where}.loss_fn_inputs"
    if unknown := sorted(datum.loss_fn_inputs.keys() - KNOWN):
        raise ValueError(f"{inputs} has {unknown[0]!r}, which no loss here takes; they take {', '.join(sorted(KNOWN))}")
    if missing := [name for name in (TARGETS, *needs) if name not in datum.loss_fn_inputs]:
        raise ValueError(f"{inputs} lacks {missing[0]!r}; {loss} needs {', '.join((TARGETS, *needs))}, each with a "
                         "value for every token of model_input")
    read = {name: entries_of(datum.loss_fn_inputs[name], f"{inputs}[{name!r}]", len(ids),
                             torch.int64 if name == TARGETS else torch.float32) for name in (TARGETS, *needs)}
    targets = read.pop(TARGETS)
    for name, entries in read.items():
        if entries.shape != targets.shape:
            raise ValueError(f"{inputs}[{name!r}] has the shape {entries.shape}, and the targets {targets.shape}; each "
                             "target needs one value")
    check_ids(targets.values, f"{inputs}[{TARGETS!r}]", bounds)
    if len(targets.shape) == 1:
        return Datum(ids, targets.values, {name: entries.values for name, entries in read.items()})
    if loss != "cross_entropy":
        raise ValueError(f"{inputs}[{TARGETS!r}] has several targets for a token, which {loss} does not take: only "
                         "cross_entropy does")
    return Datum(ids, torch.zeros(len(ids), dtype=torch.int64), {}, cells_of(targets, read["weights"]))


def ids_of(chunks: Any, where: str, bounds: ModelBounds) -> list[int]:
    """Return the token ids of a message's chunks; ValueError, with `where`, for too many or for other kinds."""
    tokens: list[int] = []
    size = len(chunks) if len(chunks) > bounds.context else sum(len(each.encoded_text.tokens) for each in chunks) // 4
    if size > bounds.context:  # before any is read: millions of empty chunks take minutes
        raise ValueError(f"{where} has {size} tokens or chunks; the server takes at most {bounds.context}")
    for place, chunk in enumerate(chunks):
        kind, here = chunk.WhichOneof("kind"), f"{where}.chunks[{place}]"
        if kind != "encoded_text":
            raise ValueError(f"{here} is {kind or 'of an unknown kind'}; only encoded text is taken: this server "
                             "trains on text")
        ids = from_bytes(chunk.encoded_text.tokens, torch.int32, f"{here}.tokens")
        check_ids(ids, f"{here}.tokens", bounds)
        tokens += ids.tolist()
    if not tokens:
        raise ValueError(f"{where} has no tokens; it needs at least one")
    return tokens


def check_ids(ids: Tensor, where: str, bounds: ModelBounds) -> None:
    """Raise ValueError for an id outside the model's vocabulary."""
    wrong = ((ids < 0) | (ids >= bounds.vocabulary)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        advice = "; for a token that is not to be learned, take any id and the weight 0" * (int(ids[place]) == -100)
        raise ValueError(f"{where}[{place}] is {int(ids[place])}; the model's token ids are 0 to "
                         f"{bounds.vocabulary - 1}{advice}")


def output_of(logprobs: list[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput: `logprobs` (T,) or (T, K) float32 of each datum, in the request's order."""
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    for shape, group in groupby(logprobs, lambda part: part.shape[1:]):
        alike = list(group)  # datums whose tokens have the same number of targets share a record
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(alike))
        field = record.fields["logprobs"]
        field.dtype, field.data = wire.FLOAT32, as_bytes(torch.cat(alike).float())
        field.trailing_shape.extend(shape)
        field.offsets = as_bytes(torch.tensor([0, *(part.numel() * 4 for part in alike)]).cumsum(0))
    return bytes(message.SerializeToString())
