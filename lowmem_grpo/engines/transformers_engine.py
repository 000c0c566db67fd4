"""Rollouts by the trainer's own model through transformers: no second copy, nothing to sync, any device.

Each prompt is prefilled once, and its cache is repeated for its n completions; finished rows leave the batch. If memory
runs out, fewer rows are decoded at once, and waiting rows enter as rows finish. Unfinished rows keep their tokens and
continue, because sampling them again would favour short completions. The sampled tokens do not depend on any of this,
because each row has its own random numbers. Turns are decoded in rounds; a round has all turns that are ready.
"""

import time
from collections import deque
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.loading import FOUR, SIXTEEN
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import EVERYTHING, Conversation, ExpectedLengths, FinishedPrompts, Meanwhile, Pace
from lowmem_grpo.engines.batch import FED, Batch, DecodeState, Passes
from lowmem_grpo.engines.decoding import StopCriteria, budget_of, request_numbers, shared_numbers
from lowmem_grpo.engines.generation_state import GenerationState, Prefill, PrefixCache
from lowmem_grpo.engines.token_step import TokenStep
from lowmem_grpo.engines.vllm.sampling_weights import few_rows
from lowmem_grpo.kernels.frozen_weight import WideWeights
from lowmem_grpo.memory.cards import graph_rows, prefill_piece
from lowmem_grpo.memory.oom import BatchLimit, OutOfMemory, RunMemory, catch_oom
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import OnGroup, Rollout

COMPACT_BELOW = 0.9  # finished rows leave the batch once less than this share of it is unfinished
RARELY = 0.5  # the same share with CUDA graphs, because a change of the number of rows loses the graphs
LOOK = 8  # with CUDA graphs, decode steps between two checks of which rows are done


class TransformersEngine:
    """The engine that samples with the trainer's model itself, through transformers."""

    name = "transformers"
    capabilities = EVERYTHING
    resumes = True  # `converse` takes requests that have `begun`

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, max_seq_length: int,
                 enforce_eager: bool | None = None, sampling_weights: str | None = None) -> None:
        """Make an engine on the policy's model. `enforce_eager=True` turns CUDA graphs off; with False,
        EngineUnavailableError if there can be none. `sampling_weights="16bit"` dequantizes quantized weights while
        sampling; None lets the run's plan decide."""
        self.policy, self.passes = policy, Passes(policy)
        self.tokenizer, self.pad_id = tokenizer, tokenizer.pad_token_id or 0
        self.max_seq_length = max_seq_length
        self.policy_version = 0
        self.kv_bytes = 0
        self.eos_ids = policy.eos_token_ids(tokenizer)
        self.bound: BatchLimit = RunMemory().rollout  # limits the rows that are decoded together
        self.kept, self.widest = PrefixCache(), 0  # cached turns of `converse`, and its largest round so far
        self.pace, self.expected = Pace(), ExpectedLengths()
        self.step = TokenStep(self.passes, enforce_eager)
        self.use_weights(sampling_weights)
        self.decoding = False
        self.sleeps = True  # free step buffers, graphs and weights in 16 bits while training

    @property
    def slots(self) -> int | None:
        return self.bound.under(None)

    def on_policy_update(self, policy_version: int) -> None:
        self.policy_version = policy_version
        self.forget()

    def sleep(self) -> None:
        self.forget()
        if self.sleeps:
            self.free_weights()
            if self.policy.device.type == "cuda":
                torch.cuda.empty_cache()

    def use_weights(self, form: str | None) -> None:
        """Choose the weights to sample with: as stored or, for "16bit", dequantized (except in steps of few rows)."""
        self.free_weights()
        self.sampling_weights = form
        self.passes.wide = WideWeights(few_rows(self.policy.base, self.policy.device)) if form == SIXTEEN else None

    def free_weights(self) -> None:
        """Free the weights that were dequantized to 16 bits, and step buffers with the graphs that read them."""
        self.step.drop()
        if self.passes.wide is not None:
            self.passes.wide.held.clear()

    def give_back(self) -> None:
        """After memory ran out in training, free the engine's memory now (unless a call is running), and again before
        each later training phase."""
        self.sleeps = True
        if not self.decoding:
            self.sleep()

    def wake(self) -> None:
        """Do nothing: each call allocates what it needs."""

    def close(self) -> None:
        self.forget()
        self.free_weights()

    def forget(self) -> None:
        """Drop the cached turns and the buffers of the current rows."""
        self.kept.rows.clear()
        self.step.release()
        self.widest = 0

    def generate(self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None,
                 meanwhile: Meanwhile | None = None) -> list[list[Rollout]]:
        if not prompts:
            return []
        finished, device, n = FinishedPrompts(len(prompts), on_group, meanwhile), self.policy.device, params.n
        self.forget()
        budgets = [budget_of(prompt, params.max_tokens, self.max_seq_length) for prompt in prompts for _ in range(n)]
        if (seeds := params.seeds) is not None:
            numbers = request_numbers(seeds, max(budgets) + 1, device)
        else:
            part = None if params.part is None else (params.part[0] * n, params.part[1] * n)
            seed = time.time_ns() % 2**63 if params.seed is None or part is None else params.seed
            numbers = shared_numbers(seed, len(budgets), device, part)
        self.kv_bytes = 0
        self.policy.inputs.prepare(prompts)
        self.pace.start_call()
        self.decode(GenerationState(prompts, params, numbers, torch.tensor(budgets, device=device), finished))
        groups = finished.result()
        self.expected.note_groups(prompts, groups)
        return groups

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        """Decode turns in rounds; see `Engine.converse`. Cached turns count towards the limit on rows. Without a limit,
        running rows and cached turns together are at most twice the largest round, not counting interrupted turns."""
        self.kv_bytes, goes_on = 0, getattr(conversation, "goes_on", False)
        self.step.drop()  # its memory is needed for kept rows
        if not goes_on:
            self.forget()  # kept rows belong to another conversation's keys
        self.kept.awaited = getattr(conversation, "awaited", set)
        self.pace.start_call()
        try:
            while requests := conversation.next_requests(busy=False):
                self.widest = max(self.widest, len(requests))
                room = self.bound.under(None) or 2 * self.widest
                budgets = [budget_of(request.ids, request.max_tokens, self.max_seq_length) for request in requests]
                self.decode(GenerationState.from_turns(requests, params, budgets, self.policy.device, conversation,
                                                       self.kept, room))
        except BaseException:
            goes_on = False
            raise
        finally:
            if not goes_on:
                self.forget()

    # One call: all rows

    def decode(self, generation: GenerationState) -> None:
        """Sample every row until it ends. As many rows are decoded at a time as memory has room for."""
        most, n, device = len(generation.budgets), generation.params.n, self.policy.device
        waiting = deque(range(most))
        if (self.bound.under(None) or most) < most:  # not all rows have room, so the longest expected start first
            order = self.expected.order(generation.prompts)
            waiting = deque(prompt * n + row for prompt in order for row in range(n))
        while waiting:
            size = min(self.bound.under(None) or most, most)
            stops = StopCriteria(self.tokenizer, generation.params, self.eos_ids, device)
            batch = Batch(generation, stops, waiting, size, self.policy.inputs.never)
            if not generation.requests:
                longest = max(map(len, generation.prompts)) + generation.ids.shape[1]
                self.step.prepare(size, min(longest, self.max_seq_length))
            self.decoding = True
            try:
                with self.passes.evaluating(self.step.factors()):
                    failed = catch_oom(partial(self.decode_together, batch), device, self.step.drop)
            except BaseException:
                self.step.drop()  # its buffers may hold NaN
                raise
            finally:
                self.decoding = False
            self.step.release()
            if isinstance(failed, OutOfMemory):
                waiting.extendleft(reversed(batch.rows))
                most = self.smaller(generation, size, len(batch.rows), failed)

    def smaller(self, generation: GenerationState, size: int, left: int, shortage: OutOfMemory) -> int:
        """Return how many rows to decode at once, after memory ran out when `left` of `size` rows were unfinished. It
        is the same number if dequantized weights or cached turns could be dropped, and otherwise half of `left`."""
        if generation.finished.failed_outside is not None:
            raise generation.finished.failed_outside  # memory ran out in a callback, so fewer rows would not help
        what = f"sampling {size} at once"
        if self.passes.wide is not None and self.passes.wide.held:
            self.use_weights(FOUR)
            self.bound.note(what, shortage, "weights in 16 bits are given up, and the work is repeated")
            return size
        if dropped := generation.kept.evict():
            self.bound.note(what, shortage, f"the keys and values of {dropped} earlier turns are dropped, and the work "
                                            "is repeated")
            return size
        self.bound.lower(what, shortage, size // 2 or None)
        return max(1, left // 2)

    # One batch: rows that are decoded together

    def decode_together(self, batch: Batch) -> None:
        """Sample rows until all have ended and none is waiting. After an error, `batch.rows` lists the rows that had
        entered the batch and are unfinished."""
        logits = torch.empty(0)
        self.pace.resume()
        while batch.rows or batch.waiting:
            if batch.has_room:
                logits = self.enter(batch, logits)
            batch.draw(logits)
            if batch.is_time_to_look(LOOK if self.step.record else 1) or self.pace.reading:
                self.check_rows(batch)
            if batch.rows:
                state = batch.state
                logits = self.step.extend(state)
                batch.generation.keep_routes(state.rows, state.counts, state.routes)

    def check_rows(self, batch: Batch) -> None:
        """Find the finished rows, report the prompts that are complete, and drop finished rows if that pays off."""
        steps, running = batch.since, len(batch.rows)
        self.note_bytes(batch)
        drawn, prompts = batch.find_done()
        self.pace.step(running, drawn)
        if batch.generation.told:
            prompts += batch.tell()
        self.report(batch.generation, prompts)
        if len(batch.rows) < len(batch.state.rows) and (batch.has_room or self.pays(batch)):
            batch.drop_finished()
        if left := len(batch.rows) + len(batch.waiting):
            with self.pace.paused():
                for _ in range(steps):  # one call per decode step, as the caller may count them
                    batch.generation.finished.between(left)

    def pays(self, batch: Batch) -> bool:
        """Return True if dropping the finished rows now makes decode steps cheaper."""
        rows, left = len(batch.state.rows), len(batch.rows)
        if self.step.lasting is not None:
            return graph_rows(left) < graph_rows(rows)
        return left < (COMPACT_BELOW if self.step.record is None else RARELY) * rows

    def report(self, generation: GenerationState, prompts: list[int]) -> None:
        """Pass the rollouts of these prompts, whose rows are all finished, to the caller."""
        if not prompts:
            return
        n = generation.params.n
        rows = [prompt * n + row for prompt in prompts for row in range(n)]
        rollouts = generation.rollouts(rows, self.tokenizer, self.policy_version)
        for place, prompt in enumerate(prompts):
            generation.finished.add(prompt, rollouts[place * n : place * n + n])

    def note_bytes(self, batch: Batch) -> None:
        kept = batch.generation.kept.nbytes if batch.generation.requests else 0
        self.kv_bytes = max(self.kv_bytes, batch.state.cache.nbytes + kept)

    # Rows that enter

    def enter(self, batch: Batch, logits: Tensor) -> Tensor:
        """Let waiting rows enter while there is room. Return the logits (B, V) of running rows, then of new ones."""
        self.step.release()
        while batch.waiting and (running := len(batch.rows)) < batch.size:
            state, new = self.start_rows(batch.generation, batch.take_rows(), running)
            batch.enter(state)
            logits = torch.cat([logits, new]) if running else new
            self.note_bytes(batch)
        return logits

    def start_rows(self, generation: GenerationState, rows: list[int], running: int) -> tuple[DecodeState, Tensor]:
        """Prefill the prompts of B rows, and the tokens that they had sampled before an interruption, equally many per
        row. Return their state and the next tokens' logits (B, V)."""
        start = generation.resumed(rows[0])
        made = [self.prefill(generation, each, running, start) for each in generation.prefills(rows, running)]
        state, logits = DecodeState.joined([state for state, _ in made]), torch.cat([logits for _, logits in made])
        state.counts = torch.tensor(generation.begun, device=self.policy.device)[state.rows]
        if start:
            self.pace.read(start * len(rows))
            places = state.counts[:, None] + torch.arange(start, device=state.counts.device)
            logits = self.passes.feed(state, generation.ids[state.rows[:, None], places])
            state.counts = state.counts + start
            generation.keep_routes(state.rows, state.counts, state.routes)  # earlier ones were recorded when drawn
        return state, logits

    def prefill(self, generation: GenerationState, prefill: Prefill, running: int, start: int
                ) -> tuple[DecodeState, Tensor]:
        """Feed the uncached tokens of prompts, each prompt once. Return the state of their B rows and the next tokens'
        logits (B, V). In a call of `generate`, the cache is placed in the lasting storage, after the `running` rows, if
        that has room for `start` more tokens."""
        device, cache, held = self.policy.device, prefill.held_cache(), prefill.held
        input_ids, real = prefill.inputs(self.pad_id, device)
        state = DecodeState.holding(torch.arange(len(held), device=device), cache, torch.tensor(held, device=device))
        if not generation.requests:
            state.cache.lasting = self.step.storage_for(prefill.fed + start, running)
        state.shifts = self.policy.inputs.shifts(prefill.prompts, device)
        piece = FED if cache else prefill_piece(*input_ids.shape)
        logits = self.passes.feed(state, input_ids, real, piece, prefill.prompts)
        self.pace.read(sum(map(len, prefill.prompts)) - sum(held))
        generation.keep_prompt_routes(prefill, state.routes)
        owners = [place for place, rows in enumerate(prefill.rows) for _ in rows]
        if len(owners) > len(held):
            state.select(torch.tensor(owners, device=device))
            logits = logits[state.rows]
        state.rows = torch.tensor([row for rows in prefill.rows for row in rows], device=device)
        return state, logits
