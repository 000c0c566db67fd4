"""What a call of the transformers engine has drawn so far, and the parts in which it draws it."""

import time
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import ClassVar

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import FinishedPrompts, Until
from lowmem_grpo.engines.decode import Decode
from lowmem_grpo.engines.kept_rows import Continued
from lowmem_grpo.engines.numbers import Numbers
from lowmem_grpo.models.routes import Routes
from lowmem_grpo.types import Rollout


@dataclass
class Part:
    """Rows with `start` tokens drawn. While they are decoded, finished rows leave it and `start` grows, so that the
    rest can be resumed."""

    rows: list[int]
    start: int = 0


@dataclass
class Drawn:
    """What a call has drawn so far: R = prompts * n rows of at most C tokens."""

    keeps_rows: ClassVar[bool] = False  # whether `leave` needs the keys and values of rows that are done

    prompts: list[list[int]]
    params: SamplingParams
    numbers: Numbers
    ids: Tensor  # (R, C + 1); the last place is written where others go on, and never read
    logprobs: Tensor  # (R, C + 1)
    budgets: Tensor  # (R,)
    lengths: Tensor  # (R,) of the completion, or its budget until it is finished
    stopped: Tensor  # (R,) bool
    finished: FinishedPrompts
    unfinished: list[int]  # number of rows, for each prompt
    prompt_routes: dict[int, Routes] = field(default_factory=dict)  # of each row, where the model has experts
    done: set[int] = field(default_factory=set)  # finished rows
    routes: Tensor | None = None  # (R, C, layers, k) of the drawn tokens that ran; made when the first of them has
    until: Until | None = None  # when a prompt is finished before all of its rows are
    chosen: dict[int, list[int]] = field(default_factory=dict)  # of each prompt, the rows that count and are done
    reached: dict[int, int] = field(default_factory=dict)  # tokens of the rows that the call begins with, or leaves
    surplus: set[int] = field(default_factory=set)  # rows of finished prompts that are still in a batch, or wait

    @classmethod
    def nothing(cls, prompts: list[list[int]], params: SamplingParams, budgets: list[int],
                device: torch.device, finished: FinishedPrompts, until: Until | None = None) -> "Drawn":
        """Before the first token."""
        seed = time.time_ns() % 2**63 if params.seed is None else params.seed
        total, width, most = len(budgets), max(budgets) + 1, torch.tensor(budgets, device=device)
        part = None if params.part is None else (params.part[0] * params.n, params.part[1] * params.n)
        return cls(
            prompts, params, Numbers(seed, total, device, part),
            torch.zeros(total, width, dtype=torch.long, device=device), torch.zeros(total, width, device=device), most,
            most.clone(), torch.zeros(total, dtype=torch.bool, device=device), finished, [params.n] * len(prompts),
            until=until,
        )

    def uniform(self, rows: Tensor, place: int) -> Tensor:
        """The numbers (B, 1) fp64 from [0, 1) that the tokens of rows (B,) at a place are drawn with."""
        return self.numbers.at(rows, place)

    def uniforms(self, rows: Tensor, places: Tensor) -> Tensor:
        """The same at several places of each row: (B, S) of places (B, S)."""
        return self.numbers.at_each(rows, places)

    def going_on(self, rows: list[int], running: int) -> list[Continued]:
        """The rows whose first tokens need not be computed, beside so many that run already. Here none."""
        return []

    def prompts_of(self, rows: list[int]) -> tuple[list[list[int]], list[int]]:
        """The prompts of some rows, and how many of the rows belong to each."""
        shared = [(owner, len(list(same))) for owner, same in groupby(row // self.params.n for row in rows)]
        return [self.prompts[owner] for owner, _ in shared], [count for _, count in shared]

    def keep_prompts(self, rows: list[int], prompts: list[list[int]], counts: list[int], fed: Tensor | None) -> None:
        """Keep the routes of prompts: `fed` (P, S, layers, k), which end at the right edge."""
        if fed is None:
            return
        given, host = iter(rows), fed.cpu()
        for own, prompt, count in zip(host, prompts, counts, strict=True):
            new = dict.fromkeys(islice(given, count), Routes((own[-len(prompt) :].clone(),)))
            self.prompt_routes = new | self.prompt_routes  # rows that are resumed keep those of their first pass

    def keep_continued(self, more: Continued, fed: Tensor | None) -> None:
        """Keep those of prompts whose first tokens were held, with their routes; of each, the last were `fed`."""
        if fed is None:
            return
        rows = zip(more.rows, more.prompts, more.kept, more.held, fed.cpu(), strict=True)
        for row, prompt, kept, held, own in rows:
            assert kept.routes is not None, "what is held of a mixture was recorded"
            again = Routes((*kept.routes.cut(0, held).parts, own[held - len(prompt) :].clone()))
            self.prompt_routes[row] = kept.routes.cut(0, kept.shared(prompt)).then(again)

    def keep(self, rows: Tensor, step: int | Tensor, fed: Tensor | None) -> None:
        """Keep the routes of the tokens that were drawn in a step and then fed: the last of `fed` (B, S, layers, k)."""
        if fed is None:
            return
        if self.routes is None:
            self.routes = fed.new_zeros(*self.ids.shape, *fed.shape[2:])
        self.routes[rows, step] = fed[:, -1]

    def put(self, rows: Tensor, places: Tensor, counts: Tensor, tokens: Tensor, logprobs: Tensor,
            fed: Tensor | None) -> None:
        """Keep what rows (B,) drew at several places (B, S): the first `counts` (B,) of tokens and logprobs (B, S). The
        routes `fed` (B, S, layers, k) are of the tokens before them."""
        row, step = (torch.arange(places.shape[1], device=places.device) < counts[:, None]).nonzero(as_tuple=True)
        own, place = rows[row], places[row, step]
        self.ids[own, place], self.logprobs[own, place] = tokens[row, step], logprobs[row, step].float()
        if fed is not None:
            self.routes = fed.new_zeros(*self.ids.shape, *fed.shape[2:]) if self.routes is None else self.routes
            self.routes[own, place - 1] = fed[row, step]

    def end(self, rows: list[int], lengths: list[int], stopped: set[int]) -> None:
        """These rows have ended with so many tokens, some of them before their budgets."""
        at = torch.tensor(rows, dtype=torch.long, device=self.ids.device)
        self.lengths[at] = torch.tensor(lengths, dtype=self.lengths.dtype, device=at.device)
        self.stopped[at] = torch.tensor([row in stopped for row in rows], dtype=torch.bool, device=at.device)

    def owner(self, row: int) -> int:
        """The prompt of a row."""
        return row // self.params.n

    def prompt_of(self, row: int) -> list[int]:
        """Its tokens."""
        return self.prompts[self.owner(row)]

    def give_routes(self, rows: list[int], rollouts: list[Rollout]) -> None:
        """Give the rollouts of these rows theirs: of the prompt, and of all tokens but the last, which did not run."""
        if not self.prompt_routes:
            return
        for row, rollout in zip(rows, rollouts, strict=True):
            ran = len(rollout.completion_ids) - 1
            own = (self.routes[row, :ran].clone().cpu(),) if self.routes is not None and ran else ()
            rollout.routes = Routes((*self.prompt_routes[row].parts, *own))

    def finish(self, rows: set[int]) -> list[int]:
        """Count rows as finished; returns the prompts that are finished now, because enough of their rows are."""
        self.done |= rows
        found: list[int] = []
        for row in sorted(rows):
            prompt = self.owner(row)
            own = self.chosen.setdefault(prompt, [])
            if len(own) < self.enough:
                own.append(row)
                self.unfinished[prompt] -= 1
                found += [prompt] if len(own) == self.enough else []
        for prompt in found:
            self.chosen[prompt].sort()
            self.surplus |= {*range(prompt * self.params.n, (prompt + 1) * self.params.n)} - {*self.chosen[prompt]}
            self.unfinished[prompt] = 0
        if found and self.until is not None and self.until.ends(self.complete):
            self.surplus |= {row for row in range(len(self.ids)) if self.owner(row) not in self.complete} - self.done
            self.unfinished = [0] * len(self.prompts)
        return found

    @property
    def complete(self) -> set[int]:
        """The prompts that are finished."""
        return {prompt for prompt, rows in self.chosen.items() if len(rows) == self.enough}

    def go_on_from(self, begun: dict[int, list[Rollout]]) -> None:
        """Begin with what an earlier call has left of some prompts."""
        done: set[int] = set()
        for prompt, rollouts in begun.items():
            for row, rollout in enumerate(rollouts, start=prompt * self.params.n):
                count = self.reached[row] = len(rollout.completion_ids)
                self.ids[row, :count] = torch.tensor(rollout.completion_ids, dtype=torch.long, device=self.ids.device)
                self.logprobs[row, :count] = torch.tensor(rollout.rollout_logprobs, device=self.ids.device)
                if rollout.finish_reason != "unfinished":
                    done.add(row)
                    self.lengths[row], self.stopped[row] = count, rollout.finish_reason == "stop"
        self.finish(done)

    def left_of(self, prompt: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(ids, log-probabilities, lengths, stopped) on the host, of a prompt that the call leaves unfinished."""
        rows = range(prompt * self.params.n, (prompt + 1) * self.params.n)
        lengths = [int(self.lengths[row]) if row in self.done else self.reached.get(row, 0) for row in rows]
        own = slice(rows.start, rows.stop)
        return self.ids[own].cpu(), self.logprobs[own].cpu(), torch.tensor(lengths), self.stopped[own].cpu()

    def marked(self, prompt: int, rollouts: list[Rollout]) -> list[Rollout]:
        """Its rollouts, of which those that are not done say so."""
        for row, rollout in enumerate(rollouts, start=prompt * self.params.n):
            rollout.finish_reason = rollout.finish_reason if row in self.done else "unfinished"
        return rollouts

    def parts(self, order: list[int]) -> list[Part]:
        """The rows that are not done, in this order, but those that were begun earlier first."""
        begun = {} if self.until is None else self.until.begun
        rows = sorted((row for row in order if row not in self.done), key=lambda row: self.owner(row) not in begun)
        return [Part(list(same), start) for start, same in groupby(rows, key=lambda row: self.reached.get(row, 0))]

    @property
    def enough(self) -> int:
        """Rows of a prompt that are waited for."""
        return self.params.n if self.until is None else self.until.enough

    def drop(self, reached: dict[int, int]) -> set[int]:
        """The rows that nobody waits for any more. `reached` says how many tokens the unfinished ones have drawn."""
        over, self.surplus = self.surplus, set()
        for row in sorted(over):
            assert self.until is not None
            if self.owner(row) not in self.complete:
                self.reached[row] = reached[row]
                continue
            self.until.drop(self.owner(row), int(self.lengths[row]) if row in self.done else reached[row])
        return over

    def between(self, steps: int = 1) -> None:
        """So many steps of decoding have ended, and the next one has not begun. The caller is told once for each, as it
        may count them."""
        for _ in range(steps):
            self.finished.between(sum(self.unfinished))

    def reopen(self, rows: Tensor) -> None:
        """Undo what an interrupted step may have written about unfinished rows."""
        self.lengths[rows], self.stopped[rows] = self.budgets[rows], False

    def leave(self, state: Decode, left: list[int]) -> None:
        """After a step, the rows of a batch that are not `left` are done and about to be dropped."""

    def shed(self) -> int:
        """Give back memory that only saves work; returns how many rows that were. Here none."""
        return 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of keys and values beside those of the rows that are decoded."""
        return 0
