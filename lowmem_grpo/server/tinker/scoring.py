"""`PromptScoring`: log-probabilities of prompts. Those that wait for one adapter are computed together, packed."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lowmem_grpo.kernels.logits import LogitShape
from lowmem_grpo.kernels.matmul import matmul_fp32
from lowmem_grpo.memory.cutting import Limits
from lowmem_grpo.models.packing import Packer, unpack
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.tinker.adapters import group_of
from lowmem_grpo.types import MicroBatch

TOGETHER = 8192  # tokens that are computed at a time
AT_ONCE = 32 * TOGETHER  # tokens until others have their turn at the worker
ROWS = 256  # tokens whose logits are in memory at a time, where the likeliest ones are asked for
NONE = -99999.0  # in place of a log-probability that was not computed, as the protocol has it


@dataclass(frozen=True)
class Scored:
    """Log-probabilities and likely tokens of P prompt tokens; NaN, or the token 0 with NONE, where not computed."""

    logprobs: Tensor  # (P,) float32
    ids: Tensor  # (P, k) int32, the likeliest ones in order
    values: Tensor  # (P, k) float32, their log-probabilities


@dataclass(eq=False)
class WaitingPrompt:
    """A prompt that waits."""

    ids: list[int]  # (P,)
    adapter: Path | None
    top: int  # how many of the likeliest tokens are asked for
    last: int  # how many of the last tokens are scored
    future: "Future[Scored]" = field(default_factory=Future)

    def scored(self, logprobs: Tensor, ids: Tensor, values: Tensor) -> Scored:
        """Add the first token's place to log-probs (P - 1,) and top-k ids and log-probs (P - 1, k) of the others."""
        scored = Scored(torch.cat([torch.full((1,), torch.nan), logprobs]),
                        torch.cat([torch.zeros(1, self.top, dtype=torch.int32), ids.int()]),
                        torch.cat([torch.full((1, self.top), NONE), values]))
        before = len(self.ids) - self.last
        scored.logprobs[:before], scored.ids[:before], scored.values[:before] = torch.nan, 0, NONE
        return scored


class PromptScoring:
    """Any thread may ask it; the worker's computes."""

    def __init__(self, worker: EngineWorker) -> None:
        self.worker, self.lock, self.waiting = worker, threading.Lock(), list[WaitingPrompt]()
        self.packer = Packer(worker.policy.device, worker.memory.train)

    def ask(self, ids: list[int], adapter: Path | None, top: int = 0, last: int | None = None) -> "Future[Scored]":
        """Ask for the log-probabilities of a prompt by the base model, or by a saved adapter."""
        prompt = WaitingPrompt(ids, adapter, top, len(ids) if last is None else last)
        with self.lock:
            self.waiting.append(prompt)
        self.worker.run(self.work, sleep=False).add_done_callback(lambda done: self.tell(prompt, done))
        return prompt.future

    def tell(self, prompt: WaitingPrompt, done: "Future[None]") -> None:
        """A prompt whose job was not run, as the worker was closed, fails."""
        error = done.exception()
        if error is not None and not prompt.future.done():
            prompt.future.set_exception(error)

    def work(self) -> None:
        """Score all that wait for the adapter of the first one; there is nothing to do where an earlier job did it."""
        taken = self.next_prompts()
        try:
            self.score(taken)
        except Exception as error:  # noqa: BLE001, told to whom asked for it
            for prompt in taken:
                prompt.future.set_exception(error)

    def next_prompts(self) -> list[WaitingPrompt]:
        """Those that wait for the adapter of the first one, up to AT_ONCE tokens."""
        with self.lock:
            taken, left, tokens = list[WaitingPrompt](), list[WaitingPrompt](), 0
            for prompt in self.waiting:
                fits = prompt.adapter == self.waiting[0].adapter and (not taken or tokens + len(prompt.ids) <= AT_ONCE)
                (taken if fits else left).append(prompt)
                tokens += len(prompt.ids) * fits
            self.waiting = left
        return taken

    @torch.no_grad()
    def score(self, prompts: list[WaitingPrompt]) -> None:
        long = [prompt for prompt in prompts if len(prompt.ids) > 1]
        groups = [group_of(prompt.ids) for prompt in long]
        asked = {id(group.rollouts[0]): prompt for group, prompt in zip(groups, long, strict=True)}
        results = [(prompt, prompt.scored(torch.empty(0), torch.empty(0, prompt.top), torch.empty(0, prompt.top)))
                   for prompt in prompts if len(prompt.ids) == 1]
        if groups:
            with self.worker.computing_with(long[0].adapter):
                results += self.packer.run("the scoring of prompts", groups, Limits(TOGETHER),
                                           lambda batches: self.passes(batches, asked))
        for prompt, scored in results:
            prompt.future.set_result(scored)

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
        """(ids (N, k), log-probabilities (N, k)) of the likeliest tokens at each of the N places."""
        head = self.worker.policy.head
        if count == 0:
            return torch.empty(len(batch.trained), 0), torch.empty(len(batch.trained), 0)
        hidden = batch.at_trained(self.worker.policy.hidden(batch)).to(head.weight.dtype)
        shape = LogitShape(scale=head.logit_scale, softcap=head.softcap)
        tops = [shape.apply_(matmul_fp32(rows, head.weight.T), head.bias).log_softmax(-1).topk(count, -1)
                for rows in hidden.split(ROWS)]
        return torch.cat([top.indices for top in tops]), torch.cat([top.values.float() for top in tops])
