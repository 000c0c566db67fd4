"""`Learner`: the gradient of a step's rollouts, and the optimizer step."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.kernels.lora_factors import SharedFactors
from lowmem_grpo.losses.objective import Objective, PolicyOutputs, StepTotals, policy_tokens
from lowmem_grpo.memory.cutting import CutLimits
from lowmem_grpo.memory.offload.activations import ActivationOffload
from lowmem_grpo.memory.oom import BatchLimit, OutOfMemory, RunMemory, catch_oom
from lowmem_grpo.models.packing import Packer, number_units, unpack
from lowmem_grpo.models.policy import Policy, in_mode
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.trainer.distributed import Ranks
from lowmem_grpo.trainer.nonfinite import Guard, broken_gradients
from lowmem_grpo.trainer.optim import OptimizerCopy, allocates_each_step, gradient_norms, learning_rates
from lowmem_grpo.trainer.step_accumulator import Attempt, RandomStates, StepAccumulator, members
from lowmem_grpo.types import MicroBatch, RolloutGroup, TokenField


class Learner:
    """Trains parameters of a policy on an objective with an optimizer; learners of other parameters may stand beside it
    on the same policy. If memory runs out, the work is undone and repeated in smaller micro-batches. Each rank trains
    its share of the groups, and the gradients are summed before they are clipped."""

    def __init__(
        self, policy: Policy, config: TrainSettings, objective: Objective, optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None = None, *, parameters: dict[str, torch.nn.Parameter] | None = None,
        offload: ActivationOffload | None = None, fp16: bool = False, bound: BatchLimit | None = None,
        guard: Guard | None = None, ranks: Ranks | None = None, undoes_steps: bool = True,
    ) -> None:
        """`parameters` are trained while they require gradients; None: the trainable ones of the model and those of the
        optimizer. Without `undoes_steps`, no copy is held to undo an optimizer step for which memory runs out."""
        self.policy, self.config, self.objective = policy, config, objective
        self.optimizer = optimizer
        self.scheduler: Any = scheduler  # None: the caller sets the learning rate
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # collected once, since a walk through all modules takes milliseconds
        self.parameters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad or id(p) in held
                           } if parameters is None else parameters
        self.before = OptimizerCopy(optimizer, allocates_each_step(optimizer, policy.device)) if undoes_steps else None
        self.offload = offload
        self.scaler = torch.amp.GradScaler(policy.device.type, enabled=fp16)  # fp16 gradients underflow without it
        self.bound = bound or RunMemory().train
        self.packer = Packer(policy.device, self.bound)
        self.guard = guard or Guard(config.nonfinite_steps, TrainerState())
        self.ranks = ranks or Ranks()
        self.prepared: Prepared | None = None  # None once a pass or step has followed `prepare`
        self.factors = SharedFactors()
        self.whole = True  # False from the optimizer's step until the trainer has counted it

    critic: "Learner | None" = None  # of values, beside a policy's

    @property
    def limits(self) -> CutLimits:
        """The limit of a micro-batch in tokens and, without a memory plan, also in sequences."""
        tokens = self.config.max_tokens_per_micro_batch
        if self.bound.spread is None:
            return CutLimits(tokens, self.config.per_device_train_batch_size * self.config.sides)
        return CutLimits(tokens, spread=self.bound.spread)

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The trainable parameters by name. Some of the optimizer's parameters may be frozen for a time."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def fill_fields(self, groups: list[RolloutGroup], *fields: TokenField) -> None:
        """Compute `fields` of this rank's rollouts with the current policy, in one pass for each source of fields."""
        mine = self.mine(groups)
        for under, behind in dict.fromkeys(field.source for field in fields):
            same = [field for field in fields if field.source == (under, behind)]
            read = mine if behind is None else behind(mine)
            homes = dict(zip(map(id, members(read)), members(mine), strict=True))
            random = RandomStates(self.policy.device)
            what = f"recomputing {' and '.join(field.name for field in same)}"
            with nullcontext() if under is None else under(self.policy) as other:
                work = partial(self.recompute, fields=same, policy=other or self.policy)
                computed = self.packer.run(what, read, self.limits, work, random.restore)
            for rollout, *values in computed:
                for field, value in zip(same, values, strict=True):
                    field.put(homes[id(rollout)], value)

    def tell_fields(self, groups: list[RolloutGroup], fields: tuple[TokenField, ...]) -> None:
        """Exchange the values of `fields` between ranks, so that each rank has those of all rollouts."""
        fields = tuple(field for field in fields if field.told)
        if self.ranks.count == 1 or not fields:
            return
        rollouts = members(groups)
        places = {id(rollout): place for place, rollout in enumerate(rollouts)}
        own = {places[id(member)]: [field.of(member) for field in fields] for member in members(self.mine(groups))}
        for filled in self.ranks.gather("recomputed log-probabilities", own):
            for place, values in filled.items():
                for field, value in zip(fields, values, strict=True):
                    field.put(rollouts[place], value)

    def mine(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return this rank's share of the groups; all shares have about the same number of tokens."""
        return groups if self.ranks.count == 1 else self.ranks.mine(groups, lambda group: sum(
            len(group.prompt_ids) + len(rollout.completion_ids) for rollout in group.rollouts))

    @torch.no_grad()
    def recompute(self, batches: Iterator[MicroBatch], fields: list[TokenField],
                  policy: Policy) -> list[tuple[Any, ...]]:
        """Return each rollout with the values (C, ...) of `fields` for its tokens, on the host."""
        results: list[tuple[Any, ...]] = []
        for batch in batches:
            outputs = self.outputs(batch, policy)
            with policy.rounding():
                read = [unpack(field.read(outputs), batch) for field in fields]
            results += zip(batch.rollouts, *read, strict=True)
            del outputs  # frees the hidden states before the next pass
        return results

    def outputs(self, batch: MicroBatch, policy: Policy) -> PolicyOutputs:
        """Return what a policy computes for a micro-batch."""
        return PolicyOutputs(*policy.at_trained(batch), policy.at_head, policy.head.logits_of,
                             self.objective.temperature)

    def prepare(self, groups: list[RolloutGroup], optimizer_steps: int, policy_version: int = 0,
                training: bool = True) -> None:
        """Compute the rollout fields that an update of `optimizer_steps` steps needs, such as `old_logprobs`, in train
        or evaluation mode."""
        self.objective.start_update(members(groups), policy_version)
        fields = self.objective.needed_before(optimizer_steps)
        of_all = not training or any(field.of_all for field in fields)  # an evaluation measures all that count
        rollouts = (self.counted_groups if of_all else self.trained_groups)(groups)
        prepared = Prepared(self, groups, rollouts, fields, training)
        if fields:
            prepared.compute()
        self.tell_fields(rollouts, fields)
        self.objective.prepared(members(rollouts), groups)
        self.prepared = prepared if fields else None

    def trained_groups(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return copies of the groups with only the rollouts that have a gradient; none if rewards are missing."""
        return [replace(group, rollouts=[] if group.unjudged else self.objective.with_gradient(group.rollouts))
                for group in groups]

    def counted_groups(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return [replace(group, rollouts=self.objective.counted(group.rollouts)) for group in groups]

    def num_tokens(self, groups: list[RolloutGroup]) -> int:
        """Return the number of sampled tokens that count in the loss. Masked truncated completions do not count."""
        return sum(rollout.num_trained for rollout in members(self.counted_groups(groups)))

    def totals(self, groups: list[RolloutGroup], num_tokens: float | None) -> StepTotals:
        tokens = self.num_tokens(groups) if num_tokens is None else num_tokens
        complete = [(group, rollout) for group in groups for rollout in group.rollouts if not rollout.failed]
        return StepTotals(len(complete), tokens, sum(map(policy_tokens, members(self.counted_groups(groups)))),
                          len({*number_units(complete)}))

    def forward_backward(
        self, groups: list[RolloutGroup], num_tokens: float | None = None, begun: StepAccumulator | None = None
    ) -> dict[str, float]:
        """Add the gradient of the step's loss to the adapter, and return loss metrics. The loss is divided by counts
        over all `groups` (`num_tokens` replaces the count of tokens), so neither the split into micro-batches nor
        rollouts without gradient change it. Groups in `begun` were trained while sampling, and are skipped. A pass that
        fails adds nothing; with gradients disabled, a pass only returns metrics."""
        trained = [] if self.guard.rewards(groups) else self.trained_groups(groups)
        totals, left = self.totals(groups, num_tokens), self.mine(trained)
        if begun is not None:
            left = [group for group in left if not begun.holds(group)]
        before = self.objective.state()
        again = None if self.prepared is None else self.prepared.redo
        with Attempt(self.trained.values(), self.policy.device, again) as attempt:
            work = partial(self.accumulate, totals=totals, begun=begun)
            sums = self.packer.run("a training micro-batch", left, self.limits, work, attempt.undo, attempt.redo)
            sums = sums.of_all_ranks(self.ranks, members(trained))
            metrics = sums.metrics(self.objective) | self.policy.differing_routes()
            if self.guard.passed(trained, sums.flags):
                self.objective.restore(before)  # the values measured in this pass are meaningless
        self.prepared = None
        kept, total = (sum(len(group.rollouts) for group in some) for some in (trained, groups))
        share = self.num_tokens(trained) / max(self.num_tokens(groups), 1)
        return metrics | {"completions/trained": kept, "completions/total": total, "tokens/with_gradient": share}

    def accumulate(
        self, batches: Iterator[MicroBatch], totals: StepTotals, begun: StepAccumulator | None = None,
        training: bool = True,
    ) -> StepAccumulator:
        """Return a copy of `begun` with the losses and metrics of the micro-batches, in train or evaluation mode. In
        training, add their gradients to the adapter."""
        sums = StepAccumulator(self.policy.device) if begun is None else begun.copied()
        if not sums.count:
            self.policy.differing_routes()  # clears the counts of earlier passes
        shared = self.factors.unchanged() if self.policy.keeps_factors else nullcontext()
        with in_mode(self.policy.model, training), shared, self.policy.rounding():
            for batch in batches:
                self.add(batch, totals, sums, training)
        return sums

    def add(self, batch: MicroBatch, totals: StepTotals, sums: StepAccumulator, training: bool = True) -> None:
        """Add the micro-batch's loss and metrics to `sums`. In training, add its gradient to the adapter, with layer
        inputs offloaded, and flag rollouts with NaN or infinity."""
        policy, objective = self.policy, self.objective
        if self.offload is not None:
            self.offload.read_ahead(policy.head_groups == 1)  # several groups mean that memory is short
        with self.offload if training and self.offload is not None else nullcontext():
            outputs = self.outputs(batch, policy)
            out = objective.loss(batch, outputs, totals)
        if training:
            sums.flags.check_batch(batch, outputs.scores and outputs.scores[0], out.loss)
            del outputs  # for the backward pass, which takes the most memory
            if torch.is_grad_enabled():
                self.scaler.scale(out.loss).backward()
        sums.add(batch, out)

    @torch.no_grad()
    def measure(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Return the loss and metrics of these groups, without gradient or dropout; the run's state stays the same."""
        before, random = self.objective.state(), RandomStates(self.policy.device)
        try:
            self.prepare(groups, 1, training=False)
            counted = self.counted_groups(groups)  # the shares of the ranks are those of `prepare`
            mine, judged = ([group for group in some if not group.unjudged] for some in (self.mine(counted), counted))
            work = partial(self.accumulate, totals=self.totals(groups, None), training=False)
            sums = self.packer.run("an evaluation", mine, self.limits, work, random.restore)
            return sums.of_all_ranks(self.ranks, members(judged)).metrics(self.objective)
        finally:
            self.objective.restore(before)
            self.prepared = None

    def optim_step(self, notify: Callable[[str], None] = lambda event: None) -> dict[str, float]:
        """Sum, clip, apply and clear the gradients; skip a step without gradients, or with NaN or infinity. `notify` is
        called with the events before and after the gradients are applied. NonFiniteError after `nonfinite_steps` steps
        in a row with NaN or infinity."""
        if self.ranks.count > 1:
            self.ranks.sum_gradients([*self.trained.values()])
        parameters = {name: p for name, p in self.trained.items() if p.grad is not None}
        broken: list[str] = []  # names of parameters
        metrics = {**learning_rates(self.optimizer), "grad_norm": 0.0, "optimizer/skipped": 1.0}
        if parameters:
            self.scaler.unscale_(self.optimizer)
            norm, norms = gradient_norms(parameters)
            metrics |= norms
            if not math.isfinite(norms["grad_norm"]):
                broken = broken_gradients(parameters)
            elif not self.guard.bad:
                torch.nn.utils.clip_grads_with_norm_(parameters.values(), self.config.max_grad_norm, norm)
                metrics["optimizer/skipped"] = 0.0
        notify("on_pre_optimizer_step")
        if not metrics["optimizer/skipped"]:
            self.apply(list(parameters.values()))
        notify("on_optimizer_step")
        if parameters:
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.prepared = None
        metrics |= self.guard.judge(broken, bool(broken) and self.scaler.is_enabled() and self.scaler.get_scale() > 1)
        if self.scheduler is not None:
            with warnings.catch_warnings():
                # torch warns if the first step is skipped; the schedule advances all the same: the run keeps its length
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                self.scheduler.step()
        return metrics

    def beside(self) -> tuple[Any, dict[str, dict[str, Tensor]]]:
        """Return what a checkpoint keeps beside the trained adapter and its optimizer: JSON, and tensors by file."""
        return None, self.policy.kept_adapters

    def restore_beside(self, state: Any, read: Callable[[str], dict[str, Tensor]], weights: bool = True) -> None:
        """Restore what `beside` returned of a critic; `read` returns the tensors of a file, or {} without one."""

    def apply(self, parameters: list[torch.nn.Parameter]) -> None:
        """Run the optimizer's step. If memory runs out, undo the step, empty the caches and repeat it once. If memory
        runs out again, undo the step and raise MemoryExhaustedError."""
        what, step = "the optimizer step", partial(self.scaler.step, self.optimizer)
        self.whole = False
        if self.before is None or not self.before.copy_state(parameters):
            step()
            return
        failed = catch_oom(step, self.policy.device, self.before.restore)
        if isinstance(failed, OutOfMemory):
            self.bound.note(what, failed, "the caches are emptied, and it is made once more")
            failed = catch_oom(step, self.policy.device, self.before.restore)
        if isinstance(failed, OutOfMemory):
            self.whole = True
            self.bound.raise_exhausted(what, failed)


class Prepared:
    """The fields of an update's rollouts, computed before its passes. `redo` computes them once more, in smaller
    micro-batches, and `undo` restores the random states from which both begin."""

    def __init__(
        self, learner: Learner, groups: list[RolloutGroup], rollouts: list[RolloutGroup],
        fields: tuple[TokenField, ...], training: bool,
    ) -> None:
        """`rollouts` are copies of the groups with those rollouts that need the fields."""
        self.learner, self.groups, self.rollouts = learner, groups, rollouts
        self.fields, self.training = fields, training
        self.random = RandomStates(learner.policy.device)

    def undo(self) -> None:
        self.random.restore()

    def compute(self) -> None:
        """Compute the fields. If memory runs out, repeat all in the smaller size, as in a run that began with it."""
        learner = self.learner
        limit: int | None = -1
        with in_mode(learner.policy.model, self.training):
            while limit != learner.bound.lowered:
                limit = learner.bound.lowered
                self.undo()
                learner.fill_fields(self.rollouts, *self.fields)

    def redo(self) -> None:
        self.compute()
        if self.learner.ranks.count == 1:  # `prepared` decides for all ranks: one that repeats its share leaves it out
            self.learner.objective.prepared(members(self.rollouts), self.groups)
