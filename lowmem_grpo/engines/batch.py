"""The sequences (rows) that the transformers engine decodes together, and the model's forward passes over them.

If memory has room for only some of a call's rows, waiting rows enter the batch as other rows finish.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.engines.decoding import StopCriteria, draw
from lowmem_grpo.engines.generation_state import GenerationState, KeptPrefix
from lowmem_grpo.engines.kv_cache import CacheSlice, GrowingCache, right_aligned
from lowmem_grpo.kernels.frozen_weight import WIDE, WideWeights
from lowmem_grpo.kernels.lora_factors import Kept, kept_factors
from lowmem_grpo.models.policy import Policy, evaluating

AHEAD = 64  # upcoming positions of each row whose random numbers are looked up at once
FED = 256  # tokens per forward pass when a prompt is continued or an interrupted row is recomputed
ENTER_TOGETHER = 8  # waiting rows enter once 1/8 of the rows that may run are free


@dataclass
class DecodeState:
    """The state of B sequences (rows) that are decoded together. Their KV cache has L positions, padded on the left."""

    cache: GrowingCache
    rows: Tensor  # (B,) index of the row in the call
    counts: Tensor  # (B,) tokens drawn
    tokens: Tensor  # (B,) the last token drawn
    alive: Tensor  # (B,) bool, False for finished rows
    positions: Tensor  # (B,) index in its sequence of the last token in the cache; positions + 1 places are filled
    routes: Tensor | None = None  # (B, S, layers, k) experts chosen for the tokens fed last; None without experts
    shifts: Tensor | None = None  # (B,) how far RoPE positions lie behind `positions`; None for a model of text

    @classmethod
    def holding(cls, rows: Tensor, cache: GrowingCache | None = None, held: Tensor | None = None) -> "DecodeState":
        """Return the state of rows that have sampled nothing yet. `cache` has the keys and values of each row's
        first tokens, right-aligned, and `held` (B,) is the number of these tokens (None: 0)."""
        held = torch.zeros_like(rows) if held is None else held
        alive = torch.ones_like(rows, dtype=torch.bool)
        return cls(cache or GrowingCache(), rows, torch.zeros_like(rows), rows, alive, held - 1)

    @property
    def width(self) -> int:
        """L, the length of the cache in use."""
        return self.cache.get_seq_length()

    @property
    def real(self) -> Tensor:
        """(B, L) bool, False for cache positions with padding."""
        return torch.arange(self.width, device=self.rows.device) >= self.width - 1 - self.positions[:, None]

    @classmethod
    def joined(cls, states: list["DecodeState"]) -> "DecodeState":
        """Return one state with the rows of all `states`, which must be unfinished. The caches move out of `states`.
        Positions on the left that are padding in every row are dropped, and room for some decode steps is added."""
        if len(states) == 1:
            return states[0]
        held = [int(state.positions.max()) + 1 for state in states]
        pieces = [CacheSlice(state.cache, slice(0, len(state.rows)), state.width - places, state.width)
                  for state, places in zip(states, held, strict=True)]
        parts = [(state.rows, state.counts, state.tokens, state.alive, state.positions) for state in states]
        cache = right_aligned(pieces, max(held), max(held) // 8, give=True)
        joined = cls(cache, *(torch.cat(same) for same in zip(*parts, strict=True)))
        shifts = [state.shifts for state in states if state.shifts is not None]
        joined.shifts = torch.cat(shifts) if shifts else None
        return joined

    def trim(self) -> None:
        """Drop the cache positions on the left that are padding in every unfinished row."""
        width, rows = self.width, slice(0, len(self.rows))
        held = int(self.positions.where(self.alive, 0).max()) + 1
        self.cache = right_aligned([CacheSlice(self.cache, rows, width - held, width)], held, give=True)

    def select(self, keep: Tensor) -> None:
        """Reduce the state to the rows at these indices (R,), which may repeat."""
        self.cache.select(keep)
        self.rows, self.counts, self.tokens = self.rows[keep], self.counts[keep], self.tokens[keep]
        self.alive, self.positions = self.alive[keep], self.positions[keep]
        self.shifts = None if self.shifts is None else self.shifts[keep]


class Batch:
    """The rows of a call that are decoded together, at most `size`, with their state on the device (`state`)."""

    state: DecodeState

    def __init__(self, generation: GenerationState, stops: StopCriteria, waiting: deque[int], size: int,
                 never: Tensor | None = None) -> None:
        self.generation, self.stops, self.waiting, self.size = generation, stops, waiting, size
        self.never = never  # tokens that are not drawn
        self.rows: list[int] = []  # the unfinished rows; after an error, the rows to resume
        self.drew: list[tuple[Tensor, Tensor]] = []  # tokens (B,) and log-probs since `find_done` last ran; B rows each
        self.furthest = 0  # the most tokens that a row had drawn before these
        self.last = generation.ids.shape[1] - 1  # the last place of a row, which is never read
        self.uniforms: list[Tensor] = []  # (B, 1) fp64 each: random numbers of the next positions, the last one first

    @property
    def since(self) -> int:
        """The number of tokens that each row has drawn since `find_done` last asked the device."""
        return len(self.drew)

    @property
    def has_room(self) -> bool:
        """True if rows are waiting, and the batch has room for size / ENTER_TOGETHER more rows."""
        return bool(self.waiting) and self.size - len(self.rows) >= max(1, self.size // ENTER_TOGETHER)

    def take_rows(self) -> list[int]:
        """Move waiting rows into the batch, all with equally many drawn tokens to read, and return them."""
        waiting, generation, room = self.waiting, self.generation, self.size - len(self.rows)
        next_rows = [waiting.popleft() for _ in range(min(room, len(waiting)))]
        starts = [generation.resumed(row) for row in next_rows]
        rows = [row for row, start in zip(next_rows, starts, strict=True) if start == starts[0]]
        waiting.extendleft(row for row, start in zip(next_rows[::-1], starts[::-1], strict=True) if start != starts[0])
        at = torch.tensor(rows, device=generation.ids.device)  # an interrupted step may have written what is reset here
        generation.lengths[at], generation.stopped[at] = generation.budgets[at], False
        self.rows += rows
        self.furthest = max(self.furthest, *(generation.drawn[row] for row in rows))
        return rows

    def enter(self, state: DecodeState) -> None:
        """Join the state of new rows to the batch. Every row that is already in it must be unfinished."""
        alone = len(state.rows) == len(self.rows)
        self.state = state if alone else DecodeState.joined([self.state, state])
        self.uniforms = []

    def draw(self, logits: Tensor) -> None:
        """Draw the next tokens from logits (B, V). This synchronizes with the device only to make random numbers."""
        state, generation = self.state, self.generation
        if not self.uniforms:
            ahead = state.counts[:, None] + len(self.drew) + torch.arange(AHEAD, device=state.counts.device)
            self.uniforms = [*generation.numbers(state.rows, ahead.clamp(max=self.last)).split(1, 1)][::-1]
        state.tokens, logprobs = draw(logits, generation.params, self.uniforms.pop(), self.never)
        self.drew.append((state.tokens, logprobs.float()))

    def store(self) -> None:
        """Store the k tokens that each row has drawn since the last call, and end the rows that one of them ends. This
        synchronizes with the device only to match stop strings, for which k is 1."""
        state, generation = self.state, self.generation
        tokens, logprobs = (torch.stack(parts, 1) for parts in zip(*self.drew, strict=True))
        rows, before, lengths = state.rows, state.counts, generation.lengths[state.rows]
        places = (before[:, None] + torch.arange(len(self.drew), device=rows.device)).clamp(max=self.last)
        generation.ids[rows[:, None], places], generation.logprobs[rows[:, None], places] = tokens, logprobs
        ends = self.stops.ends(tokens, self.last_tokens)
        counts = before + 1 + (ends.cumsum(1) == 0)[:, :-1].sum(1)  # up to the first token that ends the row
        ended = state.alive & ends.any(1) & (counts <= lengths)
        state.counts = torch.minimum(counts, lengths).where(state.alive, before)
        state.alive = state.alive & ~ended & (state.counts < lengths)
        generation.lengths[rows] = lengths.where(~ended, state.counts)
        generation.stopped[rows] = generation.stopped[rows] | ended

    def last_tokens(self, count: int) -> list[list[int]]:
        """Return up to `count` last tokens of each row, including those just drawn."""
        state = self.state
        places = state.counts[:, None] + torch.arange(1 - count, 1, device=state.counts.device)
        ids = self.generation.ids[state.rows[:, None], places.clamp(min=0)].tolist()
        return [row[max(0, count - 1 - before) :] for row, before in zip(ids, state.counts.tolist(), strict=True)]

    def is_time_to_look(self, every: int) -> bool:
        """Return whether to ask the device now which rows are done: once `every` tokens were drawn (one token, if stop
        strings are matched on the host), or a row may have reached its limit. Asking synchronizes with the device, so
        it is done rarely; tokens that a row samples after its end are discarded."""
        return self.since >= (1 if self.stops.texts else every) or self.furthest + self.since >= self.last

    def find_done(self) -> tuple[int, list[int]]:
        """Ask the device which rows are done. Return the number of tokens that all rows sampled since the last call,
        and the prompts whose last row has finished since then. Rows that resume after an error sample the tokens since
        the last call again, with the same result."""
        self.store()
        state, generation, done, total = self.state, self.generation, list[int](), 0
        rows = torch.stack([state.rows, state.counts, state.alive.long()], 1).tolist()
        for row, count, alive in rows:
            if count > generation.drawn[row]:
                total, generation.drawn[row] = total + count - generation.drawn[row], count
                prompt = row // generation.params.n
                generation.unfinished[prompt] -= not alive
                done += [] if generation.unfinished[prompt] else [prompt]
        self.rows, self.drew = [row for row, _, alive in rows if alive], []
        self.furthest = max((count for _, count, alive in rows if alive), default=0)
        return total, sorted(done)

    def tell(self) -> list[int]:
        """Pass new tokens to the requests that have `on_tokens`, and end the rows that shall end. Return these rows."""
        state, generation = self.state, self.generation
        if ended := generation.tell(self.rows):
            at = torch.tensor(ended, device=state.rows.device)
            state.alive = state.alive & (state.rows[:, None] != at).all(-1)
            generation.lengths[at] = torch.tensor([generation.drawn[row] for row in ended], device=at.device)
            self.rows = [row for row in self.rows if row not in ended]
            for row in ended:
                generation.unfinished[row] = 0
        return ended

    def drop_finished(self) -> None:
        """Drop the finished rows. In a call of `converse`, keep their KV cache for the next turns of their episodes."""
        if self.generation.requests:
            self.keep_prefixes()
        if self.rows:
            self.state.select(self.state.alive.nonzero().squeeze(-1))
            self.uniforms = []

    def keep_prefixes(self) -> None:
        """Keep the KV cache of finished turns, without the tokens that were sampled after a turn's end."""
        state, generation = self.state, self.generation
        rows, held = state.rows.tolist(), (state.positions + 1).tolist()
        done = [place for place, alive in enumerate(state.alive.tolist()) if not alive]
        cache = state.cache.copied(torch.tensor(done, device=state.rows.device)) if self.rows else state.cache
        for index, place in enumerate(done):
            row, at, start = rows[place], index if self.rows else place, state.width - held[place]
            rollout = generation.finished.rollouts[row][0]
            ids = generation.requests[row].ids + rollout.completion_ids[:-1]
            places = CacheSlice(cache, slice(at, at + 1), start, start + len(ids))
            generation.kept.rows[generation.requests[row].key] = KeptPrefix(ids, places, rollout.routes)
        generation.kept.trim(generation.room - len(self.rows))


class Passes:
    """Forward passes of a policy's model with a KV cache, up to the logits."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.wide: WideWeights | None = None  # quantized weights, dequantized to 16 bits

    def feed(self, state: DecodeState, tokens: Tensor, real: Tensor | None = None, at_once: int = FED,
             prompts: Sequence[list[int]] = ()) -> Tensor:
        """Feed tokens (B, S), at most `at_once` of each row per pass, and return the next tokens' logits (B, V) in
        fp32. `real` (B, S) is False for padding. `prompts` (B,) are those that the tokens are a part of."""
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        routes, width = list[Tensor](), state.width + tokens.shape[1]
        for ids, true in zip(tokens.split(at_once, dim=1), real.split(at_once, dim=1), strict=True):
            hidden = self.feed_piece(state, ids, true, prompts)[:, -1]
            routes += [] if state.routes is None else [state.routes]
            state.cache.reserve(width)  # so that later pieces do not each grow the storage by half
        state.routes = torch.cat(routes, 1) if routes else None
        return self.policy.head.logits(hidden)

    def feed_piece(self, state: DecodeState, ids: Tensor, real: Tensor, prompts: Sequence[list[int]] = ()) -> Tensor:
        """Feed tokens (B, S) in one pass; returns their hidden states (B, S, D) after the last layer."""
        width = ids.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # padding must attend to something
        before = state.real[:, None].expand(-1, width, -1)
        mask = torch.cat([before, causal & real[:, None, :] | itself], dim=2)[:, None]
        positions = (state.positions[:, None] + real.long().cumsum(-1)).clamp(min=0)
        if state.shifts is not None and not prompts:
            positions = positions + state.shifts[:, None]
        hidden = self.hidden(ids, positions, mask, real, state, prompts)
        state.positions = state.positions + real.sum(-1)
        return hidden

    @contextmanager
    def evaluating(self, lasting: Kept | None = None) -> Iterator[None]:
        """Turn dropout and gradients off in this context, and cast each adapter to the compute dtype only once. The
        cast adapters are kept in `lasting` if it is given, and otherwise dropped at the end of the context."""
        token = WIDE.set(self.wide)
        try:
            with evaluating(self.policy.model), torch.no_grad(), kept_factors(lasting), self.policy.rounding():
                if self.wide is not None:
                    self.wide.take_adapters()
                yield
        finally:
            WIDE.reset(token)

    def hidden(self, input_ids: Tensor, positions: Tensor, mask: Tensor, real: Tensor, state: DecodeState,
               prompts: Sequence[list[int]] = (), **named: Any) -> Tensor:
        """Return the last hidden states (B, Q, D) of input_ids (B, Q). `real` (B, Q) is False for padding and finished
        rows. `mask` (B, 1, Q, L) covers L cache positions."""
        recorder = self.policy.recorder()
        with self.policy.autocast():
            out = self.policy.backbone(
                **self.policy.inputs.of_rows(input_ids, positions, prompts), attention_mask=mask,
                past_key_values=state.cache, use_cache=True, cached=True, real=real, **named,
                **({} if recorder is None else {"routes": recorder}),
            )
        state.routes = None if recorder is None else recorder.taken(len(input_ids))
        hidden: Tensor = out.last_hidden_state
        return hidden
