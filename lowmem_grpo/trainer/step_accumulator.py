"""The sums of losses and metrics over a step's micro-batches, and the states to restore before a pass is repeated."""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from lowmem_grpo.losses.objective import Objective, Reducer
from lowmem_grpo.trainer.distributed import Ranks
from lowmem_grpo.trainer.nonfinite import Flags
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup


class StepAccumulator:
    """The running loss of a step, its metrics, flags of values that are not finite, and the number of micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self.reducer, self.flags, self.count = Reducer(), Flags(), 0
        self.totals: dict[str, Tensor] = {"loss": torch.zeros((), device=device)}
        self.facts: dict[int, tuple[Any, ...]] = {}  # `facts_of` the groups that were trained while sampling

    def holds(self, group: RolloutGroup) -> bool:
        """Return whether the group was trained while sampling."""
        return any(id(rollout) in self.facts for rollout in group.rollouts)

    def add(self, batch: MicroBatch, out: LossOutput) -> None:
        self.totals["loss"] = self.totals["loss"] + out.loss.detach()
        parts = out.sums if out.policy_loss is None else out.sums | {"policy_loss": out.policy_loss}
        for name, part in parts.items():
            self.totals[name] = self.totals.get(name, 0) + part
        self.reducer.add(out.metrics, len(batch.trained), out.counts)
        self.reducer.keep(out.samples)
        self.count += 1

    def copied(self) -> "StepAccumulator":
        """Return a copy that shares the tensors, which are never changed in place."""
        copied = StepAccumulator(self.totals["loss"].device)
        copied.join(self.totals, self.count, self.reducer)
        copied.flags.rollouts, copied.flags.tables = list(self.flags.rollouts), list(self.flags.tables)
        return copied

    def join(self, totals: dict[str, Tensor], count: int, reducer: Reducer) -> None:
        """Add the sums of other micro-batches, but not their flags."""
        for name, total in totals.items():
            self.totals[name] = self.totals.get(name, 0) + total
        self.reducer.join(reducer.sums, reducer.weights, reducer.samples)
        self.count += count

    @torch.no_grad()
    def rescale(self, factor: float, parameters: Iterable[nn.Parameter]) -> None:
        """Multiply the losses, and the gradients of the parameters, by the same factor."""
        if factor != 1.0:
            self.totals = {name: total * factor for name, total in self.totals.items()}
            for gradient in (p.grad for p in parameters if p.grad is not None):
                gradient.mul_(factor)

    def of_all_ranks(self, ranks: Ranks, rollouts: list[Rollout]) -> "StepAccumulator":
        """Return the sums over all ranks. `rollouts` are the rollouts of all ranks, in the same order in each rank."""
        if ranks.count == 1:
            return self
        places = {id(rollout): place for place, rollout in enumerate(rollouts)}
        reducer, totals = Reducer(), {name: total.cpu() for name, total in self.totals.items()}
        reducer.join({name: value.cpu() for name, value in self.reducer.sums.items()}, self.reducer.weights,
                     {name: [part.cpu() for part in parts] for name, parts in self.reducer.samples.items()})
        own = totals, self.count, reducer, [(places[id(rollout)], what) for rollout, what in self.flags.read()]
        made = StepAccumulator(torch.device("cpu"))
        for totals, count, reducer, bad in ranks.gather("what micro-batches add up to", own):
            made.join(totals, count, reducer)
            made.flags.known += [(rollouts[place], what) for place, what in bad]
        return made

    def metrics(self, objective: Objective) -> dict[str, float]:
        losses = {name: total.item() for name, total in self.totals.items()}
        return objective.measured(self.reducer) | losses | {"micro_batches": float(self.count)}


def facts_of(groups: list[RolloutGroup]) -> dict[int, tuple[Any, ...]]:
    """Return, for each rollout by its id, all values that its gradient depends on, except tokens and settings."""
    return {id(rollout): (len(group.rollouts), group.unjudged, rollout.advantage, *rollout.invalid_rewards)
            for group in groups for rollout in group.rollouts}


def members(groups: list[RolloutGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


class RandomStates:
    """Torch's random states, of the CPU and of one device, captured at construction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.capture()

    def capture(self) -> None:
        self.cpu = torch.get_rng_state()
        self.card = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.card is not None:
            torch.cuda.set_rng_state(self.card, self.device)


class Gradients:
    """The parameters' gradients at construction, copied to the host because backward adds to them in place."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.held = [(p, p.grad, None if p.grad is None else p.grad.to("cpu", copy=True)) for p in parameters]

    def restore(self) -> None:
        """Give each parameter its captured gradient again: the same tensor and values, or None if it had none."""
        for parameter, gradient, copy in self.held:
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient


class Attempt:
    """An attempt at a training pass. `undo` takes back what it changed beside its result, gradients and random states,
    also if the pass fails in a `with` block; `redo` computes what the pass needs again, for the next attempt."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, compute: Callable[[], None] | None):
        self.gradients, self.random, self.compute = Gradients(parameters), RandomStates(device), compute

    def undo(self) -> None:
        self.gradients.restore()
        self.random.restore()

    def redo(self) -> None:
        if self.compute is not None:
            self.compute()
            self.random.capture()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self.undo()
