"""One round of turns in the transformers engine: what is ready together is decoded together."""

from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, FinishedPrompts, Request
from lowmem_grpo.engines.decode import Decode
from lowmem_grpo.engines.drawn import Drawn
from lowmem_grpo.engines.kept_rows import Continued, Kept, KeptRows, fed_together
from lowmem_grpo.types import Rollout


@dataclass
class DrawnTurns(Drawn):
    """What is drawn of the R turns of a round, one row each. The numbers of a row follow from its own seed, so that
    they are the same however the rows are decoded."""

    keeps_rows: ClassVar[bool] = True

    requests: list[Request] = field(default_factory=list)
    own_numbers: Tensor = field(default_factory=lambda: torch.empty(0))  # (R, C) fp64, each row of its request's seed
    kept: KeptRows = field(default_factory=KeptRows)
    room: int = 0  # rows that may be in memory together, the kept ones among them
    cached: list[int] = field(default_factory=list)  # (R,) tokens of the prompt that were not computed

    @classmethod
    def asked(cls, requests: list[Request], params: SamplingParams, budgets: list[int], device: torch.device,
              conversation: Conversation, kept: KeptRows, room: int) -> "DrawnTurns":
        """Before the first token. Each turn is given to the conversation as soon as it is drawn."""
        assert len({request.key for request in requests}) == len(requests), "one turn of a key at a time"

        def give(row: int, rollouts: list[Rollout]) -> None:
            rollouts[0].cached_tokens = drawn.cached[row]
            with finished.outside_the_engine():
                conversation.give(requests[row].key, rollouts[0])

        finished = FinishedPrompts(len(requests), give)
        params = replace(params, n=1, seed=0, part=None)
        nothing = Drawn.nothing([request.ids for request in requests], params, budgets, device, finished)
        numbers = torch.zeros(nothing.ids.shape, dtype=torch.float64)
        for row, request in enumerate(requests):
            numbers[row].uniform_(generator=torch.Generator().manual_seed(request.seed))
        drawn = cls(**vars(nothing), requests=requests, own_numbers=numbers.to(device), kept=kept, room=room,
                    cached=[0] * len(requests))
        return drawn

    def uniform(self, rows: Tensor, place: int) -> Tensor:
        return self.own_numbers[rows, place, None]

    def uniforms(self, rows: Tensor, places: Tensor) -> Tensor:
        return self.own_numbers[rows[:, None], places]

    def going_on(self, rows: list[int], running: int) -> list[Continued]:
        found = {row: kept for row in rows if (kept := self.kept.take(self.requests[row].key)) is not None}
        self.kept.trim(self.room - running - len(rows))
        held = {row: kept.shared(self.prompts[row]) for row, kept in found.items()}
        new = {row: len(self.prompts[row]) - shared for row, shared in held.items() if shared}
        exactly = any(kept.cache.whole_only for kept in found.values())
        continued = [Continued(together, [self.prompts[row] for row in together], [found[row] for row in together],
                               new[together[0]]) for together in fed_together(new, exactly)]
        for row in rows:
            self.cached[row] = 0
        for more in continued:
            for row, count in zip(more.rows, more.held, strict=True):
                self.cached[row] = count
        return continued

    def prompts_of(self, rows: list[int]) -> tuple[list[list[int]], list[int]]:
        shared = [(ids, list(same)) for ids, same in groupby(rows, key=lambda row: self.prompts[row])]
        for ids, same in shared:
            for row in same[1:]:
                self.cached[row] = len(ids)
        return [ids for ids, _ in shared], [len(same) for _, same in shared]

    def leave(self, state: Decode, left: list[int]) -> None:
        """Keep the rows that are done. A row has grown by a place in each step since."""
        rows, held, width = state.rows.tolist(), (state.positions + 1).tolist(), state.real.shape[1]
        done = [place for place, row in enumerate(rows) if row not in left]
        cache = state.cache.copied(torch.tensor(done, device=state.rows.device)) if left else state.cache
        for index, place in enumerate(done):
            request = self.requests[rows[place]]
            rollout = self.finished.rollouts[rows[place]][0]
            completion = rollout.completion_ids
            ids = request.ids + completion[:-1]
            end = width - (held[place] - len(ids))
            self.kept.rows[request.key] = Kept(ids, cache, index if left else place, end, rollout.routes)
        self.kept.trim(self.room - len(left))

    def shed(self) -> int:
        return self.kept.shed()

    @property
    def kept_bytes(self) -> int:
        return self.kept.nbytes
