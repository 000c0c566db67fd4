"""What a call of the transformers engine has drawn so far, and the rows that it decodes together."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, Request
from lowmem_grpo.engines.kv_cache import CacheSlice, GrowingCache, right_aligned
from lowmem_grpo.engines.prefix_cache import Continuation, KeptPrefix, PrefixCache, fed_together
from lowmem_grpo.engines.progress import FinishedPrompts
from lowmem_grpo.models.routes import Routes
from lowmem_grpo.types import Rollout

STEPS = 256  # places whose random numbers are made at once
HELD = 4  # such blocks that are held; one that was dropped is made again, and is the same

Uniforms = Callable[[Tensor, Tensor], Tensor]  # numbers of rows (B,) at places (B, S): (B, S) fp64 from [0, 1)


class RandomNumbers:
    """Numbers from [0, 1) that depend on a seed, the row and the place, and on nothing that happened before. So a
    completion is the same however its row was batched or interrupted."""

    def __init__(self, seed: int, rows: int, device: torch.device, part: tuple[int, int] | None = None) -> None:
        """`part` (F, N) says that these are the rows from F on of N; their numbers are as in a call with all N."""
        self.seed, self.rows, self.device = seed, rows, device
        self.first, self.whole = part or (0, rows)
        self.blocks: dict[int, Tensor] = {}  # (R, STEPS) each, of all rows at the places of a block

    def at(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return those of rows (B,) at places (B, S): (B, S) fp64."""
        numbers = torch.zeros(places.shape, dtype=torch.float64, device=self.device)
        for index in (places // STEPS).unique().tolist():
            here = self.block(index)[rows[:, None], places % STEPS]
            numbers = torch.where(places // STEPS == index, here, numbers)
        return numbers

    def block(self, index: int) -> Tensor:
        """Return the numbers of a block, made again where it was dropped."""
        if index not in self.blocks:
            seed = random.Random(f"{self.seed}-{index}").getrandbits(62)
            generator = torch.Generator(self.device).manual_seed(seed)
            made = torch.rand(self.whole, STEPS, dtype=torch.float64, device=self.device, generator=generator)
            self.blocks[index] = made[self.first : self.first + self.rows]
        if len(self.blocks) > HELD:
            del self.blocks[next(iter(self.blocks))]
        return self.blocks[index]


def own_numbers(seeds: list[int], width: int, device: torch.device) -> Uniforms:
    """Return `width` numbers of each row that follow from its own seed."""
    table = torch.zeros(len(seeds), width, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        table[row].uniform_(generator=torch.Generator().manual_seed(seed))
    table = table.to(device)
    return lambda rows, places: table[rows[:, None], places]


@dataclass
class PartialRows:
    """Rows with `start` tokens drawn, which grows while they are decoded: what can be resumed after an error."""

    rows: list[int]
    start: int = 0


@dataclass
class DecodeState:
    """B rows that are decoded together. `real` marks the cache places that hold a token, not left padding."""

    cache: GrowingCache
    rows: Tensor  # (B,) which output row
    counts: Tensor  # (B,) tokens drawn
    tokens: Tensor  # (B,) the last token drawn
    alive: Tensor  # (B,) bool
    real: Tensor  # (B, L) bool
    positions: Tensor  # (B,) of the last token in the cache
    routes: Tensor | None = None  # (B, S, layers, k) of the tokens fed last, where the model has experts

    @classmethod
    def holding(cls, rows: Tensor, cache: GrowingCache | None = None, held: Tensor | None = None) -> "DecodeState":
        """Rows before their first token, whose caches hold `held` tokens (B,), which end at the right edge."""
        held = torch.zeros_like(rows) if held is None else held
        width = 0 if cache is None else cache.get_seq_length()
        real = torch.arange(width, device=rows.device) >= width - held[:, None]
        alive = torch.ones_like(rows, dtype=torch.bool)
        return cls(cache or GrowingCache(), rows, torch.zeros_like(rows), rows, alive, real, held - 1)

    @classmethod
    def joined(cls, states: list["DecodeState"]) -> "DecodeState":
        """The rows of all states in one, none of which is done; the states give their caches away. Empty places on the
        left are left out, and there is room for some steps."""
        if len(states) == 1:
            return states[0]
        lengths = [state.real.shape[1] for state in states]
        widths = [int(state.positions.max()) + 1 for state in states]
        pieces = [CacheSlice(state.cache, slice(0, len(state.rows)), length - width, length)
                  for state, length, width in zip(states, lengths, widths, strict=True)]
        most = max(widths)
        real = [F.pad(state.real[:, length - width :], (most - width, 0))
                for state, length, width in zip(states, lengths, widths, strict=True)]
        cache = right_aligned(pieces, most, most // 8, give=True)
        parts = [(state.rows, state.counts, state.tokens, state.alive) for state in states]
        rows, counts, tokens, alive = (torch.cat(same) for same in zip(*parts, strict=True))
        positions = torch.cat([state.positions for state in states])
        return cls(cache, rows, counts, tokens, alive, torch.cat(real), positions)

    def trim(self) -> None:
        """Leave out the places on the left that no unfinished row has."""
        width, rows = self.real.shape[1], slice(0, len(self.rows))
        held = int(self.positions.where(self.alive, 0).max()) + 1
        self.cache = right_aligned([CacheSlice(self.cache, rows, width - held, width)], held, give=True)
        self.real = self.real[:, width - held :]

    def select(self, keep: Tensor) -> None:
        """Keep only these rows (R,), or repeat them."""
        self.cache.batch_select_indices(keep)
        self.rows, self.counts, self.tokens = self.rows[keep], self.counts[keep], self.tokens[keep]
        self.alive, self.real, self.positions = self.alive[keep], self.real[keep], self.positions[keep]


@dataclass
class GenerationState:
    """The tokens that a call has drawn so far: R = prompts * n rows of at most C tokens. In a round of turns each row
    is a turn, whose keys and values are kept for the next turn of its episode."""

    prompts: list[list[int]]
    params: SamplingParams
    numbers: Uniforms
    budgets: Tensor  # (R,)
    finished: FinishedPrompts
    owners: list[int]  # (R,) the prompts that are computed for the rows
    requests: list[Request] = field(default_factory=list)  # the turns of a round, one for each row
    kept: PrefixCache = field(default_factory=PrefixCache)
    room: int = 0  # rows that may be in memory together, the kept ones among them
    prompt_routes: dict[int, Routes] = field(default_factory=dict)  # by row, where the model has experts
    routes: Tensor | None = None  # (R, C, layers, k) of the drawn tokens that ran; made when the first of them has

    def __post_init__(self) -> None:
        rows, width, device = len(self.budgets), int(self.budgets.max()) + 1, self.budgets.device
        # the last place is written where others go on, and never read
        self.ids = torch.zeros(rows, width, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, width, device=device)
        self.lengths = self.budgets.clone()  # (R,) of the completion, or its budget until it is finished
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.unfinished = [self.params.n] * len(self.prompts)  # rows of each prompt
        self.cached = [0] * rows  # tokens of each row's prompt that were not computed

    @property
    def widest(self) -> int:
        return max(map(len, self.prompts)) + self.ids.shape[1]

    @classmethod
    def from_prompts(cls, prompts: list[list[int]], params: SamplingParams, budgets: list[int], device: torch.device,
                     finished: FinishedPrompts) -> "GenerationState":
        """`params.n` rows of each prompt, before the first token."""
        seed = time.time_ns() % 2**63 if params.seed is None else params.seed
        part = None if params.part is None else (params.part[0] * params.n, params.part[1] * params.n)
        numbers = RandomNumbers(seed, len(budgets), device, part).at
        owners = [prompt for prompt in range(len(prompts)) for _ in range(params.n)]
        return cls(prompts, params, numbers, torch.tensor(budgets, device=device), finished, owners)

    @classmethod
    def from_turns(cls, requests: list[Request], params: SamplingParams, budgets: list[int], device: torch.device,
                   conversation: Conversation, kept: PrefixCache, room: int) -> "GenerationState":
        """One row of each turn of a round, before the first token. A turn is given back as soon as it is drawn, and its
        numbers follow from its own seed."""
        assert len({request.key for request in requests}) == len(requests), "one turn of a key at a time"

        def give(row: int, rollouts: list[Rollout]) -> None:
            rollouts[0].cached_tokens = state.cached[row]
            with finished.outside_the_engine():
                conversation.add_rollout(requests[row].key, rollouts[0])

        finished, first = FinishedPrompts(len(requests), give), dict[tuple[int, ...], int]()
        owners = [first.setdefault(tuple(request.ids), row) for row, request in enumerate(requests)]
        numbers = own_numbers([request.seed for request in requests], max(budgets) + 1, device)
        state = cls([request.ids for request in requests], replace(params, n=1), numbers,
                    torch.tensor(budgets, device=device), finished, owners, requests, kept, room)
        return state

    # Prompts

    def continuations(self, rows: list[int], running: int) -> list[Continuation]:
        """Return the rows whose first tokens are held from earlier turns, beside so many rows that run."""
        if not self.requests:
            return []
        prefixes = {row: kept for row in rows if (kept := self.kept.rows.pop(self.requests[row].key, None)) is not None}
        self.kept.trim(self.room - running - len(rows))
        held = {row: kept.shared(self.prompts[row]) for row, kept in prefixes.items()}
        new = {row: len(self.prompts[row]) - shared for row, shared in held.items() if shared}
        exactly = any(kept.cache.whole_only for kept in prefixes.values())
        made = [Continuation(together, [self.prompts[row] for row in together], [prefixes[row] for row in together],
                             new[together[0]]) for together in fed_together(new, exactly)]
        cached = {row: count for more in made for row, count in zip(more.rows, more.held, strict=True)}
        for row in rows:
            self.cached[row] = cached.get(row, 0)
        return made

    def prompts_of(self, rows: list[int]) -> tuple[list[list[int]], list[int]]:
        """Return the prompts to compute for some rows, and how many of the rows belong to each."""
        shared = [(owner, [*same]) for owner, same in groupby(rows, key=self.owners.__getitem__)]
        for owner, same in shared:
            for row in same[1:]:
                self.cached[row] = len(self.prompts[owner])
        return [self.prompts[owner] for owner, _ in shared], [len(same) for _, same in shared]

    # Routes of a mixture of experts

    def keep_prompt_routes(self, rows: list[int], prompts: list[list[int]], counts: list[int],
                           fed: Tensor | None) -> None:
        """Keep the routes of prompts: `fed` (P, S, layers, k), which end at the right edge."""
        if fed is None:
            return
        left, host = iter(rows), fed.cpu()
        for own, prompt, count in zip(host, prompts, counts, strict=True):
            new = dict.fromkeys(islice(left, count), Routes((own[-len(prompt) :].clone(),)))
            self.prompt_routes = new | self.prompt_routes  # rows that are resumed keep those of their first pass

    def keep_continued_routes(self, more: Continuation, fed: Tensor | None) -> None:
        """Keep the routes of prompts whose first tokens were held; of each, the last tokens were `fed`."""
        if fed is None:
            return
        rows = zip(more.rows, more.prompts, more.kept, more.held, fed.cpu(), strict=True)
        for row, prompt, kept, held, own in rows:
            assert kept.routes is not None, "what is held of a mixture was recorded"
            again = Routes((*kept.routes.cut(0, held).parts, own[held - len(prompt) :].clone()))
            self.prompt_routes[row] = kept.routes.cut(0, kept.shared(prompt)).then(again)

    def keep_routes(self, rows: Tensor, places: int | Tensor, fed: Tensor | None) -> None:
        """Keep the routes of the tokens drawn at places: the last of `fed` (B, S, layers, k)."""
        if fed is None:
            return
        if self.routes is None:
            self.routes = fed.new_zeros(*self.ids.shape, *fed.shape[2:])
        self.routes[rows, places] = fed[:, -1]

    def give_routes(self, rows: list[int], rollouts: list[Rollout]) -> None:
        """Give the rollouts of these rows theirs: of the prompt, and of all tokens but the last, which did not run."""
        if not self.prompt_routes:
            return
        for row, rollout in zip(rows, rollouts, strict=True):
            ran = len(rollout.completion_ids) - 1
            own = (self.routes[row, :ran].clone().cpu(),) if self.routes is not None and ran else ()
            rollout.routes = Routes((*self.prompt_routes[row].parts, *own))

    # Rows that are done

    def finish_rows(self, rows: set[int]) -> list[int]:
        """Count rows as finished; returns the prompts that are finished now, because all of their rows are."""
        finished: list[int] = []
        for prompt in sorted(row // self.params.n for row in rows):
            self.unfinished[prompt] -= 1
            finished += [] if self.unfinished[prompt] else [prompt]
        return finished

    def reopen_rows(self, rows: list[int]) -> None:
        """Undo what an interrupted step may have written about unfinished rows."""
        at = torch.tensor(rows, device=self.ids.device)
        self.lengths[at], self.stopped[at] = self.budgets[at], False

    def keep_prefixes(self, state: DecodeState) -> None:
        """Keep what a batch holds of turns that are done. Their rows have grown by a place in each step since."""
        if not self.requests:
            return
        rows, held, width = state.rows.tolist(), (state.positions + 1).tolist(), state.real.shape[1]
        done = [place for place, alive in enumerate(state.alive.tolist()) if not alive]
        left = len(rows) - len(done)
        cache = state.cache.copied(torch.tensor(done, device=state.rows.device)) if left else state.cache
        for index, place in enumerate(done):
            rollout = self.finished.rollouts[rows[place]][0]
            ids = self.prompts[rows[place]] + rollout.completion_ids[:-1]
            end = width - (held[place] - len(ids))
            prefix = KeptPrefix(ids, cache, index if left else place, end, rollout.routes)
            self.kept.rows[self.requests[rows[place]].key] = prefix
        self.kept.trim(self.room - left)
