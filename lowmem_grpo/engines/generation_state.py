"""The tokens that a call of the transformers engine has sampled, and the KV cache of an episode's last turn.

The next turn of the episode reuses that cache, and computes only the tokens after it. Rows that are computed together
are fed the same number of tokens, so that each row is contiguous in the cache. A row with fewer new tokens therefore
recomputes some of its cached ones.

The state of a gated delta net cannot go back to an earlier token. So if a prompt does not continue its cached turn
exactly, the whole prompt is computed.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, FinishedPrompts, Request
from lowmem_grpo.engines.decoding import Uniforms, cut_at_stop, own_numbers
from lowmem_grpo.engines.kv_cache import CacheSlice, GrowingCache, right_aligned
from lowmem_grpo.models.routes import Routes
from lowmem_grpo.types import Rollout

TWICE, FEW = 0.1, 16  # limit on tokens recomputed in a pass: TWICE times its new tokens, or FEW if that is more


@dataclass(frozen=True)
class KeptPrefix:
    """The cached prefix of one episode."""

    ids: list[int]  # the cached tokens
    held: CacheSlice  # their places, in one row of a cache
    routes: Routes | None = None  # None if the model has no experts

    def shared(self, ids: list[int]) -> int:
        """Return how many leading prompt tokens are cached, never counting the last one, which must be fed."""
        most = min(len(self.ids), len(ids) - 1)
        if self.held.cache.whole_only:
            return most if self.ids == ids[:most] else 0
        if self.ids[:most] == ids[:most]:
            return most
        return next(place for place in range(most) if self.ids[place] != ids[place])


@dataclass(frozen=True)
class Prefill:
    """P prompts that are computed together; the last `fed` tokens of each prompt are fed to the model."""

    rows: list[list[int]]  # (P,) the rows that share each prompt
    prompts: list[list[int]]
    kept: list[KeptPrefix]  # (P,), or empty if no prompt extends a cached turn
    fed: int

    @property
    def held(self) -> list[int]:
        """The number of tokens (P,) of each prompt that are taken from the cache."""
        return [max(0, len(ids) - self.fed) for ids in self.prompts]

    def inputs(self, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens to feed (P, fed), left-padded, and a mask (P, fed) that is True for real tokens."""
        rows = [ids[-self.fed :] for ids in self.prompts]
        ids = torch.tensor([[pad_id] * (self.fed - len(row)) + row for row in rows])
        real = torch.arange(-self.fed, 0) >= -torch.tensor([*map(len, rows)])[:, None]
        return ids.to(device), real.to(device)

    def held_cache(self) -> GrowingCache | None:
        """Return a cache of the `held` tokens, with room for `fed` more; None if no prompt extends a cached turn."""
        if not self.kept:
            return None
        pieces = [replace(kept.held, end=kept.held.start + held)
                  for kept, held in zip(self.kept, self.held, strict=True)]
        return right_aligned(pieces, max(self.held), room=self.fed)


@dataclass
class PrefixCache:
    """The cached prefixes of episodes, by episode key, oldest first."""

    rows: dict[int, KeptPrefix] = field(default_factory=dict)
    most: int | None = None  # the most rows to keep, set when memory runs out; None for no limit
    awaited: Callable[[], set[int]] = set  # the keys of the turns that were interrupted and will go on

    def trim(self, room: int) -> None:
        """Drop the oldest prefixes, those of interrupted turns last, until at most `room` others are left. Once memory
        ran out, at most `self.most` are left, and at most `room` with those of interrupted turns."""
        awaited = self.awaited() & self.rows.keys()
        most = room + len(awaited) if self.most is None else min(room, self.most)
        for key in sorted(self.rows, key=awaited.__contains__)[: max(0, len(self.rows) - most)]:
            del self.rows[key]

    def evict(self) -> int:
        """Drop all prefixes as memory ran out, and from now on keep at most half as many. Return the number dropped."""
        count = len(self.rows)
        if count:
            self.most = count // 2
        self.rows.clear()
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the caches. Prefixes that left a batch together share a cache, which is freed with the last one."""
        return sum(cache.nbytes for cache in {kept.held.cache for kept in self.rows.values()})


def fed_together(new: dict[int, int], exactly: bool = False) -> list[list[int]]:
    """Group rows to be computed in one pass, given the number of `new` (uncached) tokens of each row. All rows of a
    group are fed as many tokens as its first row (the most). With `exactly`, no row recomputes cached tokens."""
    lists: list[list[int]] = []
    again = total = 0
    for row in sorted(new, key=lambda row: -new[row]):
        again += new[lists[-1][0]] - new[row] if lists else 0
        total += new[row]
        if not lists or again > (0 if exactly else max(TWICE * total, FEW)):
            lists.append([])
            again, total = 0, new[row]
        lists[-1].append(row)
    return lists


@dataclass
class GenerationState:
    """The tokens that a call has sampled so far: R = prompts * n rows of at most C tokens. In a call for turns, each
    row is a turn, whose KV cache is kept for the next turn of its episode."""

    prompts: list[list[int]]
    params: SamplingParams
    numbers: Uniforms
    budgets: Tensor  # (R,)
    finished: FinishedPrompts
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
        self.drawn = [0] * rows  # tokens of each row that are known to be drawn, from which it can resume
        self.cached = [0] * rows  # prompt tokens of each row that came from a cache
        self.begun = [0] * rows  # tokens that an earlier request had drawn, which are read with the prompt
        self.routed = [0] * rows  # drawn tokens whose routes are among those of the prompt
        for row, request in enumerate(self.requests):
            if request.begun is not None:
                self.take_begun(row, request.begun)
        # tokens passed to `on_tokens`, by row, of the turns whose requests have it
        self.told = {row: self.drawn[row] for row, request in enumerate(self.requests) if request.on_tokens is not None}

    def take_begun(self, row: int, begun: Rollout) -> None:
        count, device = len(begun.completion_ids), self.ids.device
        self.begun[row] = self.drawn[row] = self.routed[row] = count
        self.ids[row, :count] = torch.tensor(begun.completion_ids, device=device)
        self.logprobs[row, :count] = torch.tensor(begun.rollout_logprobs, device=device)

    def resumed(self, row: int) -> int:
        """Return the number of drawn tokens that are read behind a row's prompt: those of this call, and those of
        an earlier request whose KV cache is gone, because turns of equal prompts then share the reading of it."""
        if self.begun[row] and self.requests[row].key not in self.kept.rows:
            request, begun = self.requests[row], self.requests[row].begun
            self.prompts[row], self.begun[row] = request.ids, 0
            if begun is not None and begun.routes is not None and row not in self.prompt_routes:
                self.prompt_routes[row], self.routed[row] = begun.routes, len(begun.completion_ids) - 1
        return self.drawn[row] - self.begun[row]

    @classmethod
    def from_turns(cls, requests: list[Request], params: SamplingParams, budgets: list[int], device: torch.device,
                   conversation: Conversation, kept: PrefixCache, room: int) -> "GenerationState":
        """Return the state of a round: one row and seed per turn. `conversation` gets each turn as it ends."""
        assert len({request.key for request in requests}) == len(requests), "one turn of a key at a time"

        def give(row: int, rollouts: list[Rollout]) -> None:
            begun = requests[row].begun
            rollouts[0].cached_tokens = state.cached[row] if begun is None else begun.cached_tokens
            with finished.outside_the_engine():
                conversation.add_rollout(requests[row].key, rollouts[0])

        finished = FinishedPrompts(len(requests), give)
        numbers = own_numbers([request.seed for request in requests], max(budgets) + 1, device)
        prompts = [request.ids + ([] if request.begun is None else request.begun.completion_ids)
                   for request in requests]
        state = cls(prompts, replace(params, n=1), numbers,
                    torch.tensor(budgets, device=device), finished, requests, kept, room)
        return state

    # Prompts

    def prefills(self, rows: list[int], running: int) -> list[Prefill]:
        """Return the prompts of these rows, grouped by the number of tokens to feed: first prompts that extend a cached
        turn, then each other prompt once. The cached turns that are used leave `kept`. The oldest that stay
        in `kept` are dropped if memory has no room for them beside these rows and the `running` rows."""
        prefixes = {row: kept for row in rows if self.requests
                    if (kept := self.kept.rows.pop(self.requests[row].key, None)) is not None}
        self.kept.trim(self.room - running - len(rows))
        new = {row: len(self.prompts[row]) - shared for row, kept in prefixes.items()
               if (shared := kept.shared(self.prompts[row]))}
        groups = fed_together(new, any(kept.held.cache.whole_only for kept in prefixes.values()))
        made = [Prefill([[row] for row in group], [self.prompts[row] for row in group],
                        [prefixes[row] for row in group], new[group[0]]) for group in groups]
        if fresh := [row for row in rows if row not in new]:
            sharing = defaultdict[tuple[int, ...], list[int]](list)
            for row in fresh:
                sharing[tuple(self.prompts[row // self.params.n])].append(row)
            prompts = [self.prompts[same[0] // self.params.n] for same in sharing.values()]
            made.append(Prefill([*sharing.values()], prompts, [], max(map(len, prompts))))
        for prefill in made:
            for same, prompt, held in zip(prefill.rows, prefill.prompts, prefill.held, strict=True):
                for row in same:
                    self.cached[row] = held if row == same[0] else len(prompt)
        return made

    # Routes of a mixture of experts

    def keep_prompt_routes(self, prefill: Prefill, fed: Tensor | None) -> None:
        """Record the routes (chosen experts) of each prompt: those of its cached tokens, followed by those of the
        tokens just `fed` (P, S, layers, k), right-aligned. For a model without experts `fed` is None."""
        if fed is None:
            return
        for place, (prompt, held, own) in enumerate(zip(prefill.prompts, prefill.held, fed.cpu(), strict=True)):
            routes = Routes((own[held - len(prompt) :].clone(),))
            if prefill.kept:
                kept = prefill.kept[place]
                assert kept.routes is not None, "what is held of a mixture was recorded"
                again = Routes((*kept.routes.cut(0, held).parts, *routes.parts))
                routes = kept.routes.cut(0, kept.shared(prompt)).then(again)
            for row in prefill.rows[place]:
                self.prompt_routes.setdefault(row, routes)  # resumed rows keep the routes of their first pass

    def keep_routes(self, rows: Tensor, counts: Tensor, fed: Tensor | None) -> None:
        """Record the routes (chosen experts) of each row's last sampled token, the last in `fed` (B, S, layers, k).
        `counts` (B,) is the number of tokens that each row has sampled. For a model without experts `fed` is None."""
        if fed is None:
            return
        if self.routes is None:
            self.routes = fed.new_zeros(*self.ids.shape, *fed.shape[2:])
        self.routes[rows, counts - 1] = fed[:, -1]

    def routes_of(self, row: int, ran: int) -> Routes | None:
        """Return the routes (chosen experts) of a row's prompt and first `ran` sampled tokens; None without experts."""
        if not self.prompt_routes:
            return None
        own = (self.routes[row, self.routed[row] : ran].clone().cpu(),) if self.routes is not None and ran else ()
        return Routes((*self.prompt_routes[row].parts, *own))

    # Rows whose requests have `on_tokens`

    def tell(self, rows: list[int]) -> list[int]:
        """Pass the new tokens of `rows`, as far as they are known, to `on_tokens`. Return the rows that shall end."""
        rows = [row for row in rows if self.told.get(row, self.drawn[row]) < self.drawn[row]]
        if not rows:
            return []
        at, told = (torch.tensor(numbers, device=self.ids.device)[:, None]
                    for numbers in (rows, [self.told[row] for row in rows]))
        most = max(self.drawn[row] - self.told[row] for row in rows)
        places = (told + torch.arange(most, device=told.device)).clamp(max=self.ids.shape[1] - 1)
        ids, logprobs, ended = self.ids[at, places].tolist(), self.logprobs[at, places].tolist(), list[int]()
        for row, new, likely in zip(rows, ids, logprobs, strict=True):
            count, on_tokens = self.drawn[row] - self.told[row], self.requests[row].on_tokens
            self.told[row] = self.drawn[row]
            with self.finished.outside_the_engine():
                if on_tokens is not None and not on_tokens(new[:count], likely[:count]):
                    ended.append(row)
        return ended

    # Finished rows

    def rollouts(self, rows: list[int], tokenizer: PreTrainedTokenizerBase, policy_version: int) -> list[Rollout]:
        """Copy finished rows to the host and return their rollouts; RuntimeError for NaN log-probabilities."""
        parts, at = (self.ids, self.logprobs, self.lengths, self.stopped), torch.tensor(rows, device=self.ids.device)
        ids, logprobs, lengths, stopped = (part[at].cpu() for part in parts)
        if logprobs.isnan().any():
            raise RuntimeError("the model gave NaN logits: load it in bfloat16 or float32, and check the learning rate")
        completions = [drawn[:length].tolist() for drawn, length in zip(ids, lengths.tolist(), strict=True)]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=self.params.skip_special_tokens)
        return [
            Rollout(drawn, row_logprobs[: len(drawn)].tolist(), "stop" if stop else "length",
                    cut_at_stop(text, self.params), policy_version, routes=self.routes_of(row, len(drawn) - 1))
            for row, drawn, row_logprobs, stop, text in zip(rows, completions, logprobs, stopped.tolist(), texts,
                                                            strict=True)
        ]
