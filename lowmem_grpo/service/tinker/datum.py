"""`Datum`: a sequence to train on, as a client sent it, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.losses.token_losses import LOSSES, checked_settings, loss_named
from lowmem_grpo.service.tinker import wire
from lowmem_grpo.service.tinker.cells import Cells, as_bytes, cells_of, from_bytes, is_wide, values_of

TARGETS = "target_tokens"
MOST_CELLS = 2**24  # targets of a request, where tokens have several
KNOWN = {TARGETS, *(name for loss in LOSSES.values() for name in loss.needs)}


@dataclass(frozen=True)
class Datum:
    """T tokens, a target for each, and what the loss needs of each."""

    ids: list[int]  # (T,)
    targets: Tensor  # (T,) int64; where there are several of each, the first
    values: dict[str, Tensor]  # (T,) float32 each; empty where there are several targets
    cells: Cells | None = None  # several targets of each token


@dataclass(frozen=True)
class Bounds:
    """The limits of a model."""

    vocabulary: int  # ids are below it
    context: int  # tokens of a sequence


@dataclass(frozen=True)
class Pass:
    """A call of forward or forward_backward."""

    data: list[Datum]
    loss: str
    settings: dict[str, float]
    forward_only: bool


def pass_of(request: Any, bounds: Bounds) -> Pass:
    """A ForwardBackwardRequest, checked. ValueError names the field that is wrong."""
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


def datum_of(datum: Any, where: str, needs: tuple[str, ...], bounds: Bounds, loss: str) -> Datum:
    """A Datum message, checked. What another loss would need may be there, and is left out."""
    ids = ids_of(datum.model_input, f"{where}.model_input", bounds)
    if len(ids) > bounds.context:
        raise ValueError(f"{where}.model_input has {len(ids)} tokens; the server takes at most {bounds.context}")
    inputs = f"{where}.loss_fn_inputs"
    if unknown := sorted(datum.loss_fn_inputs.keys() - KNOWN):
        raise ValueError(f"{inputs} has {unknown[0]!r}, which no loss here takes; they take {', '.join(sorted(KNOWN))}")
    if missing := [name for name in (TARGETS, *needs) if name not in datum.loss_fn_inputs]:
        raise ValueError(f"{inputs} lacks {missing[0]!r}; {loss} needs {', '.join((TARGETS, *needs))}, each with a "
                         "value for every token of model_input")
    if is_wide(datum.loss_fn_inputs[TARGETS]):
        return wide_datum(datum.loss_fn_inputs, inputs, ids, bounds, loss)
    targets = tensor_of(datum.loss_fn_inputs[TARGETS], f"{inputs}[{TARGETS!r}]", len(ids), torch.int64)
    check_ids(targets, f"{inputs}[{TARGETS!r}]", bounds)
    values = {name: tensor_of(datum.loss_fn_inputs[name], f"{inputs}[{name!r}]", len(ids), torch.float32)
              for name in needs}
    return Datum(ids, targets, values)


def wide_datum(inputs: Any, where: str, ids: list[int], bounds: Bounds, loss: str) -> Datum:
    if loss != "cross_entropy":
        raise ValueError(f"{where}[{TARGETS!r}] has several targets for a token, which {loss} does not take: only "
                         "cross_entropy does")
    cells = cells_of(inputs[TARGETS], inputs["weights"], where, len(ids))
    check_ids(cells.tokens, f"{where}[{TARGETS!r}]", bounds)
    firsts = torch.zeros(len(ids), dtype=torch.int64)
    return Datum(ids, firsts, {}, cells)


def ids_of(chunks: Any, where: str, bounds: Bounds) -> list[int]:
    tokens: list[int] = []
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


def check_ids(ids: Tensor, where: str, bounds: Bounds) -> None:
    wrong = ((ids < 0) | (ids >= bounds.vocabulary)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(f"{where}[{place}] is {int(ids[place])}; the model's token ids are 0 to "
                         f"{bounds.vocabulary - 1}")


def tensor_of(tensor: Any, where: str, length: int, dtype: torch.dtype) -> Tensor:
    """A Tensor message of (length,) values, whole numbers or floats as `dtype` says."""
    if is_wide(tensor):
        raise ValueError(f"{where} has the shape {list(tensor.shape)}, and may be sparse; it must be [{length}], as "
                         "the targets are: several values for a token go with several targets only")
    values = values_of(tensor, tensor.dense, where, dtype)
    shape = list(tensor.shape) or [len(values)]
    if math.prod(shape) != len(values) or len(values) != length:
        raise ValueError(f"{where} has the shape {shape} and {len(values)} values; model_input has {length} tokens, "
                         "and each needs one value")
    return values


def output_of(logprobs: list[Tensor], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: `logprobs` (T,) or (T, K) float32 of each datum, in the request's order."""
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(metrics)
    for shape, alike in groupby(logprobs, lambda part: part.shape[1:]):
        add_record(message, list(shape), list(alike))
    return bytes(message.SerializeToString())


def add_record(message: Any, shape: list[int], logprobs: list[Tensor]) -> None:
    """Datums whose tokens have as many targets each."""
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    field = record.fields["logprobs"]
    field.dtype, field.data = wire.FLOAT32, as_bytes(torch.cat(logprobs).float())
    field.trailing_shape.extend(shape)
    ends = torch.tensor([0, *(part.numel() * 4 for part in logprobs)]).cumsum(0)
    field.offsets = as_bytes(ends)
