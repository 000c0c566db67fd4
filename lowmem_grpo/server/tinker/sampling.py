"""`SampleService`: completions by the base model or a saved adapter; `PromptScoring`: log-probabilities of prompts."""

import itertools
import logging
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams, seed_of
from lowmem_grpo.memory.cutting import CutLimits
from lowmem_grpo.models.packing import Packer, unpack
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request import MOST_STOP, MOST_STOPS
from lowmem_grpo.server.openai.request_queue import EngineCall, WorkerClosedError
from lowmem_grpo.server.requests import without_place
from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.adapters import group_of
from lowmem_grpo.server.tinker.calls import SampleRequest
from lowmem_grpo.server.tinker.datum import ModelBounds, as_bytes, check_ids
from lowmem_grpo.server.tinker.request_store import ModelReply, UnknownError
from lowmem_grpo.server.tinker.usage import Usage
from lowmem_grpo.types import MicroBatch, Turn

logger = logging.getLogger(__name__)
KEPT = 8192  # promises
TOGETHER = 8192  # tokens in a micro-batch
AT_ONCE = 32 * TOGETHER  # tokens in one job of the worker, before other jobs have their turn
ROWS = 256  # tokens whose logits are in memory at a time, for top-k requests
NONE = -99999.0  # the protocol's value for a log-probability that was not computed


@dataclass(frozen=True)
class Scored:
    """The log-probs and top-k tokens of P prompt tokens. A token that was not scored has log-prob NaN, and k tokens
    of id 0 with log-prob NONE."""

    logprobs: Tensor  # (P,) float32
    ids: Tensor  # (P, k) int32, the likeliest ones in order
    values: Tensor  # (P, k) float32, their log-probabilities


@dataclass(eq=False)
class WaitingPrompt:
    ids: list[int]  # (P,)
    adapter: Path | None
    top: int  # the k of the top-k tokens
    last: int  # the number of last tokens to score
    owner: str
    future: "Future[Scored]" = field(default_factory=Future)

    def scored(self, logprobs: Tensor, ids: Tensor, values: Tensor) -> Scored:
        """Return the results of P tokens from log-probs (P - 1,), top-k ids and log-probs (P - 1, k). The first token
        counts as not scored, and so do all before the `last` ones."""
        scored = Scored(torch.cat([torch.full((1,), torch.nan), logprobs]),
                        torch.cat([torch.zeros(1, self.top, dtype=torch.int32), ids.int()]),
                        torch.cat([torch.full((1, self.top), NONE), values]))
        before = len(self.ids) - self.last
        scored.logprobs[:before], scored.ids[:before], scored.values[:before] = torch.nan, 0, NONE
        return scored


class PromptScoring:
    """Scores prompts in the worker's thread. `ask` may be called from any thread."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker, self.lock, self.waiting = worker, threading.Lock(), list[WaitingPrompt]()
        self.packer = Packer(worker.policy.device, worker.memory.train)

    def ask(
        self, ids: list[int], adapter: Path | None, top: int = 0, last: int | None = None, owner: str = "",
    ) -> "Future[Scored]":
        """Return a future of a prompt's log-probabilities under the base model, or under a saved adapter. `top` is the
        k of the top-k tokens; only the `last` tokens are scored (None: all)."""
        prompt = WaitingPrompt(ids, adapter, top, len(ids) if last is None else last, owner)
        if len(ids) == 1:
            prompt.future.set_result(prompt.scored(torch.empty(0), torch.empty(0, top), torch.empty(0, top)))
            return prompt.future
        with self.lock:
            self.waiting.append(prompt)

        def tell(done: "Future[None]") -> None:
            """Fail the prompt if its job did not run because the worker was closed."""
            if (error := done.exception()) is not None and not prompt.future.done():
                prompt.future.set_exception(error)

        self.worker.run(partial(self.work, owner), False, owner, adapter).add_done_callback(tell)
        return prompt.future

    @torch.no_grad()
    def work(self, owner: str) -> None:
        """Score the user's waiting prompts that use the first one's adapter. If none waits, do nothing."""
        if not (taken := self.next_prompts(owner)):
            return
        groups = [group_of(prompt.ids) for prompt in taken]
        asked = {id(group.rollouts[0]): prompt for group, prompt in zip(groups, taken, strict=True)}
        try:
            with self.worker.computing_with(taken[0].adapter):
                results = self.packer.run("the scoring of prompts", groups, CutLimits(TOGETHER),
                                          lambda batches: self.passes(batches, asked))
            for prompt, scored in results:
                prompt.future.set_result(scored)
        except Exception as error:  # noqa: BLE001, raised to the callers by their futures
            for prompt in taken:
                prompt.future.set_exception(error)

    def next_prompts(self, owner: str) -> list[WaitingPrompt]:
        """Take the user's prompts that wait for the same adapter as the first one, up to AT_ONCE tokens."""
        with self.lock:
            taken, left, tokens = list[WaitingPrompt](), list[WaitingPrompt](), 0
            adapter = next((prompt.adapter for prompt in self.waiting if prompt.owner == owner), None)
            for prompt in self.waiting:
                fits = (prompt.owner, prompt.adapter) == (owner, adapter) and (
                    not taken or tokens + len(prompt.ids) <= AT_ONCE)
                (taken if fits else left).append(prompt)
                tokens += len(prompt.ids) * fits
            self.waiting = left
        return taken

    def passes(
        self, batches: Iterator[MicroBatch], asked: dict[int, WaitingPrompt]
    ) -> list[tuple[WaitingPrompt, Scored]]:
        results = []
        for batch in batches:
            prompts = [asked[id(rollout)] for rollout in batch.rollouts]
            most = max(prompt.top for prompt in prompts)
            logprobs, _ = self.worker.policy.logprobs(batch, 1.0)
            ids, values = self.likeliest(batch, most)
            parts = [unpack(packed.cpu(), batch) for packed in (logprobs.float(), ids, values)]
            for prompt, own, tokens, likely in zip(prompts, *parts, strict=True):
                results.append((prompt, prompt.scored(own, tokens[:, :prompt.top], likely[:, :prompt.top])))
        return results

    def likeliest(self, batch: MicroBatch, count: int) -> tuple[Tensor, Tensor]:
        """Return (ids (N, k), log-probabilities (N, k)) of the likeliest tokens at each of the N trained tokens."""
        head = self.worker.policy.head
        if count == 0:
            return torch.empty(len(batch.trained), 0), torch.empty(len(batch.trained), 0)
        hidden = batch.at_trained(self.worker.policy.hidden(batch))
        tops = [head.logits(rows).log_softmax(-1).topk(count, -1) for rows in hidden.split(ROWS)]
        return torch.cat([top.indices for top in tops]), torch.cat([top.values.float() for top in tops])


@dataclass
class Promise:
    """The promise of a sample, kept in memory only: a client repeats its request if the promise is unknown."""

    owner: str
    turns: "list[Future[Turn]]"
    prompt: "Future[Scored] | None"
    asked: SampleRequest
    adapter: Path | None = None
    ids: list[str] = field(default_factory=list)

    @property
    def parts(self) -> "list[Future[Any]]":
        return [*self.turns, *([] if self.prompt is None else [self.prompt])]

    def answer(self) -> ModelReply:
        for part in self.parts:
            if (error := part.exception()) is not None:
                return failed(error, self.adapter)
        response = wire.SampleResponse()
        for turn in (future.result() for future in self.turns):
            reason = wire.STOP if turn.finish_reason == "stop" else wire.LENGTH
            response.sequences.add(stop_reason=reason,
                                   tokens=as_bytes(torch.tensor(turn.completion_ids, dtype=torch.int32)),
                                   logprobs=as_bytes(torch.tensor(turn.logprobs, dtype=torch.float32)))
        if self.prompt is not None:
            scored = self.prompt.result()
            if self.asked.scored:
                response.prompt_logprobs = as_bytes(scored.logprobs)
            if self.asked.topk_prompt_logprobs:
                top = response.topk_prompt_logprobs
                top.token_ids, top.logprobs = as_bytes(scored.ids), as_bytes(scored.values)
                top.length, top.k = scored.ids.shape
        return ModelReply(response.SerializeToString(), wire.PROTOBUF)


def failed(error: BaseException, adapter: Path | None) -> ModelReply:
    """Return the reply for an error: the fault in the client's request, but no details of the server's own errors."""
    if isinstance(error, WorkerClosedError):
        return ModelReply.failed("the server ends; ask the next one", "server")
    if adapter is None or adapter.is_dir():
        if isinstance(error, ValueError):
            return ModelReply.failed(without_place(error, adapter))
    else:
        return ModelReply.failed("the weights to sample from were deleted meanwhile: make a new sampling client")
    logger.error("a sample failed", exc_info=error)
    return ModelReply.failed("the sample failed in the server, whose log says more", "server")


class SampleService:
    """Answers sample requests through the worker, which decodes calls for the same snapshot together."""

    def __init__(self, worker: EngineWorker, bounds: ModelBounds, usage: Usage) -> None:
        self.worker, self.bounds, self.usage, self.scoring = worker, bounds, usage, PromptScoring(worker)
        self.lock = threading.Lock()
        self.promises: dict[str, Promise] = {}  # by request id, the oldest first

    def ask(self, asked: SampleRequest, adapter: Path | None, owner: str) -> dict[str, Any]:
        """Return the promise of a sample by a saved adapter (None: the base model). Equal `seq_id`s share a promise."""
        name = f"{asked.sampling_session_id}:{asked.seq_id}"
        with self.lock:
            if name not in self.promises:
                self.promises[name] = self.begun(asked, adapter, owner)
                self.tidy()
            return {"request_id": name, "sample_sequence_ids": self.promises[name].ids}

    def begun(self, asked: SampleRequest, adapter: Path | None, owner: str) -> Promise:
        """Submit a sample to the worker, and return its promise. BusyError if the user has too many open requests."""
        params, seed, top = params_of(asked, self.bounds), asked.sampling_params.seed, asked.topk_prompt_logprobs or 0
        self.usage.begin_sample(owner)
        seeds = [None if seed is None else seed_of(seed, number) for number in range(asked.num_samples)]
        turns = [self.worker.submit(EngineCall(asked.ids, replace(params, seed=each), adapter, user=owner))
                 for each in seeds]
        prompt = (self.scoring.ask(asked.ids, adapter, top, asked.prompt_logprobs_last_n, owner)
                  if asked.scored or top else None)
        promise = Promise(owner, turns, prompt, asked, adapter, [f"seq-{secrets.token_hex(8)}" for _ in turns])
        left = itertools.count(1 - len(promise.parts))
        for part in promise.parts:  # the last one to be done ends the sample
            part.add_done_callback(lambda _: self.usage.end_sample(owner) if next(left) == 0 else None)
        return promise

    def tidy(self) -> None:
        """Delete the oldest promises if there are more than KEPT. A promise whose parts are not done stays."""
        for name in list(self.promises)[:max(0, len(self.promises) - KEPT)]:
            if all(part.done() for part in self.promises[name].parts):
                del self.promises[name]

    def find(self, name: str, owner: str) -> Promise:
        """Return a promise. UnknownError if it is not this user's, or is one of an earlier server."""
        promise = self.promises.get(name)
        if promise is None or promise.owner != owner:
            raise UnknownError(f"request_id is {name!r}; there is no such promise of yours")
        return promise


def params_of(asked: SampleRequest, bounds: ModelBounds) -> SamplingParams:
    """Return the sampling parameters; by default max_tokens fills the context. ValueError names a wrong field."""
    if not 0 < len(asked.ids) < bounds.context:
        raise ValueError(f"prompt has {len(asked.ids)} tokens; it must have 1 to {bounds.context - 1}")
    check_ids(torch.tensor(asked.ids), "prompt", bounds)
    last, top = asked.prompt_logprobs_last_n, asked.topk_prompt_logprobs or 0
    if top > bounds.vocabulary:
        raise ValueError(f"topk_prompt_logprobs is {top}; it must be at most {bounds.vocabulary}")
    if last is not None and (last >= len(asked.ids) or not asked.scored):
        raise ValueError(f"prompt_logprobs_last_n is {last}; it must be 1 to {len(asked.ids) - 1}, less than the "
                         "prompt's tokens, and goes with prompt_logprobs")
    settings = asked.sampling_params.model_dump(include={"temperature", "top_k", "top_p", "seed"}, exclude_none=True)
    room = bounds.context - len(asked.ids)
    return SamplingParams(max_tokens=min(asked.sampling_params.max_tokens or room, room), **settings,
                          **stop_of(asked.sampling_params.stop, bounds))


def stop_of(stop: Any, bounds: ModelBounds) -> dict[str, Any]:
    """Return the stop options beside the end token: texts or token ids. An empty list ignores the end token."""
    if stop is None:
        return {}
    if stop == []:
        return {"ignore_eos": True}
    listed = [stop] if isinstance(stop, str) else stop
    for kind, name in ((int, "stop_token_ids"), (str, "stop")):
        if isinstance(listed, list) and all(type(item) is kind and item != "" for item in listed):
            if len(listed) > MOST_STOPS or (kind is str and max(map(len, listed), default=0) > MOST_STOP):
                raise ValueError(f"sampling_params.stop has {len(listed)} entries, or a long one; at most {MOST_STOPS} "
                                 f"are taken, of at most {MOST_STOP} characters")
            if wrong := [item for item in listed if kind is int and not 0 <= item < bounds.vocabulary]:
                most = bounds.vocabulary - 1
                raise ValueError(f"sampling_params.stop has {wrong[0]}; the model's token ids are 0 to {most}")
            return {name: listed}
    raise ValueError(f"sampling_params.stop is {stop!r}; it must be a text, a list of texts or of ids, or null")
