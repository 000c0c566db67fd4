"""The two messages of the Tinker protocol that are protobuf, in JSON: for programs without its client."""

import json
import math
from typing import Annotated, Any

import torch
from pydantic import Field

from lowmem_grpo.service.bodies import Body, Positive
from lowmem_grpo.service.tinker import wire
from lowmem_grpo.service.tinker.calls import Tokens, read
from lowmem_grpo.service.tinker.datum import as_bytes, from_bytes
from lowmem_grpo.service.tinker.ledger import JSON, PromiseReply

MOST = torch.finfo(torch.float32).max
REASONS = {wire.STOP: "stop", wire.LENGTH: "length"}
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Numbers = Annotated[list[Number], Field(fail_fast=True)]


class PlainDatum(Body, extra="allow"):
    """Tokens, and a value for each of them under the name of each input of the loss."""

    __pydantic_extra__: dict[str, Numbers]
    tokens: Tokens
    target_tokens: Tokens | None = None


class PlainPass(Body, extra="forbid"):
    """A forward_backward."""

    model_id: str
    seq_id: Positive
    data: Annotated[list[PlainDatum], Field(fail_fast=True)]
    loss_fn: str
    loss_fn_config: dict[str, Number] | None = None
    forward_only: bool = False


def wants_json(accept: str) -> bool:
    return JSON in accept and wire.PROTOBUF not in accept


def request_of(body: bytes) -> bytes:
    """Return a forward_backward as the protocol has it. ValueError names the field that is wrong."""
    call = read(PlainPass, body)
    plain = call.model_dump(include={"model_id", "seq_id", "loss_fn", "loss_fn_config", "forward_only"})
    message = wire.ForwardBackwardRequest(**plain)
    for entry in call.data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = as_bytes(torch.tensor(entry.tokens, dtype=torch.int32))
        put(datum, "target_tokens", entry.target_tokens, wire.INT64, torch.int64)
        for name, values in entry.__pydantic_extra__.items():
            put(datum, name, values, wire.FLOAT32, torch.float32)
    return bytes(message.SerializeToString())


def put(datum: Any, name: str, values: list[Any] | None, kind: int, dtype: torch.dtype) -> None:
    if values is not None:
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype, tensor.dense = kind, as_bytes(torch.tensor(values, dtype=dtype))


def in_json(answer: PromiseReply, sampled: bool) -> PromiseReply:
    """An answer in protobuf, of a sample or of a forward_backward; others are in JSON already."""
    if answer.media != wire.PROTOBUF:
        return answer
    return PromiseReply(json.dumps((sample_of if sampled else output_of)(answer.body)).encode())


def sample_of(body: bytes) -> dict[str, Any]:
    """The sequences of a sample, and the log-probabilities of the prompt, where they were asked for."""
    message = wire.parsed(wire.SampleResponse, body)
    sample: dict[str, Any] = {"sequences": [
        {"tokens": from_bytes(sequence.tokens, torch.int32, "tokens").tolist(), "logprobs": floats(sequence.logprobs),
         "stop_reason": REASONS[sequence.stop_reason]} for sequence in message.sequences]}
    return sample | ({"prompt_logprobs": floats(message.prompt_logprobs)} if message.prompt_logprobs else {})


def output_of(body: bytes) -> dict[str, Any]:
    """The metrics of a forward_backward, and for each datum the log-probabilities of its targets."""
    message = wire.parsed(wire.ForwardBackwardOutput, body)
    outputs: list[dict[str, Any]] = []
    for record in message.loss_fn_outputs:
        rows: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
        for name, field in record.fields.items():
            ends = from_bytes(field.offsets, torch.int64, "offsets").tolist()
            for row, begin, end in zip(rows, ends, ends[1:], strict=False):
                row[name] = floats(field.data[begin:end])
        outputs += rows
    return {"metrics": dict(message.metrics), "loss_fn_outputs": outputs}


def floats(data: bytes) -> list[float | None]:
    """Values of 32 bits; what JSON has no number for is null, as the log-probability of a prompt's first token."""
    return [value if math.isfinite(value) else None for value in from_bytes(data, torch.float32, "values").tolist()]
