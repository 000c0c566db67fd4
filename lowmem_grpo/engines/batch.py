"""The rows that the transformers engine decodes together, each at its own place.

Where memory has room for fewer rows than were asked for, others enter as rows are done. The rows of a `Part` have drawn
equally many tokens. While there is only one part, its place is a number on the host, and nothing is looked up.
"""

from collections import deque

import torch
from torch import Tensor

from lowmem_grpo.engines.decode import Decode
from lowmem_grpo.engines.decoding import draw
from lowmem_grpo.engines.drawn import Drawn, Part
from lowmem_grpo.engines.endings import Endings

AHEAD = 64  # places of each row whose random numbers are looked up at once, where rows are at different places


class Batch:
    """Some rows of a call, and what is known of them on the device (`state`)."""

    state: Decode

    def __init__(self, drawn: Drawn, endings: Endings) -> None:
        self.drawn, self.endings = drawn, endings
        self.parts: list[Part] = []  # the unfinished rows; after an error, what is to be resumed
        self.since = 0  # tokens that each row has drawn since it was asked which are done
        self.counts: Tensor | None = None  # (B,) tokens that the rows have drawn, where they differ
        self.ahead: list[Tensor] = []  # (B, 1) fp64 each: random numbers of the next places, the last of them first

    @property
    def running(self) -> int:
        """Unfinished rows."""
        return sum(len(part.rows) for part in self.parts)

    @property
    def place(self) -> int | Tensor:
        """Tokens that the rows have drawn: of all of them, or (B,)."""
        return self.parts[0].start + self.since if self.counts is None else self.counts

    def begin(self, waiting: deque[Part], room: int) -> Part:
        """Take at most so many of the rows that wait; they belong to the batch from now on, and `enter` it next."""
        first = waiting.popleft()
        part = Part(first.rows[:room], first.start)
        if len(first.rows) > room:
            waiting.appendleft(Part(first.rows[room:], first.start))
        self.drawn.reopen(torch.tensor(part.rows, device=self.drawn.ids.device))
        self.parts.append(part)
        return part

    def enter(self, part: Part, state: Decode) -> None:
        """What is known of the rows of the part that began last. All others of the batch are unfinished."""
        if len(self.parts) == 1:
            self.state = state
            return
        before = self.state
        counts = torch.full_like(before.rows, self.parts[0].start) if self.counts is None else self.counts
        self.state = Decode.joined([before, state], give=True)
        self.counts = torch.cat([counts, torch.full_like(state.rows, part.start)])
        self.ahead = []

    def draw(self, logits: Tensor) -> None:
        """Draw the next tokens from logits (B, V). Unless there are stop strings, nothing here waits for the device."""
        state, drawn, place = self.state, self.drawn, self.place
        state.tokens, logprobs = draw(logits, drawn.params, self.numbers())
        drawn.ids[state.rows, place], drawn.logprobs[state.rows, place] = state.tokens, logprobs.float()
        drew, rows = state.alive, state.rows
        ended, lengths = drew & self.ends(), drawn.lengths[rows]
        state.alive = drew & ~ended & (lengths > place + 1)
        drawn.lengths[rows] = lengths.where(~ended, place + 1)
        drawn.stopped[rows] = drawn.stopped[rows] | ended
        if self.counts is not None:
            self.counts = self.counts + drew  # a row that is done stays at its end, where nothing is read
        self.since += 1

    def left(self) -> list[int]:
        """The rows that are not done, asked of the device."""
        found: list[int] = self.state.rows[self.state.alive].tolist()
        return found

    def wants_a_look(self, every: int) -> bool:
        """Whether it is time to ask which rows are done: after `every` tokens, since asking waits for the device, which
        then waits for the host, and where a row may have drawn as many as there is room for. A row that is done
        meanwhile draws on, and what it drew is not kept. It is after each token where there are stop strings, which are
        looked for on the host."""
        full = any(part.start + self.since >= self.drawn.ids.shape[1] for part in self.parts)
        return full or self.since >= (1 if self.endings.stops else every)

    def numbers(self) -> Tensor:
        """(B, 1) fp64: the random numbers of the rows' next tokens."""
        drawn, rows = self.drawn, self.state.rows
        if self.counts is None:
            return drawn.uniform(rows, self.parts[0].start + self.since)
        if not self.ahead:
            places = self.counts[:, None] + torch.arange(AHEAD, device=rows.device)
            found = drawn.uniforms(rows, places.clamp(max=drawn.ids.shape[1] - 1))
            self.ahead = list(found.flip(1).split(1, dim=1))
        return self.ahead.pop()

    def ends(self) -> Tensor:
        """(B,) bool: whether the tokens drawn last end their completions."""
        ids, rows, place = self.drawn.ids, self.state.rows, self.place
        if isinstance(place, int):
            return self.endings.of(ids[rows, max(0, place + 1 - self.endings.reach) : place + 1])
        if not self.endings.stops:
            return self.endings.of(self.state.tokens[:, None])
        texts = [ids[row, max(0, last + 1 - self.endings.reach) : last + 1].tolist()
                 for row, last in zip(rows.tolist(), place.tolist(), strict=True)]
        return torch.tensor([self.endings.end(text) for text in texts], device=rows.device)

    def keep_up(self, left: list[int]) -> dict[int, int]:
        """These rows are left; returns those that are done, and how many tokens their parts have drawn. Until then, an
        error leaves the rows where they were the last time: what they drew since is drawn again, and is the same."""
        kept, before = set(left), self.running
        ended: dict[int, int] = {}
        for part in self.parts:
            part.start += self.since
            if len(left) < before:
                ended |= {row: part.start for row in part.rows if row not in kept}
                part.rows = [row for row in part.rows if row in kept]
        self.since = 0
        return ended

    def too_many(self, ended: dict[int, int]) -> int:
        """Tokens that were drawn after the ends of these rows."""
        lengths = self.drawn.lengths[torch.tensor([*ended], dtype=torch.long, device=self.drawn.ids.device)].tolist()
        return sum(ended.values()) - sum(lengths)

    def compact(self) -> None:
        """Drop the rows that are done."""
        kept = self.state.compact()
        self.parts = [part for part in self.parts if part.rows]
        if self.counts is not None:
            self.counts = self.counts[kept] if len(self.parts) > 1 else None
            self.ahead = [numbers[kept] for numbers in self.ahead] if len(self.parts) > 1 else []

    def clear(self) -> None:
        """All rows are done."""
        self.parts, self.counts, self.ahead, self.since = [], None, [], 0

    def keep_routes(self) -> None:
        """Keep the routes of the tokens that were drawn last, which have been fed."""
        self.drawn.keep(self.state.rows, self.place - 1, self.state.routes)
