"""The last rows of a call, each at its own pace: a pass feeds a row's last token and guesses of its next ones.

A row draws its token of each place with its own number for that place, as it would without guesses. A guess is right
where it is the token that is drawn; the first other one is drawn, too, and the guesses after it are dropped. So what is
drawn is the same, and its log-probabilities are those of the model.
"""

import time

import torch
from torch import Tensor

from lowmem_grpo.engines.decode import Decode
from lowmem_grpo.engines.decoding import draw
from lowmem_grpo.engines.drawn import Drawn
from lowmem_grpo.engines.endings import Endings
from lowmem_grpo.engines.lookup import LENGTHS, Guess, Lookup
from lowmem_grpo.engines.passes import Passes
from lowmem_grpo.engines.speculation import MOST, Speculation

HOLES, FEW = 0.125, 32  # places of a cache without a token, at most: a share of the longest row, and so many more


class Tail:
    """Rows that have drawn different numbers of tokens. Their keys and values have holes where guesses were wrong."""

    def __init__(self, passes: Passes, drawn: Drawn, state: Decode, counts: list[int], endings: Endings,
                 speculation: Speculation, widest: int) -> None:
        """All rows of the state are unfinished and have drawn `counts` tokens (B,), of which the last was not fed. A
        pass may have `widest` places."""
        self.passes, self.drawn, self.state, self.endings = passes, drawn, state, endings
        self.speculation, self.widest = speculation, widest
        rows: list[int] = state.rows.tolist()
        self.left, self.ended = set(rows), list[int]()  # unfinished rows, and those that the last pass finished
        known = drawn.ids[state.rows, : max(counts)].tolist()
        self.answers = {row: ids[:count] for row, ids, count in zip(rows, known, counts, strict=True)}
        self.budgets = dict(zip(rows, drawn.budgets[state.rows].tolist(), strict=True))
        self.stopped: set[int] = set()  # rows that ended before their budget
        self.lookups: dict[int, Lookup] = {}  # by the prompt

    @property
    def start(self) -> int:
        """Tokens that all unfinished rows have drawn."""
        return min((len(self.answers[row]) for row in self.left), default=0)

    def step(self) -> int:
        """One pass; returns how many tokens it drew."""
        running, state, drawn = len(self.left), self.state, self.drawn
        most = min(MOST, self.widest // running - 1) if self.speculation.guessing else 0
        if most:
            self.look_up()
        begun = time.perf_counter()
        guesses = self.guesses(most)
        fed, real = self.laid_out(guesses)
        places, before, positions = self.places(fed.shape[1]), state.real.shape[1], state.positions
        logits = self.passes.guessed(state, fed, real).flatten(0, 1)
        flat = draw(logits, drawn.params, drawn.uniforms(state.rows, places).view(-1, 1))
        tokens, logprobs = (part.view_as(fed) for part in flat)
        taken = self.taken(guesses, tokens.tolist())
        counts = torch.tensor(taken, device=fed.device)
        drawn.put(state.rows, places, counts, tokens, logprobs, state.routes)
        drawn.end(self.ended, [len(self.answers[row]) for row in self.ended], self.stopped)
        state.keep(before, positions, counts, tokens)
        self.close_up_if_wide()
        self.speculation.step(running, sum(taken), time.perf_counter() - begun, any(guesses))
        return sum(taken)

    def close_up_if_wide(self) -> None:
        """Close up the rows where the cache has too many places for their tokens."""
        longest = max(len(self.drawn.prompt_of(row)) + len(self.answers[row]) - 1 for row in self.state.rows.tolist())
        if self.state.real.shape[1] > (1 + HOLES) * longest + FEW:
            self.state.close_up()

    def look_up(self) -> None:
        """Read what is known of the answers to the rows' prompts, once for each prompt."""
        for row in self.left:
            owner, prompt = self.drawn.owner(row), self.drawn.prompt_of(row)
            if owner in self.lookups:
                continue
            self.lookups[owner] = found = Lookup()
            found.add(prompt)
            end = prompt[-LENGTHS[0] :]
            for answer in [*self.speculation.earlier.of(prompt), *self.group(owner)]:
                found.add([*end, *answer], start=len(end))

    def group(self, owner: int) -> list[list[int]]:
        """The answers to a prompt that are drawn so far."""
        n, drawn = self.drawn.params.n, self.drawn
        rows = [row for row in range(owner * n, owner * n + n) if row not in self.answers and row in drawn.done]
        return [*(drawn.ids[row, : drawn.lengths[row]].tolist() for row in rows),
                *(answer for row, answer in self.answers.items() if drawn.owner(row) == owner)]

    def guesses(self, most: int) -> list[list[Guess]]:
        """At most so many for each row of the state."""
        return [self.guess(row, most) if most and row in self.left else [] for row in self.state.rows.tolist()]

    def guess(self, row: int, most: int) -> list[Guess]:
        """Those for one row, which draws one token more than it has right guesses."""
        answer, prompt = self.answers[row], self.drawn.prompt_of(row)
        most = min(most, self.budgets[row] - len(answer) - 1)
        end = [*prompt[-LENGTHS[0] :], *answer[-LENGTHS[0] :]]
        return self.lookups[self.drawn.owner(row)].guess(end, most, self.speculation.chances)

    def laid_out(self, guesses: list[list[Guess]]) -> tuple[Tensor, Tensor]:
        """What is fed (B, S), and which of it is real."""
        width, device = 1 + max(map(len, guesses)), self.state.rows.device
        fed = torch.tensor([[0, *(guess.token for guess in own), *[0] * (width - 1 - len(own))] for own in guesses],
                           device=device)
        fed[:, 0] = self.state.tokens
        lengths = torch.tensor([1 + len(own) for own in guesses], device=device)
        return fed, (torch.arange(width, device=device) < lengths[:, None]) & self.state.alive[:, None]

    def places(self, width: int) -> Tensor:
        """(B, S): which tokens of their answers are drawn."""
        rows = self.state.rows
        counts = torch.tensor([len(self.answers[row]) for row in rows.tolist()], device=rows.device)
        places = counts[:, None] + torch.arange(width, device=counts.device)
        return places.clamp(max=self.drawn.ids.shape[1] - 1)  # of padding

    def taken(self, guesses: list[list[Guess]], drawn: list[list[int]]) -> list[int]:
        """How many of the drawn tokens each row takes: its right guesses and one more, unless it ends before."""
        rows = self.state.rows.tolist()
        self.ended = []
        found = [self.take(row, own, tokens) if row in self.left else 0
                 for row, own, tokens in zip(rows, guesses, drawn, strict=True)]
        self.state.alive = torch.tensor([row in self.left for row in rows], device=self.state.rows.device)
        return found

    def take(self, row: int, guesses: list[Guess], tokens: list[int]) -> int:
        """The same for one row."""
        answer = self.answers[row]
        before = len(answer)
        for place, token in enumerate(tokens):
            answer.append(token)
            if self.over(row) or place == len(guesses) or guesses[place].token != token:
                break
        new = len(answer) - before
        self.speculation.tried(guesses, answer[before:])
        if (known := self.lookups.get(self.drawn.owner(row))) is not None:
            prompt = self.drawn.prompt_of(row)
            text = [*prompt[-LENGTHS[0] :], *answer[-LENGTHS[0] - new :]]
            known.add(text, start=len(text) - new)
        return new

    def over(self, row: int) -> bool:
        """Whether a row ends with the token that it drew last."""
        answer = self.answers[row]
        if stopped := self.endings.end(answer):
            self.stopped.add(row)
        if stopped or len(answer) == self.budgets[row]:
            self.left.remove(row)
            self.ended.append(row)
            return True
        return False

    def leave_out(self) -> None:
        """Leave out rows that nobody waits for any more."""
        if self.drawn.surplus:
            self.left -= self.drawn.drop({row: len(self.answers[row]) for row in self.left})
            rows = self.state.rows.tolist()
            self.state.alive = torch.tensor([row in self.left for row in rows], device=self.state.rows.device)

    def drop_done(self) -> None:
        """Let the rows that are done leave the batch, without holes."""
        if self.drawn.keeps_rows:
            self.state.close_up()
        self.drawn.leave(self.state, sorted(self.left))
        if self.left:
            self.state.compact()
