"""The rows that the transformers engine decodes together. Others enter as rows are done, where memory has room for
few."""

from collections import deque

import torch
from torch import Tensor

from lowmem_grpo.engines.decoding import StopCriteria, draw
from lowmem_grpo.engines.generation_state import DecodeState, GenerationState, Part

AHEAD = 64  # places of each row whose random numbers are looked up at once


class Batch:
    """Some rows of a call, and what is known of them on the device (`state`)."""

    state: DecodeState

    def __init__(self, generation: GenerationState, stops: StopCriteria) -> None:
        self.generation, self.stops = generation, stops
        self.parts: list[Part] = []  # the unfinished rows; after an error, what is to be resumed
        self.since = 0  # tokens that each row has drawn since it was asked which are done
        self.uniforms = torch.empty(0, 0)  # (B, A) fp64: random numbers of the places to come
        self.used = 0  # how many places of these are drawn

    @property
    def running(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    def take_part(self, waiting: deque[Part], room: int) -> Part:
        """Take at most so many of the rows that wait into the batch; they enter it next."""
        first = waiting.popleft()
        part = Part(first.rows[:room], first.start)
        if len(first.rows) > room:
            waiting.appendleft(Part(first.rows[room:], first.start))
        self.generation.reopen_rows(part.rows)
        self.parts.append(part)
        return part

    def enter(self, state: DecodeState) -> None:
        """Let rows enter; all others of the batch, if there are any, are unfinished."""
        states = [state] if len(self.parts) == 1 else [self.state, state]
        self.state = DecodeState.joined(states)
        self.uniforms, self.used, self.seen = self.uniforms[:0, :0], 0, self.state.counts

    def draw(self, logits: Tensor) -> None:
        """Draw the next tokens from logits (B, V); only stop strings and new random numbers wait for the device."""
        state, generation, drew = self.state, self.generation, self.state.alive
        state.tokens, logprobs = draw(logits, generation.params, self.next_uniforms())
        rows, places = state.rows, state.counts
        generation.ids[rows, places], generation.logprobs[rows, places] = state.tokens, logprobs.float()
        ended, lengths = drew & self.stops.ends(state.tokens, self.last_tokens), generation.lengths[rows]
        state.counts = places + drew  # a row that is done stays at its end, where nothing is read
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
        """Return the last tokens of each row, at most so many, with those drawn just now."""
        state = self.state
        places = state.counts[:, None] + torch.arange(1 - count, 1, device=state.counts.device)
        ids = self.generation.ids[state.rows[:, None], places.clamp(min=0)].tolist()
        return [row[max(0, count - 1 - before) :] for row, before in zip(ids, state.counts.tolist(), strict=True)]

    def is_time_to_look(self, every: int) -> bool:
        """Return whether to ask which rows are done, which waits for the device: after `every` tokens, where a row may
        be full, and after each token where stop strings are looked for on the host. What a row draws after its end is
        not kept."""
        full = any(part.start + self.since >= self.generation.ids.shape[1] for part in self.parts)
        return full or self.since >= (1 if self.stops.texts else every)

    def find_done(self) -> tuple[int, set[int]]:
        """Ask the device which rows are done; returns how many tokens all drew since the last time, and these rows.
        After an error, what rows drew since is drawn again, and is the same."""
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
        """Drop the rows that are done, whose keys and values may be kept elsewhere."""
        self.parts = [part for part in self.parts if part.rows]
        if self.parts:
            kept = self.state.alive.nonzero().squeeze(-1)
            self.state.select(kept)
            self.uniforms, self.seen = self.uniforms[kept], self.state.counts
