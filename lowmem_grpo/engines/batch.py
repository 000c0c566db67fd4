"""The sequences that the transformers engine decodes together, and forward passes of the trainer's model over them.

If memory has room for only some of a call's sequences (rows), the others enter the batch as rows finish.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowmem_grpo.engines.decoding import StopCriteria, draw
from lowmem_grpo.engines.generation_state import DecodeState, GenerationState, PartialRows
from lowmem_grpo.kernels.frozen import WIDE, WideWeights
from lowmem_grpo.kernels.lora_factors import Kept, kept_factors
from lowmem_grpo.models.policy import Policy, evaluating

AHEAD = 64  # upcoming positions of each row whose random numbers are looked up at once
FED = 256  # tokens per forward pass when a prompt is continued or an interrupted row is recomputed


class Batch:
    """The rows of a call that are being decoded, with their state on the device (`state`)."""

    state: DecodeState

    def __init__(self, generation: GenerationState, stops: StopCriteria) -> None:
        self.generation, self.stops = generation, stops
        self.parts: list[PartialRows] = []  # the unfinished rows; after an error, the rows to resume
        self.since = 0  # tokens that each row has drawn since `find_done` last asked the device
        self.uniforms = torch.empty(0, 0)  # (B, A) fp64: random numbers of the next A positions
        self.used = 0  # columns of `uniforms` used so far

    @property
    def running(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def take_part(self, waiting: deque[PartialRows], room: int) -> PartialRows:
        """Move at most `room` waiting rows into the batch and return them; the caller passes their state to `enter`."""
        first = waiting.popleft()
        part = PartialRows(first.rows[:room], first.start)
        if len(first.rows) > room:
            waiting.appendleft(PartialRows(first.rows[room:], first.start))
        self.generation.reopen_rows(part.rows)
        self.parts.append(part)
        return part

    def enter(self, state: DecodeState) -> None:
        """Join the state of new rows to the batch. Every row that is already in it must be unfinished."""
        states = [state] if len(self.parts) == 1 else [self.state, state]
        self.state = DecodeState.joined(states)
        self.uniforms, self.used, self.seen = self.uniforms[:0, :0], 0, self.state.counts

    def draw(self, logits: Tensor) -> None:
        """Draw the next tokens from logits (B, V). Only stop strings and new random numbers synchronize with the
        device."""
        state, generation, drew = self.state, self.generation, self.state.alive
        state.tokens, logprobs = draw(logits, generation.params, self.next_uniforms())
        rows, places = state.rows, state.counts
        generation.ids[rows, places], generation.logprobs[rows, places] = state.tokens, logprobs.float()
        ended, lengths = drew & self.stops.ends(state.tokens, self.last_tokens), generation.lengths[rows]
        state.counts = places + drew  # a finished row keeps writing one position past its end, which is never read
        state.alive = drew & ~ended & (lengths > state.counts)
        generation.lengths[rows] = lengths.where(~ended, state.counts)
        generation.stopped[rows] = generation.stopped[rows] | ended
        self.since += 1

    def next_uniforms(self) -> Tensor:
        """Return the random numbers of the rows' next tokens, (B, 1) fp64."""
        if self.used == self.uniforms.shape[1]:
            places = self.state.counts[:, None] + torch.arange(AHEAD, device=self.state.counts.device)
            last = self.generation.ids.shape[1] - 1
            self.uniforms, self.used = self.generation.numbers(self.state.rows, places.clamp(max=last)), 0
        self.used += 1
        return self.uniforms[:, self.used - 1 : self.used]

    def last_tokens(self, count: int) -> list[list[int]]:
        """Return up to `count` last tokens of each row, including those just drawn."""
        state = self.state
        places = state.counts[:, None] + torch.arange(1 - count, 1, device=state.counts.device)
        ids = self.generation.ids[state.rows[:, None], places.clamp(min=0)].tolist()
        return [row[max(0, count - 1 - before) :] for row, before in zip(ids, state.counts.tolist(), strict=True)]

    def is_time_to_look(self, every: int) -> bool:
        """Return True if it is time to ask the device which rows are done, which synchronizes: after `every` tokens,
        when a row may have reached its budget, and after each token if stop strings are matched on the host. Tokens
        that a row draws after its end are discarded."""
        full = any(part.start + self.since >= self.generation.ids.shape[1] for part in self.parts)
        return full or self.since >= (1 if self.stops.texts else every)

    def find_done(self) -> tuple[int, set[int]]:
        """Ask the device which rows are done; returns the tokens that all rows drew since the last call, and the done
        rows. After an error the tokens drawn since are drawn again, with the same result."""
        state = self.state
        drawn = self.running if self.since == 1 else int((state.counts - self.seen).sum())
        left, done = set(state.rows[state.alive].tolist()), set[int]()
        for part in self.parts:
            part.start += self.since
            done |= {*part.rows} - left
            part.rows = [row for row in part.rows if row in left]
        self.since, self.seen = 0, state.counts
        return drawn, done

    def drop_finished(self) -> None:
        """Drop the finished rows; `keep_prefixes` has saved their KV cache where it is needed."""
        self.parts = [part for part in self.parts if part.rows]
        if self.parts:
            kept = self.state.alive.nonzero().squeeze(-1)
            self.state.select(kept)
            self.uniforms, self.seen = self.uniforms[kept], self.state.counts


class Passes:
    """Forward passes of a policy's model with a KV cache, up to the logits."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.wide: WideWeights | None = None  # quantized weights, dequantized to 16 bits

    def feed(self, state: DecodeState, tokens: Tensor, real: Tensor | None = None, at_once: int = FED) -> Tensor:
        """Feed tokens (B, S), `at_once` per pass, and return the next tokens' logits (B, V). `real` (B, S) is False for
        padding."""
        real = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        routes, width = list[Tensor](), state.real.shape[1] + tokens.shape[1]
        for ids, true in zip(tokens.split(at_once, dim=1), real.split(at_once, dim=1), strict=True):
            hidden = self.feed_piece(state, ids, true)[:, -1:]
            routes += [] if state.routes is None else [state.routes]
            state.cache.reserve(width)  # so that later pieces do not each grow the storage by half
        state.routes = torch.cat(routes, 1) if routes else None
        return self.logits(hidden).squeeze(1)

    def feed_piece(self, state: DecodeState, ids: Tensor, real: Tensor) -> Tensor:
        """Feed tokens (B, S) in one pass; returns their hidden states (B, S, D) after the last layer."""
        width = ids.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # padding must attend to something
        before = state.real[:, None].expand(-1, width, -1)
        mask = torch.cat([before, causal & real[:, None, :] | itself], dim=2)[:, None]
        positions = (state.positions[:, None] + real.long().cumsum(-1)).clamp(min=0)
        hidden = self.hidden(ids, positions, mask, real, state)
        state.real = torch.cat([state.real, real], dim=1)
        state.positions = state.positions + real.sum(-1)
        return hidden

    @contextmanager
    def evaluating(self, lasting: Kept | None = None) -> Iterator[None]:
        """Inside, dropout and gradients are off, and adapters cast to the compute dtype are cached, in `lasting` if
        they should outlive the context."""
        token = WIDE.set(self.wide)
        try:
            with evaluating(self.policy.model), torch.no_grad(), kept_factors(lasting):
                yield
        finally:
            WIDE.reset(token)

    def hidden(self, input_ids: Tensor, positions: Tensor, mask: Tensor, real: Tensor, state: DecodeState,
               **named: Any) -> Tensor:
        """Return the last hidden states (B, Q, D) of input_ids (B, Q); `real` (B, Q) is False for padding and finished
        rows; mask (B, 1, Q, L)."""
        recorder = self.policy.recorder()
        with self.policy.autocast():
            out = self.policy.backbone(
                input_ids=input_ids, position_ids=positions, attention_mask=mask, past_key_values=state.cache,
                use_cache=True, cached=True, real=real, **named,
                **({} if recorder is None else {"routes": recorder}),
            )
        state.routes = None if recorder is None else recorder.taken(len(input_ids))
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return fp32 logits (B, Q, V) of hidden states (B, Q, D)."""
        return self.policy.head.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)


def left_padded(prompts: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return left-padded token ids (P, L) and a mask (P, L) that is True for real tokens."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    input_ids = pad_sequence(rows, batch_first=True, padding_value=pad_id, padding_side="left")
    real = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], True, padding_side="left")
    return input_ids.to(device), real.to(device)
