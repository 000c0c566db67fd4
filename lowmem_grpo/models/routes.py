"""Routes: the experts that each token used in each layer of a mixture, recorded by the sampler, replayed in training.

A rounding difference in a router can select another expert. Only the choice is replayed: gates are computed by the live
router, and gradients flow through them. So routing makes no log-probability or gradient depend on how tokens are split
or packed (R3, arXiv 2510.11370, measured the effect of not replaying).

The last sampled token was never an input: it has no route and needs none. A model takes routes through the keyword
`routes` of its backbone: hooks on its decoder layers pass it to the experts, even when a checkpointed layer is rerun.
"""

import base64
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.models.experts import RoutedBlock
from lowmem_grpo.types import MicroBatch, Rollout, Split, Turn

logger = logging.getLogger(__name__)

SMALL = 256  # most experts whose ids fit in one byte
NAMES = {torch.uint8: "uint8", torch.int16: "int16"}


def dtype_of(experts: int) -> torch.dtype:
    return torch.uint8 if experts <= SMALL else torch.int16


@dataclass(frozen=True, eq=False)
class Routes:
    """The expert ids (T, layers, k) of T tokens in order, on the host, as parts along T. `layers` counts only layers
    with experts. The completions of one prompt share the prompt's part."""

    parts: tuple[Tensor, ...]  # (tokens, layers, k) uint8, or int16 above 256 experts

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def cut(self, start: int, end: int | None = None) -> "Routes":
        """Return the routes of the tokens from `start` to `end`, as views of the same memory."""
        kept, before = [], 0
        for part in self.parts:
            low, high = max(start - before, 0), len(part) if end is None else min(end - before, len(part))
            if low < high:
                kept.append(part[low:high])
            before += len(part)
        return Routes(tuple(kept))

    def then(self, more: "Routes") -> "Routes":
        """Return these routes and a copy of what `more` has beyond their end; both begin at the same token."""
        return Routes((*self.parts, *(part.clone() for part in more.cut(len(self)).parts)))

    def packed(self) -> dict[str, Any]:
        """Return the routes as JSON values: shape, dtype, and the bytes in base64."""
        whole = torch.cat(self.parts)
        data = base64.b64encode(whole.contiguous().view(torch.uint8).numpy().tobytes()).decode()
        return {"shape": list(whole.shape), "dtype": NAMES[whole.dtype], "data": data}

    @classmethod
    def unpacked(cls, saved: dict[str, Any]) -> "Routes":
        """Return the routes from the result of `packed`."""
        flat = torch.frombuffer(bytearray(base64.b64decode(saved["data"])), dtype=getattr(torch, saved["dtype"]))
        return cls((flat.view(saved["shape"]),))


def one_prompt(rollouts: list[Rollout], prompt: list[int]) -> list[Rollout]:
    """Return the rollouts. Where the prompt's routes equal those of the first rollout, they share its memory."""
    first = rollouts[0].routes
    for rollout in rollouts if first is not None else []:
        known, own = first.cut(0, len(prompt)), rollout.routes.cut(0, len(prompt))
        same = all(map(torch.equal, known.parts, own.parts))
        rollout.routes = (known if same else own).then(rollout.routes)
    return rollouts


def routes_of(rollout: Rollout, prompt: list[int]) -> list[Routes | None]:
    """Return, for each sequence of a rollout, the routes of its first tokens, prompt included, or None. `prompt` is the
    group's. In an episode, a token keeps the routes of the turn in which it first appeared."""
    routes: list[Routes | None] = [rollout.routes, *[None] * len(rollout.splits)]
    for turn, number in of_sequences(rollout, prompt):
        if turn.routes is not None:
            known = routes[number]
            routes[number] = turn.routes if known is None else known.then(turn.routes)
    return routes


def give_routes(rollout: Rollout, prompt: list[int], routes: Sequence[Routes | None]) -> None:
    """Assign the routes that `routes_of` returned to the rollout and its turns."""
    rollout.routes = None if rollout.turns else routes[0]
    for turn, number in of_sequences(rollout, prompt):
        known = routes[number]
        turn.routes = None if known is None else known.cut(0, len(turn.prompt_ids) + len(turn.completion_ids) - 1)


def of_sequences(rollout: Rollout, prompt: list[int]) -> Iterator[tuple[Turn, int]]:
    """Yield the turns of an episode, each with the index of its sequence, but no turn whose prompt in the engine
    differs from the trained tokens before it."""
    splits, ids = [Split(0), *rollout.splits], rollout.completion_ids
    starts = [split.start for split in splits]
    trained = rollout.trained or [True] * len(ids)
    places, before = [place for place, drawn in enumerate(trained) if drawn], 0
    for turn in rollout.turns:
        if before < len(places):
            number = bisect_right(starts, places[before]) - 1
            own = splits[number].prompt_ids
            if turn.prompt_ids == [*(prompt if own is None else own), *ids[starts[number] : places[before]]]:
                yield turn, number
        before += len(turn.completion_ids)


def say_unrouted(rollouts: Sequence[Rollout]) -> bool:
    """Return whether some rollouts have no routes at all, and warn with their number."""
    lacking = sum(not rollout.routes and not any(turn.routes for turn in rollout.turns) for rollout in rollouts)
    if lacking:
        logger.warning("%d of %d completions came without routes, the record of the experts that they were sampled "
                       "with. The trainer chooses experts again, perhaps different ones. See docs/limits.md", lacking,
                       len(rollouts))
    return lacking > 0


def packed_routes(pieces: Sequence[tuple[Routes | None, int, int]]) -> tuple[Tensor | None, Tensor | None]:
    """Return the routes (T, layers, k) of packed tokens and a mask (T,) bool of the tokens that have routes (None if
    all do), or (None, None) without routes. A piece is (routes of its sequence, first position, number of tokens)."""
    cuts = [None if routes is None else routes.cut(start, start + count) for routes, start, count in pieces]
    like = next((part for cut in cuts if cut is not None for part in cut.parts), None)
    if like is None:
        return None, None
    rows: list[Tensor] = []
    known: list[Tensor] = []
    for cut, (_, _, count) in zip(cuts, pieces, strict=True):
        there = 0 if cut is None else len(cut)
        rows += [*(() if cut is None else cut.parts), like.new_zeros(count - there, *like.shape[1:])]
        known.append(torch.arange(count) < there)
    routed = torch.cat(known)
    return torch.cat(rows), None if routed.all() else routed


class RouteRecorder:
    """A recorder of each router's choice. A forward pass calls `chosen` for each layer with experts, with the live
    router's ids (T, k), and uses the ids (T, k) int64 that it returns. `Replay` is called in the same way."""

    def __init__(self, experts: int) -> None:
        self.dtype = dtype_of(experts)
        self.found: dict[int, Tensor] = {}

    def chosen(self, layer: int, live: Tensor) -> Tensor:
        """Record a layer's live ids and return them unchanged."""
        self.found[layer] = live.to(self.dtype)
        return live

    def taken(self, rows: int) -> Tensor:
        """Return the routes (B, T / B, layers, k) of the last pass, over B rows."""
        whole = torch.stack([self.found[layer] for layer in sorted(self.found)], 1)
        return whole.unflatten(0, (rows, -1))


class Replay:
    """A replay of recorded experts; tokens without a record are routed live. It counts the choices that differ from the
    live router's, once per layer: not again when layers are recomputed in backward."""

    def __init__(self, routes: Tensor, routed: Tensor | None = None) -> None:
        """Replay routes (T, layers, k). `routed` (T,) bool is True for tokens with routes; None if all have routes."""
        self.routes, self.routed = routes, routed
        self.differing: dict[int, Tensor] = {}  # by layer: number of recorded experts that are not among the live ones

    def chosen(self, layer: int, live: Tensor) -> Tensor:
        """Return the recorded expert ids (T, k) of a layer, and count those that the live router did not choose."""
        recorded = self.routes[:, layer].long()
        mine = recorded if self.routed is None else torch.where(self.routed[:, None], recorded, live)
        if layer not in self.differing:
            self.differing[layer] = (mine[:, :, None] != live[:, None, :]).all(-1).sum()
        return mine

    def counts(self) -> Tensor:
        """Return (2,) int64 on the device: recorded choices that differ from live ones, and all recorded choices."""
        tokens, _, k = self.routes.shape
        routed = torch.tensor(tokens, device=self.routes.device) if self.routed is None else self.routed.sum()
        return torch.stack([torch.stack(list(self.differing.values())).sum(), routed * k * len(self.differing)])


def replay_of(batch: MicroBatch, config: Any, layers: int) -> Replay | None:
    """Return the replay of a micro-batch's routes for one pass; None without routes. ValueError if the routes do not
    fit the config of a model in which `layers` (a number) layers have experts."""
    if batch.routes is None:
        return None
    got, needed = tuple(batch.routes.shape[1:]), (layers, config.get_text_config().num_experts_per_tok)
    if got != needed:
        raise ValueError(f"rollouts have routes of (layers, experts) {got}, and this model needs {needed}: they "
                         "are another model's. Sample anew, or set the rollouts' `routes` to None")
    return Replay(batch.routes, batch.routed)


def follow_routes(model: Any) -> tuple[int, ...]:
    """Hook a model's decoder layers to pass `routes` to their experts; return the indices of layers with experts."""
    layers = []
    for path, block in list(model.named_modules()):
        if isinstance(block, RoutedBlock):
            parent = path.rpartition(".")[0]
            layers.append(int(parent.rpartition(".")[2]))
            if block.choice is None:
                layer, block.choice = model.get_submodule(parent), live
                layer.register_forward_pre_hook(RouteHooks(block).before, with_kwargs=True)
                layer.register_forward_hook(RouteHooks(block).after, always_call=True)
    return tuple(layers)


def live(layer: int, ids: Tensor) -> Tensor:
    return ids


@dataclass(frozen=True)
class RouteHooks:
    """The hooks of a decoder layer, which set the routes for its experts only while the layer runs."""

    block: RoutedBlock

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Make the block follow the routes passed to the layer, or its own router without routes."""
        routing: RouteRecorder | Replay | None = kwargs.get("routes")
        self.block.choice = live if routing is None else routing.chosen

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Make the block follow its own router again."""
        self.block.choice = live
