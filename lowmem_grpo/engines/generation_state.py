"""The tokens that a call of the transformers engine has drawn so far, and the state of the rows it decodes together."""

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

STEPS = 256  # positions per block of random numbers
HELD = 4  # blocks held; a dropped block is regenerated with the same numbers

Uniforms = Callable[[Tensor, Tensor], Tensor]  # (rows (B,), positions (B, S)) -> (B, S) fp64 from [0, 1)


class RandomNumbers:
    """Numbers from [0, 1) that depend only on a seed, the row and the position, so that a completion is the same
    however its row was batched or interrupted."""

    def __init__(self, seed: int, rows: int, device: torch.device, part: tuple[int, int] | None = None) -> None:
        """`part` (F, N) means that these are the rows from F on out of N: they get the numbers that a call with all N
        rows would give them."""
        self.seed, self.rows, self.device = seed, rows, device
        self.first, self.whole = part or (0, rows)
        self.blocks: dict[int, Tensor] = {}  # (R, STEPS) each: all rows at the positions of a block

    def at(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return the numbers of rows (B,) at positions (B, S): (B, S) fp64."""
        numbers = torch.zeros(places.shape, dtype=torch.float64, device=self.device)
        for index in (places // STEPS).unique().tolist():
            here = self.block(index)[rows[:, None], places % STEPS]
            numbers = torch.where(places // STEPS == index, here, numbers)
        return numbers

    def block(self, index: int) -> Tensor:
        """Return a block (R, STEPS), regenerating it if it was dropped."""
        if index not in self.blocks:
            seed = random.Random(f"{self.seed}-{index}").getrandbits(62)
            generator = torch.Generator(self.device).manual_seed(seed)
            made = torch.rand(self.whole, STEPS, dtype=torch.float64, device=self.device, generator=generator)
            self.blocks[index] = made[self.first : self.first + self.rows]
        if len(self.blocks) > HELD:
            del self.blocks[next(iter(self.blocks))]
        return self.blocks[index]


def own_numbers(seeds: list[int], width: int, device: torch.device) -> Uniforms:
    """Return random numbers of `width` positions per row, each row with its own seed."""
    table = torch.zeros(len(seeds), width, dtype=torch.float64)
    for row, seed in enumerate(seeds):
        table[row].uniform_(generator=torch.Generator().manual_seed(seed))
    table = table.to(device)
    return lambda rows, places: table[rows[:, None], places]


@dataclass
class PartialRows:
    """Rows that have drawn `start` tokens so far, from which they can resume after an error."""

    rows: list[int]
    start: int = 0


@dataclass
class DecodeState:
    """The state of B rows that are decoded together, with a left-padded cache of L places."""

    cache: GrowingCache
    rows: Tensor  # (B,) index of the row in the call
    counts: Tensor  # (B,) tokens drawn
    tokens: Tensor  # (B,) the last token drawn
    alive: Tensor  # (B,) bool, False for finished rows
    real: Tensor  # (B, L) bool, False for cache places with padding
    positions: Tensor  # (B,) position id of the last token in the cache
    routes: Tensor | None = None  # (B, S, layers, k) experts chosen for the tokens fed last; None without experts

    @classmethod
    def holding(cls, rows: Tensor, cache: GrowingCache | None = None, held: Tensor | None = None) -> "DecodeState":
        """Return the state of rows that have drawn nothing yet; their caches hold `held` tokens (B,), right-aligned."""
        held = torch.zeros_like(rows) if held is None else held
        width = 0 if cache is None else cache.get_seq_length()
        real = torch.arange(width, device=rows.device) >= width - held[:, None]
        alive = torch.ones_like(rows, dtype=torch.bool)
        return cls(cache or GrowingCache(), rows, torch.zeros_like(rows), rows, alive, real, held - 1)

    @classmethod
    def joined(cls, states: list["DecodeState"]) -> "DecodeState":
        """Return one state with the rows of all states, which must be unfinished and lose their caches. Places on the
        left that are padding in every row are dropped, and room for some decode steps is added."""
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
        """Drop the cache places on the left that are padding in every unfinished row."""
        width, rows = self.real.shape[1], slice(0, len(self.rows))
        held = int(self.positions.where(self.alive, 0).max()) + 1
        self.cache = right_aligned([CacheSlice(self.cache, rows, width - held, width)], held, give=True)
        self.real = self.real[:, width - held :]

    def select(self, keep: Tensor) -> None:
        """Reduce the state to these rows (R,), which may repeat."""
        self.cache.batch_select_indices(keep)
        self.rows, self.counts, self.tokens = self.rows[keep], self.counts[keep], self.tokens[keep]
        self.alive, self.real, self.positions = self.alive[keep], self.real[keep], self.positions[keep]


@dataclass
class GenerationState:
    """The tokens that a call has drawn so far: R = prompts * n rows of at most C tokens. In a round of turns each row
    is a turn, whose KV cache is kept for the next turn of its episode."""

    prompts: list[list[int]]
    params: SamplingParams
    numbers: Uniforms
    budgets: Tensor  # (R,)
    finished: FinishedPrompts
    owners: list[int]  # (R,) index of the prompt to prefill for each row; rows with equal prompts share one
    requests: list[Request] = field(default_factory=list)  # the turns of a round, one per row; empty in `generate`
    kept: PrefixCache = field(default_factory=PrefixCache)
    room: int = 0  # rows that may be in memory together, kept ones included
    prompt_routes: dict[int, Routes] = field(default_factory=dict)  # by row, if the model has experts
    routes: Tensor | None = None  # (R, C, layers, k) of the drawn tokens that were fed; allocated at the first of them

    def __post_init__(self) -> None:
        rows, width, device = len(self.budgets), int(self.budgets.max()) + 1, self.budgets.device
        # rows that are done write to the last place while others go on; it is never read
        self.ids = torch.zeros(rows, width, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, width, device=device)
        self.lengths = self.budgets.clone()  # (R,) tokens of the completion; its budget until it is finished
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.unfinished = [self.params.n] * len(self.prompts)  # unfinished rows per prompt
        self.cached = [0] * rows  # prompt tokens of each row that came from a cache

    @property
    def widest(self) -> int:
        return max(map(len, self.prompts)) + self.ids.shape[1]

    @classmethod
    def from_prompts(cls, prompts: list[list[int]], params: SamplingParams, budgets: list[int], device: torch.device,
                     finished: FinishedPrompts) -> "GenerationState":
        """Return the state of `params.n` rows per prompt, before the first token."""
        seed = time.time_ns() % 2**63 if params.seed is None else params.seed
        part = None if params.part is None else (params.part[0] * params.n, params.part[1] * params.n)
        numbers = RandomNumbers(seed, len(budgets), device, part).at
        owners = [prompt for prompt in range(len(prompts)) for _ in range(params.n)]
        return cls(prompts, params, numbers, torch.tensor(budgets, device=device), finished, owners)

    @classmethod
    def from_turns(cls, requests: list[Request], params: SamplingParams, budgets: list[int], device: torch.device,
                   conversation: Conversation, kept: PrefixCache, room: int) -> "GenerationState":
        """Return the state of a round of turns, one row each, before the first token. Each turn uses its own seed, and
        is passed to the conversation as soon as it is finished."""
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
        """Return those of `rows` whose prompts extend kept turns, grouped by tokens to feed. Takes these turns out of
        the prefix cache, and trims it to the room that is left beside `running` rows."""
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
        """Return the prompts to prefill for these rows, and the number of rows that share each."""
        shared = [(owner, [*same]) for owner, same in groupby(rows, key=self.owners.__getitem__)]
        for owner, same in shared:
            for row in same[1:]:
                self.cached[row] = len(self.prompts[owner])
        return [self.prompts[owner] for owner, _ in shared], [len(same) for _, same in shared]

    # Routes of a mixture of experts

    def keep_prompt_routes(self, rows: list[int], prompts: list[list[int]], counts: list[int],
                           fed: Tensor | None) -> None:
        """Record the routes of prompts: `fed` (P, S, layers, k), right-aligned; None without experts."""
        if fed is None:
            return
        left, host = iter(rows), fed.cpu()
        for own, prompt, count in zip(host, prompts, counts, strict=True):
            new = dict.fromkeys(islice(left, count), Routes((own[-len(prompt) :].clone(),)))
            self.prompt_routes = new | self.prompt_routes  # resumed rows keep the routes of their first pass

    def keep_continued_routes(self, more: Continuation, fed: Tensor | None) -> None:
        """Record the routes of prompts that extend kept turns: kept routes, then those of the tokens just `fed`."""
        if fed is None:
            return
        rows = zip(more.rows, more.prompts, more.kept, more.held, fed.cpu(), strict=True)
        for row, prompt, kept, held, own in rows:
            assert kept.routes is not None, "what is held of a mixture was recorded"
            again = Routes((*kept.routes.cut(0, held).parts, own[held - len(prompt) :].clone()))
            self.prompt_routes[row] = kept.routes.cut(0, kept.shared(prompt)).then(again)

    def keep_routes(self, rows: Tensor, places: int | Tensor, fed: Tensor | None) -> None:
        """Record the routes of the tokens drawn at `places`: the last position of `fed` (B, S, layers, k)."""
        if fed is None:
            return
        if self.routes is None:
            self.routes = fed.new_zeros(*self.ids.shape, *fed.shape[2:])
        self.routes[rows, places] = fed[:, -1]

    def give_routes(self, rows: list[int], rollouts: list[Rollout]) -> None:
        """Attach routes to these rows' rollouts: of the prompt and of all tokens but the last, which was not fed."""
        if not self.prompt_routes:
            return
        for row, rollout in zip(rows, rollouts, strict=True):
            ran = len(rollout.completion_ids) - 1
            own = (self.routes[row, :ran].clone().cpu(),) if self.routes is not None and ran else ()
            rollout.routes = Routes((*self.prompt_routes[row].parts, *own))

    # Finished rows

    def finish_rows(self, rows: set[int]) -> list[int]:
        """Count rows as finished; returns the prompts all of whose rows are now finished."""
        finished: list[int] = []
        for prompt in sorted(row // self.params.n for row in rows):
            self.unfinished[prompt] -= 1
            finished += [] if self.unfinished[prompt] else [prompt]
        return finished

    def reopen_rows(self, rows: list[int]) -> None:
        """Reset the length and stop flag of unfinished rows, which an interrupted step may have written."""
        at = torch.tensor(rows, device=self.ids.device)
        self.lengths[at], self.stopped[at] = self.budgets[at], False

    def keep_prefixes(self, state: DecodeState) -> None:
        """Keep the KV cache of a batch's finished turns. Each has grown by one unused place per step since its end."""
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
