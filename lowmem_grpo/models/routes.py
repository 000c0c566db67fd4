"""Routes: which experts each token took in each layer of a mixture, recorded by the sampler and replayed in training.

A router may turn the smallest difference of rounding into another expert. Only the choice is replayed: gates are
computed afresh by the live router, and gradients flow through them. So no log-probability and no gradient depends on
how tokens are split or packed, in any pass over them (R3, 2510.11370, measured what happens without).

The token sampled last never ran: it has no route and needs none. A model takes routes through the keyword `routes` of
its backbone: hooks on its decoder layers hand it to the experts, also when a checkpointed layer is run again.
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
from lowmem_grpo.types import Rollout, Split, Turn

logger = logging.getLogger(__name__)

SMALL = 256  # experts that one byte can name
NAMES = {torch.uint8: "uint8", torch.int16: "int16"}


def dtype_of(experts: int) -> torch.dtype:
    """Return the smallest integers that name so many experts."""
    return torch.uint8 if experts <= SMALL else torch.int16


@dataclass(frozen=True, eq=False)
class Routes:
    """The experts of T tokens in their order, on the host, in parts of some tokens each: (T, layers, k), layers without
    experts left out. The completions of one prompt share the part of the prompt."""

    parts: tuple[Tensor, ...]  # (tokens, layers, k) uint8, or int16 above 256 experts

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def cut(self, start: int, end: int | None = None) -> "Routes":
        """Those of the tokens from `start` to `end`; views of the same memory."""
        kept, before = [], 0
        for part in self.parts:
            low, high = max(start - before, 0), len(part) if end is None else min(end - before, len(part))
            if low < high:
                kept.append(part[low:high])
            before += len(part)
        return Routes(tuple(kept))

    def then(self, more: "Routes") -> "Routes":
        """These, and what `more`, which begins at the same token, knows beyond them: a copy, so that the rest of it can
        go."""
        return Routes((*self.parts, *(part.clone() for part in more.cut(len(self)).parts)))

    def packed(self) -> dict[str, Any]:
        """Return the routes as plain values for a file: shape, dtype, and base64 of the bytes."""
        whole = torch.cat(self.parts)
        data = base64.b64encode(whole.contiguous().view(torch.uint8).numpy().tobytes()).decode()
        return {"shape": list(whole.shape), "dtype": NAMES[whole.dtype], "data": data}

    @classmethod
    def unpacked(cls, saved: dict[str, Any]) -> "Routes":
        """Read what `packed` returned."""
        flat = torch.frombuffer(bytearray(base64.b64decode(saved["data"])), dtype=getattr(torch, saved["dtype"]))
        return cls((flat.view(saved["shape"]),))


def one_prompt(rollouts: list[Rollout], prompt: list[int]) -> list[Rollout]:
    """The rollouts of a prompt; where those after the first have the same routes for it, they share its memory."""
    first = rollouts[0].routes
    for rollout in rollouts if first is not None else []:
        known, own = first.cut(0, len(prompt)), rollout.routes.cut(0, len(prompt))
        same = all(map(torch.equal, known.parts, own.parts))
        rollout.routes = (known if same else own).then(rollout.routes)
    return rollouts


def routes_of(rollout: Rollout, prompt: list[int]) -> list[Routes | None]:
    """Return the routes of the first tokens of each sequence of a rollout, prompt included; None where none are known.
    `prompt` is that of the group.

    Of an episode each turn brings those of all that the engine saw. Tokens keep the routes of the turn in which they
    came up first, which are those they were drawn with.
    """
    routes: list[Routes | None] = [rollout.routes, *[None] * len(rollout.splits)]
    for turn, number in of_sequences(rollout, prompt):
        if turn.routes is not None:
            known = routes[number]
            routes[number] = turn.routes if known is None else known.then(turn.routes)
    return routes


def give_routes(rollout: Rollout, prompt: list[int], routes: Sequence[Routes | None]) -> None:
    """Put back what `routes_of` returned."""
    rollout.routes = None if rollout.turns else routes[0]
    for turn, number in of_sequences(rollout, prompt):
        known = routes[number]
        turn.routes = None if known is None else known.cut(0, len(turn.prompt_ids) + len(turn.completion_ids) - 1)


def of_sequences(rollout: Rollout, prompt: list[int]) -> Iterator[tuple[Turn, int]]:
    """The turns of an episode, each with the number of the sequence that it is in; without those that the engine saw
    behind other tokens than are trained."""
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
    """Return whether some rollouts have no routes at all; a warning counts them."""
    lacking = sum(not rollout.routes and not any(turn.routes for turn in rollout.turns) for rollout in rollouts)
    if lacking:
        logger.warning("%d of %d completions came without routes: the trainer's own router chooses their experts, "
                       "which need not be those that they were sampled with. See docs/limits.md", lacking,
                       len(rollouts))
    return lacking > 0


def packed_routes(pieces: Sequence[tuple[Routes | None, int, int]]) -> tuple[Tensor | None, Tensor | None]:
    """The routes (T, layers, k) of packed places, and which of these have any, (T,) bool: None where all have. Each
    piece is so many tokens of a sequence from a position on. (None, None) where no piece has routes."""
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
    """Keeps what the router of each layer chooses. As of `Replay`, `chosen` decides in a forward pass which experts
    (T, k) int64 T tokens take in the `layer`th layer that has experts, where the live router chose `live` (T, k)."""

    def __init__(self, experts: int) -> None:
        self.dtype = dtype_of(experts)
        self.found: dict[int, Tensor] = {}

    def chosen(self, layer: int, live: Tensor) -> Tensor:
        """Keep what the router of a layer chose, and let it stand."""
        self.found[layer] = live.to(self.dtype)
        return live

    def taken(self, rows: int) -> Tensor:
        """(B, T / B, layers, k) of the last pass, over B rows."""
        whole = torch.stack([self.found[layer] for layer in sorted(self.found)], 1)
        return whole.unflatten(0, (rows, -1))


class Replay:
    """Gives every token its recorded experts; tokens without any are routed live. It counts what the live router would
    have chosen otherwise, once: not when layers are run again for backward."""

    def __init__(self, routes: Tensor, routed: Tensor | None = None) -> None:
        """routes (T, layers, k); routed (T,) bool: tokens that have any, None for all."""
        self.routes, self.routed = routes, routed
        self.differing: dict[int, Tensor] = {}  # by layer: recorded experts that are not among the live ones

    def chosen(self, layer: int, live: Tensor) -> Tensor:
        """Return the recorded experts (T, k) of a layer, and count the tokens for which the live router differs."""
        recorded = self.routes[:, layer].long()
        mine = recorded if self.routed is None else torch.where(self.routed[:, None], recorded, live)
        if layer not in self.differing:
            self.differing[layer] = (mine[:, :, None] != live[:, None, :]).all(-1).sum()
        return mine

    def counts(self) -> Tensor:
        """(2,) int64 on the device: recorded choices that differ from the live ones, and recorded choices."""
        tokens, _, k = self.routes.shape
        routed = torch.tensor(tokens, device=self.routes.device) if self.routed is None else self.routed.sum()
        return torch.stack([torch.stack(list(self.differing.values())).sum(), routed * k * len(self.differing)])


def follow_routes(model: Any) -> tuple[int, ...]:
    """Let the decoder layers of a model hand `routes` to their experts; returns the numbers of the layers that have
    some. A model may be given twice."""
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
    """Return the router's own choice."""
    return ids


@dataclass(frozen=True)
class RouteHooks:
    """Hooks of a decoder layer: its experts know the routes of a pass while it runs, and only then."""

    block: RoutedBlock

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Let the block follow the routes that the pass was given."""
        routing: RouteRecorder | Replay | None = kwargs.get("routes")
        self.block.choice = live if routing is None else routing.chosen

    def after(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Let the block follow its own router again."""
        self.block.choice = live
