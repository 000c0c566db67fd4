"""The JSON bodies of the Tinker protocol as pydantic models, and JSON forms of its two protobuf messages."""

import json
import math
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from lowmem_grpo.server.requests import Body, Natural, Positive, json_of, shown, words_of
from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.adapters import Adam, LoraSettings, Metadata
from lowmem_grpo.server.tinker.datum import as_bytes, from_bytes
from lowmem_grpo.server.tinker.request_store import JSON, ModelReply

B = TypeVar("B", bound=Body)
Tokens = Annotated[list[Natural], Field(fail_fast=True)]
MOST_SAMPLES = 1024
MOST_TOP = 128  # the largest k of top-k tokens at each place of a prompt
MOST = torch.finfo(torch.float32).max
REASONS = {wire.STOP: "stop", wire.LENGTH: "length"}
Number = Annotated[float, Field(ge=-MOST, le=MOST)]
Numbers = Annotated[list[Number], Field(fail_fast=True)]


def read(kind: type[B], body: bytes | dict[str, str]) -> B:
    """Parse a JSON body, or a query's parameters, as an object of this class. ValueError names a wrong field."""
    if isinstance(body, bytes):
        json_of(body)
    try:
        return kind.model_validate_json(body) if isinstance(body, bytes) else kind.model_validate_strings(body)
    except ValidationError as error:
        raise ValueError(words_of(error, kind)) from None


def refused(advice: str) -> AfterValidator:
    """Return a validator that refuses a field unless it is empty."""
    def check(value: Any) -> None:
        if value:
            raise ValueError(f"is {shown(value)}, which is not offered; {advice}")

    return AfterValidator(check)


def only_adam(settings: Any) -> None:
    if settings and (not isinstance(settings, dict) or settings.get("type", "adam") not in ("adam", "adamw")):
        raise ValueError(f"is {shown(settings)}; only Adam is offered: leave it out")


NotOffered = Annotated[Any, refused("leave it out")]
OnlyAdam = Annotated[Any, AfterValidator(only_adam)]


class ModelCall(Body):
    model_id: Any = None
    seq_id: Positive


class OptimStep(Body):
    adam_params: Adam
    optimizer_params: Annotated[Any, refused("only Adam is: pass types.AdamParams(...)")] = None


class CreateModel(Body):
    model_seq_id: Natural
    optimizer_config: OnlyAdam = None
    lora_config: LoraSettings
    user_metadata: Metadata = None


class CreateSampler(Body):
    """The body of create_sampling_session."""

    sampling_session_seq_id: Natural
    base_model: str | None = None
    model_path: str | None = None


class SaveWeights(Body):
    """The body of save_weights or save_weights_for_sampler."""

    path: str | None = None  # the name to save under; None for an unnamed snapshot
    sampling_session_seq_id: Natural | None = None  # the number of the snapshot's sampling session
    overwrite: bool = False
    ttl_seconds: Positive | None = None  # None keeps the weights
    user_metadata: Metadata = None
    kind: Literal["snapshot"] = "snapshot"


class LoadWeights(Body):
    """The body of load_weights into an existing model."""

    path: str
    optimizer: bool  # loads Adam's moments too
    optimizer_config: OnlyAdam = None
    weights_access_token: Annotated[Any, refused("only weights of your own key can be loaded")] = None


class LoadIntoNew(LoadWeights):
    model_seq_id: Natural
    base_model: str | None = None
    user_metadata: Metadata = None


class KeepFor(Body):
    """The number of seconds from now after which weights expire; None keeps them."""
    ttl_seconds: Positive | None  # None keeps them


class ListPage(Body):
    offset: Natural = 0
    limit: Positive | None = None
    project_id: NotOffered = None


def chunks_of(prompt: Any) -> Any:
    """Return the token ids of each chunk of a prompt, which may also be a plain list of ids."""
    if isinstance(prompt, list):
        return [prompt]
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    if not isinstance(chunks, list) or not chunks:
        raise ValueError("has no chunks; send at least one token")
    for place, chunk in enumerate(chunks):
        if not isinstance(chunk, dict) or "tokens" not in chunk:
            raise ValueError(f"has no token ids in chunk {place}; only encoded text is taken")
    return [chunk["tokens"] for chunk in chunks]


class SamplingSettings(Body, extra="forbid"):
    max_tokens: Positive | None = None
    seed: Natural | None = None
    stop: Any = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class SampleRequest(Body):
    """The body of asample."""

    sampling_session_id: str = ""
    seq_id: Annotated[int, Field(ge=0, lt=2**63)]  # copies of a client begin at multiples of 10**9
    prompt: Annotated[list[Tokens], BeforeValidator(chunks_of)]
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    sampling_params: SamplingSettings
    prompt_logprobs: Any = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    prompt_logprobs_last_n: Positive | None = None
    topk_sample_logprobs: NotOffered = None
    target_prompt_logprobs: NotOffered = None
    prompt_alt_tokens_k: NotOffered = None
    record_stability_info: Annotated[Any, refused(
        "its loss, stable_reinforce, is not public: pass loss_fn=\"importance_sampling\", or \"cispo\"")] = None

    @cached_property
    def ids(self) -> list[int]:
        """The token ids (P,) of the prompt."""
        return [token for chunk in self.prompt for token in chunk]

    @property
    def scored(self) -> bool:
        return self.prompt_logprobs is True


class PlainDatum(Body, extra="allow"):
    """Tokens, and the inputs of the loss by name, each with one value for each token."""

    __pydantic_extra__: dict[str, Numbers]
    tokens: Tokens
    target_tokens: Tokens | None = None


class PlainPass(Body, extra="forbid"):
    """The JSON body of forward_backward."""

    model_id: str
    seq_id: Positive
    data: Annotated[list[PlainDatum], Field(fail_fast=True)]
    loss_fn: str
    loss_fn_config: dict[str, Number] | None = None
    forward_only: bool = False


def wants_json(accept: str) -> bool:
    return JSON in accept and wire.PROTOBUF not in accept


def request_of(body: bytes) -> bytes:
    """Return a JSON forward_backward as the protocol's protobuf. ValueError names the field that is wrong."""
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


def in_json(answer: ModelReply, sampled: bool) -> ModelReply:
    """Return an answer in JSON, converted if it is the protobuf of a sample (`sampled`) or of a forward_backward."""
    if answer.media != wire.PROTOBUF:
        return answer
    return ModelReply(json.dumps((sample_of if sampled else output_of)(answer.body)).encode())


def sample_of(body: bytes) -> dict[str, Any]:
    """Return the sequences of a sample, and the log-probabilities of the prompt, if they were requested."""
    message = wire.parsed(wire.SampleResponse, body)
    sample: dict[str, Any] = {"sequences": [
        {"tokens": from_bytes(sequence.tokens, torch.int32, "tokens").tolist(), "logprobs": floats(sequence.logprobs),
         "stop_reason": REASONS[sequence.stop_reason]} for sequence in message.sequences]}
    return sample | ({"prompt_logprobs": floats(message.prompt_logprobs)} if message.prompt_logprobs else {})


def output_of(body: bytes) -> dict[str, Any]:
    """Return the metrics of a forward_backward, and for each datum the log-probabilities of its targets."""
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
    """Return float32 values from bytes, with None (null in JSON) for values that are not finite."""
    return [value if math.isfinite(value) else None for value in from_bytes(data, torch.float32, "values").tolist()]
