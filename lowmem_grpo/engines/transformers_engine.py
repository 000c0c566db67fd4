"""Rollouts by the trainer's own model through transformers: no second copy, nothing to sync, any device.

All prompts of a call are decoded in one batch. Each prompt is prefilled once, and its cache is repeated for its n
completions; finished rows leave the batch. If memory runs out, fewer rows are decoded at once: the others wait and
enter as rows are done, those first whose prompts had the longest answers before. Unfinished rows keep the tokens they
have and go on from there, because drawing them anew would favour short completions. Each row has its own random
numbers, so that what is drawn does not depend on any of this.

Turns of episodes are decoded in rounds: all that are ready together, then all that follow from them. So what is drawn
depends on the requests only, and not on how long a tool takes.
"""

from collections import deque

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, FinishedPrompts, Meanwhile, OnGroup, Request
from lowmem_grpo.engines.batch import Batch
from lowmem_grpo.engines.beginning import Beginning
from lowmem_grpo.engines.decoding import as_rollouts, budget_of
from lowmem_grpo.engines.drawn import Drawn, Part
from lowmem_grpo.engines.drawn_turns import DrawnTurns
from lowmem_grpo.engines.endings import Endings
from lowmem_grpo.engines.expected import ExpectedLengths
from lowmem_grpo.engines.kept_rows import KeptRows
from lowmem_grpo.engines.pace import Pace
from lowmem_grpo.engines.passes import Passes
from lowmem_grpo.engines.token_step import TokenStep
from lowmem_grpo.memory.bounds import Bound, RunMemory, Shortage, tried
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout

COMPACT_BELOW = 0.9  # finished rows leave the batch once less than this share of it is unfinished
RARELY = 0.5  # the same where steps are CUDA graphs, each of which is of one number of rows
LOOK = 8  # token steps from one look at which rows are done to the next, there
ENTER_TOGETHER = 8  # rows that wait enter once there is room for one of so many that may run


class TransformersEngine:
    """The engine that needs nothing but the trainer's model."""

    name = "transformers"

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, enforce_eager: bool | None = None
    ) -> None:
        """`enforce_eager=True` turns CUDA graphs off; EngineUnavailableError where False asks for what cannot be."""
        self.policy, self.passes = policy, Passes(policy)
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.policy_version = 0
        self.kv_bytes = 0
        self.eos_ids = policy.eos_token_ids(tokenizer)
        self.bound: Bound = RunMemory().rollout  # on the rows that are decoded together
        self.kept, self.widest = KeptRows(), 0  # of the turns of a call, and the most that were decoded together
        self.pace, self.expected = Pace(), ExpectedLengths()
        self.step = TokenStep(self.passes, enforce_eager)
        self.beginning = Beginning(self.passes, self.pace, tokenizer.pad_token_id or 0)

    @property
    def slots(self) -> int | None:
        return self.bound.under(None)

    def on_policy_update(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self.forget()

    def sleep(self) -> None:
        self.forget()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Nothing to do: each call makes its own cache."""

    def close(self) -> None:
        """Free what was kept; the weights are the trainer's."""
        self.forget()

    def forget(self) -> None:
        """Drop what was computed for turns that may go on."""
        self.kept.rows.clear()
        self.step.release()
        self.widest = 0

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> list[list[Rollout]]:
        if not prompts:
            return []
        finished = FinishedPrompts(len(prompts), on_group, meanwhile)
        self.forget()
        most = params.max_tokens
        budgets = [budget_of(prompt, most, self.max_seq_length) for prompt in prompts for _ in range(params.n)]
        self.kv_bytes = 0
        self.pace.begin()
        drawn = Drawn.nothing(prompts, params, budgets, self.policy.device, finished)
        self.decode(drawn)
        self.report(drawn, finished.missing)
        found = finished.result()
        for prompt, rollouts in zip(prompts, found, strict=True):
            self.expected.note(prompt, [len(rollout.completion_ids) for rollout in rollouts])
        return found

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        """Turns of episodes in rounds, as `Engine.converse` says. Without a bound on the rows that memory has room for,
        as many are kept for their next turns as were decoded together at most."""
        self.kv_bytes, goes_on = 0, getattr(conversation, "goes_on", False)
        if not goes_on:
            self.forget()  # another's keys
        self.pace.begin()
        try:
            while requests := conversation.take(busy=False):
                self.widest = max(self.widest, len(requests))
                self.round(requests, params, conversation, self.bound.under(None) or 2 * self.widest)
        except BaseException:
            self.forget()
            raise
        if not goes_on:
            self.forget()

    def round(self, requests: list[Request], params: SamplingParams, conversation: Conversation, room: int) -> None:
        """Decode some turns together, with at most `room` rows in memory."""
        budgets = [budget_of(request.ids, request.max_tokens, self.max_seq_length) for request in requests]
        drawn = DrawnTurns.asked(requests, params, budgets, self.policy.device, conversation, self.kept, room)
        self.decode(drawn)

    def report(self, drawn: Drawn, prompts: list[int]) -> None:
        """Copy the rows of finished prompts to the host, and report each prompt."""
        if not prompts:
            return
        n = drawn.params.n
        rows = torch.tensor([prompt * n + row for prompt in prompts for row in range(n)])
        parts = (drawn.ids, drawn.logprobs, drawn.lengths, drawn.stopped)
        ids, logprobs, lengths, stopped = (part[rows.to(part.device)].cpu() for part in parts)
        if logprobs.isnan().any():
            raise RuntimeError("the model gave NaN logits: load it in bfloat16 or float32, and check the learning rate")
        rollouts = self.rollouts(drawn, ids, logprobs, lengths, stopped)
        drawn.give_routes(rows.tolist(), rollouts)
        for place, prompt in enumerate(prompts):
            drawn.finished.add(prompt, rollouts[place * n : place * n + n])

    def decode(self, drawn: Drawn) -> Drawn:
        """Draw every row to its end: all together, or as many at a time as memory has room for."""
        waiting, most = deque([Part(self.order(drawn))]), len(drawn.ids)
        while waiting:
            size = min(self.bound.under(most) or 1, most)
            batch = Batch(drawn, Endings(self.tokenizer, drawn.params, self.eos_ids))
            with self.passes.evaluating():
                failed = tried(lambda now=batch, most=size: self.decode_together(now, waiting, most),  # type: ignore[misc]
                               self.policy.device, self.step.release)
            self.step.release()
            if isinstance(failed, Shortage):
                waiting.extendleft(part for part in reversed(batch.parts) if part.rows)
                most = self.smaller(drawn, size, batch.running, failed)
        return drawn

    def order(self, drawn: Drawn) -> list[int]:
        """The rows as they are begun: where not all have room at once, those whose prompts had the longest answers
        first."""
        rows, n = len(drawn.ids), drawn.params.n
        if (self.bound.under(rows) or rows) >= rows:
            return list(range(rows))
        return [prompt * n + row for prompt in self.expected.order(drawn.prompts) for row in range(n)]

    def smaller(self, drawn: Drawn, size: int, left: int, shortage: Shortage) -> int:
        """How many rows to decode at once after a shortage, with `left` of `size` unfinished: as before, where memory
        could be had by dropping rows that were only kept, else half of those."""
        if drawn.finished.failed_outside is not None:
            raise drawn.finished.failed_outside  # memory ran out elsewhere, so that the call ends
        what = f"sampling {size} at once"
        if dropped := drawn.shed():
            self.bound.note(what, shortage, f"the keys and values of {dropped} earlier turns are dropped, and the work "
                                            "is repeated")
            return size
        self.bound.lower(what, shortage, size // 2 or None)
        return max(1, left // 2)

    def decode_together(self, batch: Batch, waiting: deque[Part], size: int) -> None:
        """Draw rows to their ends, `size` of them at a time, until none wait. After an error, the parts of the batch
        are what is left of those that began."""
        drawn, logits = batch.drawn, torch.empty(0)
        looks = LOOK if self.step.record is not None else 1
        self.pace.resume()
        while batch.running or waiting:
            if waiting and size - batch.running >= max(1, size // ENTER_TOGETHER):
                logits = self.enter(batch, waiting, size, logits)
            batch.draw(logits)
            if not (batch.wants_a_look(looks) or self.pace.reading):
                logits = self.step.extend(batch.state)
                self.weigh(batch)
                continue
            running, steps, left = batch.running, batch.since, batch.left()
            ended = batch.keep_up(left)
            self.pace.step(running, running * steps - (batch.too_many(ended) if steps > 1 else 0))
            self.keep_up(drawn, {*ended})
            enters = bool(waiting) and size - len(left) >= max(1, size // ENTER_TOGETHER)
            share = 1 if enters else COMPACT_BELOW if self.step.record is None else RARELY
            drops = not left or len(left) < share * len(batch.state.rows)
            if drops:
                drawn.leave(batch.state, left)
            if left or waiting:
                with self.pace.paused():
                    drawn.between(steps)
            if not left:
                batch.clear()
                continue
            if drops:
                batch.compact()
            logits = self.step.extend(batch.state)
            batch.keep_routes()
            self.weigh(batch)

    def enter(self, batch: Batch, waiting: deque[Part], size: int, logits: Tensor) -> Tensor:
        """Let rows enter until `size` run; returns the logits (B, V) of all, of which `logits` are those that ran."""
        self.step.release()
        while waiting and batch.running < size:
            first = not batch.parts
            part = batch.begin(waiting, size - batch.running)
            state, new = self.beginning.begin(batch.drawn, part, batch.running - len(part.rows))
            batch.enter(part, state)
            logits = new if first else torch.cat([logits, new])
            self.weigh(batch)
        return logits

    def weigh(self, batch: Batch) -> None:
        """Note the bytes of the cache where they are the most so far."""
        self.kv_bytes = max(self.kv_bytes, batch.state.cache.nbytes + batch.drawn.kept_bytes)

    def keep_up(self, drawn: Drawn, ended: set[int]) -> None:
        """These rows are done."""
        if not ended:
            return
        complete = drawn.finish(ended)
        if drawn.finished.on_group is not None:
            self.report(drawn, complete)

    def rollouts(self, drawn: Drawn, *rows: Tensor) -> list[Rollout]:
        """Rows on the host, as `as_rollouts` takes them."""
        return as_rollouts(rows, drawn.params, self.tokenizer, self.policy_version)
