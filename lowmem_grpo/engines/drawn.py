"""What a call of the transformers engine has drawn so far, and the parts in which it draws it."""

import time
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import ClassVar

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import FinishedPrompts
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
    routes: Tensor | None = None  # (R, C, layers, k) of the drawn tokens that ran; made when the first of them has

    @classmethod
    def nothing(cls, prompts: list[list[int]], params: SamplingParams, budgets: list[int],
                device: torch.device, finished: FinishedPrompts) -> "Drawn":
        """Before the first token."""
        seed = time.time_ns() % 2**63 if params.seed is None else params.seed
        total, width, most = len(budgets), max(budgets) + 1, torch.tensor(budgets, device=device)
        part = None if params.part is None else (params.part[0] * params.n, params.part[1] * params.n)
        return cls(
            prompts, params, Numbers(seed, total, device, part),
            torch.zeros(total, width, dtype=torch.long, device=device), torch.zeros(total, width, device=device), most,
            most.clone(), torch.zeros(total, dtype=torch.bool, device=device), finished, [params.n] * len(prompts),
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

    def give_routes(self, rows: list[int], rollouts: list[Rollout]) -> None:
        """Give the rollouts of these rows theirs: of the prompt, and of all tokens but the last, which did not run."""
        if not self.prompt_routes:
            return
        for row, rollout in zip(rows, rollouts, strict=True):
            ran = len(rollout.completion_ids) - 1
            own = (self.routes[row, :ran].clone().cpu(),) if self.routes is not None and ran else ()
            rollout.routes = Routes((*self.prompt_routes[row].parts, *own))

    def finish(self, rows: set[int]) -> list[int]:
        """Count rows as finished; returns the prompts that are finished now, because all of their rows are."""
        finished: list[int] = []
        for prompt in sorted(row // self.params.n for row in rows):
            self.unfinished[prompt] -= 1
            finished += [] if self.unfinished[prompt] else [prompt]
        return finished

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
