"""What the micro-batches of an optimizer step add up to, beside the gradient."""

import copy

import torch
from torch import Tensor

from lowmem_grpo.losses.objective import Objective, Reducer
from lowmem_grpo.train.nonfinite import Flags
from lowmem_grpo.types import LossOutput, MicroBatch


class Sums:
    """The loss so far, its metrics, what was not finite, and the number of micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self.reducer, self.flags, self.count = Reducer(), Flags(), 0
        self.totals: dict[str, Tensor] = {"loss": torch.zeros((), device=device)}

    def add(self, batch: MicroBatch, out: LossOutput) -> None:
        """Take in a micro-batch whose gradient was added."""
        self.totals["loss"] = self.totals["loss"] + out.loss.detach()
        if out.policy_loss is not None:
            self.totals["policy_loss"] = self.totals.get("policy_loss", 0) + out.policy_loss
        self.reducer.add(out.metrics, len(batch.trained), out.counts)
        self.reducer.keep(out.samples)
        self.count += 1

    def copied(self) -> "Sums":
        """The same sums, to which more can be added without a change of these. Tensors are never changed in place."""
        copied = copy.copy(self)
        copied.totals, copied.flags, copied.reducer = dict(self.totals), Flags(), Reducer()
        copied.flags.rollouts, copied.flags.tables = list(self.flags.rollouts), list(self.flags.tables)
        copied.reducer.sums, copied.reducer.weights = dict(self.reducer.sums), dict(self.reducer.weights)
        copied.reducer.samples = {name: list(values) for name, values in self.reducer.samples.items()}
        return copied

    def scale(self, factor: float) -> None:
        """The loss is divided by another total: multiply what is there."""
        self.totals = {name: total * factor for name, total in self.totals.items()}

    def metrics(self, objective: Objective) -> dict[str, float]:
        """The metrics of the whole step, with its losses and the number of micro-batches."""
        losses = {name: total.item() for name, total in self.totals.items()}
        return objective.measured(self.reducer) | losses | {"micro_batches": float(self.count)}
