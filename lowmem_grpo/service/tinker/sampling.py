"""`Sampling`: completions and log-probabilities of prompts, from the base model or a snapshot of a client's adapter."""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.service.call import Call
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.service.tinker import wire
from lowmem_grpo.service.tinker.calls import whole
from lowmem_grpo.service.tinker.datum import Bounds, as_bytes, check_ids
from lowmem_grpo.service.tinker.ledger import Answer, UnknownError
from lowmem_grpo.service.tinker.scoring import Scored, Scoring
from lowmem_grpo.service.tinker.usage import Usage
from lowmem_grpo.service.waiting import DeskClosedError
from lowmem_grpo.types import Turn

NOT_OFFERED = ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")
MOST_TOP = 128  # of the likeliest tokens at each place of a prompt
logger = logging.getLogger(__name__)
MOST_SAMPLES = 1024
KEPT = 8192  # promises


@dataclass(frozen=True)
class Sample:
    """What is asked for."""

    ids: list[int]  # (P,)
    count: int
    params: SamplingParams
    prompt_logprobs: bool
    top: int  # of the likeliest tokens at each place of the prompt; 0 is none
    last: int | None  # how many of the prompt's last tokens are scored; None is all


@dataclass
class Promise:
    """Of a sample; kept in memory only, since a client asks again where it is unknown."""

    owner: str
    turns: "list[Future[Turn]]"
    prompt: "Future[Scored] | None"
    asked: Sample
    adapter: Path | None = None
    ids: list[str] = field(default_factory=list)

    @property
    def parts(self) -> "list[Future[Any]]":
        return [*self.turns, *([] if self.prompt is None else [self.prompt])]

    def when_done(self, told: Callable[[], None]) -> None:
        """Call a function as soon as all parts are done."""
        left = itertools.count(1 - len(self.parts))
        for part in self.parts:
            part.add_done_callback(lambda _: told() if next(left) == 0 else None)

    def answer(self) -> Answer:
        """Once all its parts are done."""
        for part in self.parts:
            if (error := part.exception()) is not None:
                return failed(error, self.adapter)
        response = wire.SampleResponse()
        for turn in (one.result() for one in self.turns):
            reason = wire.STOP if turn.finish_reason == "stop" else wire.LENGTH
            response.sequences.add(stop_reason=reason, tokens=int32(turn.completion_ids),
                                   logprobs=as_bytes(torch.tensor(turn.logprobs, dtype=torch.float32)))
        if self.prompt is not None:
            add_scores(response, self.prompt.result(), self.asked)
        return Answer(response.SerializeToString(), wire.PROTOBUF)


def add_scores(response: Any, scored: Scored, asked: Sample) -> None:
    """Put into a SampleResponse what was asked for of the prompt."""
    if asked.prompt_logprobs:
        response.prompt_logprobs = as_bytes(scored.logprobs)
    if asked.top:
        top = response.topk_prompt_logprobs
        top.token_ids, top.logprobs = as_bytes(scored.ids), as_bytes(scored.values)
        top.length, top.k = scored.ids.shape


def failed(error: BaseException, adapter: Path | None) -> Answer:
    """What a client is told of an error: what is wrong in its request, and nothing of what is inside the server."""
    if isinstance(error, DeskClosedError):
        return Answer.failed("the server ends; ask the next one", "server")
    if adapter is None or adapter.is_dir():
        if isinstance(error, ValueError):
            return Answer.failed(str(error))
    else:
        return Answer.failed("the weights to sample from were deleted meanwhile: make a new sampling client")
    logger.error("a sample failed", exc_info=error)
    return Answer.failed("the sample failed in the server, whose log says more", "server")


def int32(ids: list[int]) -> bytes:
    return as_bytes(torch.tensor(ids, dtype=torch.int32))


class Sampling:
    """Answers samples by the desk, which decodes calls from one snapshot together."""

    def __init__(self, desk: Desk, bounds: Bounds, usage: Usage) -> None:
        self.desk, self.bounds, self.usage, self.scoring = desk, bounds, usage, Scoring(desk)
        self.lock = threading.Lock()
        self.promises: dict[str, Promise] = {}  # by request id, the oldest first
        self.adapters: dict[tuple[str, str], Path | None] = {}  # by sampler and owner: what was looked up

    def ask(self, given: dict[str, Any], sampler: str, adapter: Path | None, owner: str) -> dict[str, Any]:
        """The promise of a sample from a snapshot's folder, or from the base model. The same number of the same sampler
        has the same one."""
        name = f"{sampler}:{whole(given, 'seq_id')}"
        with self.lock:
            if name not in self.promises:
                self.promises[name] = self.begun(sample_of(given, self.bounds), adapter, owner)
                self.tidy()
            return {"request_id": name, "sample_sequence_ids": self.promises[name].ids}

    def remember(self, sampler: str, owner: str, adapter: Path | None) -> Path | None:
        """What a sampling session of a user samples from, so that it need not be looked up for each request."""
        self.adapters[sampler, owner] = adapter
        for oldest in list(self.adapters)[:max(0, len(self.adapters) - KEPT)]:
            self.adapters.pop(oldest, None)
        return adapter

    def begun(self, asked: Sample, adapter: Path | None, owner: str) -> Promise:
        """A promise whose parts wait for the desk. BusyError where its user waits for too many."""
        seed = asked.params.seed
        calls = [Call(asked.ids, replace(asked.params, seed=None if seed is None else seed + number), adapter)
                 for number in range(asked.count)]
        self.usage.begin_sample(owner)
        turns = [self.desk.submit(call) for call in calls]
        wanted = asked.prompt_logprobs or asked.top
        prompt = self.scoring.ask(asked.ids, adapter, asked.top, asked.last) if wanted else None
        promise = Promise(owner, turns, prompt, asked, adapter, [f"seq-{secrets.token_hex(8)}" for _ in turns])
        promise.when_done(lambda: self.usage.end_sample(owner))
        return promise

    def tidy(self) -> None:
        """Forget the oldest promises that are kept, above those that clients may still ask for."""
        for name in list(self.promises)[:max(0, len(self.promises) - KEPT)]:
            if all(part.done() for part in self.promises[name].parts):
                del self.promises[name]

    def find(self, name: str, owner: str) -> Promise:
        """UnknownError for a promise that is not this user's, or of an earlier server."""
        found = self.promises.get(name)
        if found is None or found.owner != owner:
            raise UnknownError(f"request_id is {name!r}; there is no such promise of yours")
        return found


def sample_of(given: dict[str, Any], bounds: Bounds) -> Sample:
    """A request, checked. ValueError names the field that is wrong."""
    for name in NOT_OFFERED:
        if given.get(name):
            raise ValueError(f"{name} is {given[name]!r}, which is not offered; leave it out")
    ids = prompt_of(given.get("prompt"), bounds)
    count = whole(given, "num_samples", 1) if "num_samples" in given else 1
    if count > MOST_SAMPLES:
        raise ValueError(f"num_samples is {count}; it must be at most {MOST_SAMPLES}")
    params = given.get("sampling_params")
    if not isinstance(params, dict):
        raise ValueError(f"sampling_params is {params!r}; it must be an object")
    top = whole(given, "topk_prompt_logprobs") if given.get("topk_prompt_logprobs") else 0
    if top > min(MOST_TOP, bounds.vocabulary):
        raise ValueError(f"topk_prompt_logprobs is {top}; it must be at most {min(MOST_TOP, bounds.vocabulary)}")
    scored = given.get("prompt_logprobs") is True
    last = last_of(given, len(ids), scored)
    return Sample(ids, count, params_of(params, bounds.context - len(ids)), scored, top, last)


def last_of(given: dict[str, Any], length: int, scored: bool) -> int | None:
    """How many of a prompt's last tokens are scored; None is all."""
    if given.get("prompt_logprobs_last_n") is None:
        return None
    last = whole(given, "prompt_logprobs_last_n", 1)
    if last >= length or not scored:
        raise ValueError(f"prompt_logprobs_last_n is {last}; it must be 1 to {length - 1}, less than the prompt's "
                         "tokens, and goes with prompt_logprobs")
    return last


def prompt_of(given: Any, bounds: Bounds) -> list[int]:
    """The token ids of a prompt: chunks of them, or a plain list."""
    given = {"chunks": [{"tokens": given}]} if isinstance(given, list) else given
    chunks = given.get("chunks") if isinstance(given, dict) else None
    if not isinstance(chunks, list) or not chunks:
        raise ValueError("prompt has no chunks; send at least one token")
    found: list[int] = []
    for place, chunk in enumerate(chunks):
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(tokens, list) or not all(type(one) is int and abs(one) < 2**31 for one in tokens):
            raise ValueError(f"prompt.chunks[{place}] has no token ids; only encoded text is taken")
        check_ids(torch.tensor(tokens, dtype=torch.int64), f"prompt.chunks[{place}].tokens", bounds)
        found += tokens
    if not 0 < len(found) < bounds.context:
        raise ValueError(f"prompt has {len(found)} tokens; it must have 1 to {bounds.context - 1}")
    return found


def params_of(given: dict[str, Any], room: int) -> SamplingParams:
    """How completions are drawn. Without `max_tokens`, up to the end of the context."""
    allowed = {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
    if unknown := sorted(given.keys() - allowed):
        raise ValueError(f"sampling_params has {unknown[0]!r}; it takes {', '.join(sorted(allowed))}")
    settings = {name: given[name] for name in ("temperature", "top_k", "top_p") if given.get(name) is not None}
    most = room if given.get("max_tokens") is None else whole(given, "max_tokens", 1)
    seed = None if given.get("seed") is None else whole(given, "seed")
    return SamplingParams(max_tokens=min(most, room), seed=seed, **settings, **stop_of(given.get("stop")))


def stop_of(stop: Any) -> dict[str, Any]:
    """Where completions end beside the end token: at texts or at token ids. An empty list takes the end token away."""
    if stop is None:
        return {}
    if stop == []:
        return {"ignore_eos": True}
    if isinstance(stop, list) and all(type(one) is int for one in stop):
        return {"stop_token_ids": stop}
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
        raise ValueError(f"sampling_params.stop is {stop!r}; it must be a text, a list of texts or of ids, or null")
    return {"stop": texts}
