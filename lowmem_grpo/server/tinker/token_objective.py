"""`TokenObjective`: the loss of a client's pass, a sum over tokens whose targets the client chose."""

import itertools

import torch
from torch import Tensor

from lowmem_grpo.losses.objective import Objective, PolicyOutputs, Reducer, StepTotals
from lowmem_grpo.losses.token_losses import token_losses
from lowmem_grpo.models.packing import unpack
from lowmem_grpo.server.tinker.datum import Cells, Datum, Pass
from lowmem_grpo.types import LossOutput, MicroBatch, RolloutGroup


class TokenObjective(Objective):
    """The objective of one pass. Afterwards `logprobs` holds the log-probabilities, (T,) or (T, K), of each datum's
    targets by the `id` of its rollout."""

    def __init__(self, asked: Pass, groups: list[RolloutGroup]) -> None:
        """`groups` hold a rollout for each datum, in the same order."""
        self.asked, self.logprobs = asked, dict[int, Tensor]()
        self.datums = {id(group.rollouts[0]): datum for group, datum in zip(groups, asked.data, strict=True)}

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        data = [self.datums[id(rollout)] for rollout in batch.rollouts]
        # targets may differ from the next tokens, which are packed
        outputs.targets = torch.cat([datum.targets for datum in data]).to(outputs.targets.device)
        several = any(datum.cells for datum in data)
        loss, parts = self.wide(outputs, data) if several else self.plain(batch, outputs, data)
        self.logprobs |= {id(rollout): part for rollout, part in zip(batch.rollouts, parts, strict=True)}
        return LossOutput(loss, {}, samples={"loss": loss.detach()[None]})

    def plain(self, batch: MicroBatch, outputs: PolicyOutputs, data: list[Datum]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and each datum's log-probabilities (T,), for tokens with one target each."""
        logprobs = outputs.logprobs
        values = {name: torch.cat([datum.values[name] for datum in data]).to(logprobs) for name in data[0].values}
        losses = token_losses(self.asked.loss, logprobs, values, self.asked.settings,
                              batch.at_trained(batch.sequence_ids), len(data))
        return losses.sum(), unpack(logprobs.detach().float().cpu(), batch)

    def wide(self, outputs: PolicyOutputs, data: list[Datum]) -> tuple[Tensor, list[Tensor]]:
        """Return cross entropy and each datum's log-probabilities: (T, K) with several targets per token, else (T,)."""
        begins = [0, *itertools.accumulate(len(datum.ids) for datum in data)]
        cells = [datum.cells or one_each(datum) for datum in data]
        places = torch.cat([each.rows + begin for each, begin in zip(cells, begins, strict=False)])
        tokens, weights = (torch.cat([getattr(each, name) for each in cells]) for name in ("tokens", "weights"))
        logprobs = outputs.several(places.to(outputs.targets.device), tokens.to(outputs.targets.device))
        loss = -(weights.to(logprobs) * logprobs).sum()
        parts = logprobs.detach().float().cpu().split([len(each.rows) for each in cells])
        return loss, [each.matrix(part) if datum.cells else part
                      for datum, each, part in zip(data, cells, parts, strict=True)]

    def measured(self, reducer: Reducer) -> dict[str, float]:
        """Return the loss of all micro-batches. ValueError if a log-probability is not finite."""
        if not all(bool(values.isfinite().all()) for values in self.logprobs.values()):
            raise ValueError("a log-probability is NaN or infinite: the model diverged; go back to saved weights")
        return {"loss:sum": sum(reducer.sampled("loss").tolist())}


def one_each(datum: Datum) -> Cells:
    """Return Cells of width 1 for a datum that has one target for each token."""
    rows = torch.arange(len(datum.ids))
    return Cells(rows, torch.zeros_like(rows), datum.targets, datum.values["weights"], len(rows), 1)
