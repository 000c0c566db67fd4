"""The two messages of the Tinker protocol that are protobuf, in JSON: for programs without its client."""

import json
import math
from typing import Any

import torch

from lowmem_grpo.service.tinker import wire
from lowmem_grpo.service.tinker.calls import whole
from lowmem_grpo.service.tinker.datum import TARGETS, as_bytes, from_bytes
from lowmem_grpo.service.tinker.ledger import JSON, Answer

TOKENS = "tokens"
REQUEST = ("model_id", "seq_id", "data", "loss_fn", "loss_fn_config", "forward_only")
REASONS = {wire.STOP: "stop", wire.LENGTH: "length"}


def wants_json(accept: str) -> bool:
    """Whether a client takes answers in JSON only."""
    return JSON in accept and wire.PROTOBUF not in accept


def request_of(given: dict[str, Any]) -> bytes:
    """A forward_backward as the protocol has it. A datum is an object with `tokens`, and with a list of a value for
    each of them under the name of each input of the loss. ValueError names the field that is wrong."""
    if unknown := sorted(given.keys() - set(REQUEST)):
        raise ValueError(f"{unknown[0]!r} is not a field of forward_backward; it takes {', '.join(REQUEST)}")
    if not isinstance(given.get("forward_only", False), bool):
        raise ValueError(f"forward_only is {given['forward_only']!r}; it must be true or false")
    message = wire.ForwardBackwardRequest(
        model_id=str(given.get("model_id")), seq_id=whole(given, "seq_id", 1), loss_fn=str(given.get("loss_fn")),
        forward_only=given.get("forward_only", False))
    for name, value in items_of(given.get("loss_fn_config") or {}, "loss_fn_config"):
        message.loss_fn_config[name] = number(value, f"loss_fn_config[{name!r}]")
    data = given.get("data")
    if not isinstance(data, list):
        raise ValueError(f"data is {type(data).__name__}; it must be a list of datums")
    for place, datum in enumerate(data):
        add_datum(message.data.add(), datum, f"data[{place}]")
    body: bytes = message.SerializeToString()
    return body


def add_datum(message: Any, given: Any, where: str) -> None:
    """Fill a datum."""
    for name, values in items_of(given, where):
        place = f"{where}[{name!r}]"
        if not isinstance(values, list):
            raise ValueError(f"{place} is {type(values).__name__}; it must be a list of numbers, one for each token")
        if name == TOKENS:
            chunk = message.model_input.add().encoded_text
            chunk.tokens = as_bytes(torch.tensor(ids(values, place), dtype=torch.int32))
            continue
        tensor = message.loss_fn_inputs[name]
        if name == TARGETS:
            tensor.dtype, tensor.dense = wire.INT64, as_bytes(torch.tensor(ids(values, place), dtype=torch.int64))
        else:
            found = [number(value, f"{place}[{at}]") for at, value in enumerate(values)]
            tensor.dtype, tensor.dense = wire.FLOAT32, as_bytes(torch.tensor(found, dtype=torch.float32))
    if TOKENS not in given:
        raise ValueError(f"{where} has no {TOKENS}; a datum has {TOKENS}, {TARGETS} and what the loss needs")


def items_of(given: Any, where: str) -> Any:
    """The fields of an object."""
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {type(given).__name__}; it must be an object")
    return given.items()


def ids(values: list[Any], where: str) -> list[int]:
    """Token ids, which fit 32 bits."""
    for place, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 2**31:
            raise ValueError(f"{where}[{place}] is {value!r:.40}; it must be a token id")
    return values


def number(value: Any, where: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > torch.finfo(torch.float32).max:
        raise ValueError(f"{where} is {value!r:.40}; it must be a finite number")
    if not math.isfinite(value):
        raise ValueError(f"{where} is {value!r}; it must be a finite number")
    return float(value)


def in_json(answer: Answer, sampled: bool) -> Answer:
    """An answer in protobuf, of a sample or of a forward_backward; others are in JSON already."""
    if answer.media != wire.PROTOBUF:
        return answer
    return Answer(json.dumps((sample_of if sampled else output_of)(answer.body)).encode())


def sample_of(body: bytes) -> dict[str, Any]:
    """The sequences of a sample, and the log-probabilities of the prompt, where they were asked for."""
    message = wire.parsed(wire.SampleResponse, body)
    found: dict[str, Any] = {"sequences": [
        {"tokens": from_bytes(one.tokens, torch.int32, "tokens").tolist(), "logprobs": floats(one.logprobs),
         "stop_reason": REASONS[one.stop_reason]} for one in message.sequences]}
    return found | ({"prompt_logprobs": floats(message.prompt_logprobs)} if message.prompt_logprobs else {})


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
