"""PPO: a critic, which is a second adapter with a head on the policy's model, the advantages that follow from its
values, and its training beside the policy's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.losses.credit import token_rewards
from lowmem_grpo.losses.objective import Objective, PolicyOutputs, StepTotals
from lowmem_grpo.losses.regularization import token_kl
from lowmem_grpo.losses.value_loss import explained_variance, gae, value_losses, whitened
from lowmem_grpo.models.policy import Policy, evaluating
from lowmem_grpo.models.score_head import CRITIC, AdapterSlot, read_reward_model, score_of_hidden
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rollout.scoring import EnvironmentReward
from lowmem_grpo.runs.checkpoint import KEPT, check_adapter
from lowmem_grpo.runs.checkpoint_state import decode, encode, restore_optimizer
from lowmem_grpo.runs.saved_adapter import MismatchError, find_adapter
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.trainer.learner import Learner
from lowmem_grpo.trainer.nonfinite import Guard
from lowmem_grpo.trainer.optim import make_optimizer, make_scheduler
from lowmem_grpo.trainer.step_accumulator import StepAccumulator
from lowmem_grpo.types import TOKEN_FIELDS, LossOutput, MicroBatch, Rollout, RolloutGroup, TokenField

OF_STEPS = "critic_optimizer"  # files of a checkpoint
STEPS = ("optimizer", "scheduler", "scaler")


class Critic:
    """The critic of a run. `objective` makes the policy's objective, which reads the critic's values."""

    planned: Mapping[str, Any] = {"keeps_critic": True}  # fields of RunSettings, for the memory plan

    def __init__(self, config: GRPOConfig, policy: Policy, scorer: RewardScorer) -> None:
        self.slot = slot_of(config, policy)
        self.objective = partial(CriticObjective, critic=self)
        self.weights = dict(zip(scorer.names, scorer.weights, strict=True))
        self.paid = [func.__name__ for func in scorer.funcs if isinstance(func, EnvironmentReward)]

    @contextmanager
    def reading(self, _: Any = None) -> Iterator[Policy]:
        """Give the policy that computes values in this context, without dropout: the `under` of a `TokenField`."""
        with self.slot.active() as policy, evaluating(policy.model):
            yield policy

    def values(self, outputs: PolicyOutputs) -> Tensor:
        """Return the values (N,) of the texts before the N trained tokens, in float32."""
        return score_of_hidden(self.slot.head, outputs.hidden)


def slot_of(config: GRPOConfig, policy: Policy) -> AdapterSlot:
    """Return an adapter with a head to be trained beside the policy's: the reward model `critic_adapter`, or a new one
    like the policy's own, whose values are 0."""
    if config.critic_adapter is not None:
        return AdapterSlot.of_folder(policy, CRITIC, adapter_folder(config.critic_adapter), True)
    model: Any = policy.model
    return AdapterSlot(policy, CRITIC, model.peft_config[model.active_adapter], config.seed, trained=True)


def adapter_folder(path: str) -> Path:
    """Return the folder of the reward model that a critic starts from; an error for a folder that has none."""
    folder = find_adapter(Path(path).expanduser()).folder
    read_reward_model(folder)
    return folder


class CriticObjective(GRPOObjective):
    """The objective of PPO's policy: the policy loss, with advantages of tokens over the critic's values."""

    def __init__(self, config: GRPOConfig, exact: bool, critic: Critic) -> None:
        super().__init__(config, exact)
        self.critic, self.steps = critic, 0
        self.told_of_update: dict[str, float] = {}  # what is measured of an update's values

    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        values = replace(TOKEN_FIELDS["values"], under=self.critic.reading, value=self.critic.values, of_all=True)
        return *super().needed_before(optimizer_steps), values

    def with_gradient(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the counted rollouts with a reward; none of them while only the critic is trained."""
        waits = self.steps < self.config.critic_warmup_steps
        return [] if waits else [rollout for rollout in self.counted(rollouts) if rollout.reward is not None]

    def prepared(self, rollouts: list[Rollout], groups: Sequence[RolloutGroup] = ()) -> None:
        """Set the tokens' advantages and returns, from rewards and values."""
        super().prepared(rollouts, groups)
        config, scored = self.config, self.scored(rollouts)
        self.told_of_update = {}
        for rollout in rollouts:
            rollout.fields["returns"] = rollout.fields["values"]  # of one without a reward, which moves nothing
        if not scored:
            return
        lengths = [rollout.num_trained for rollout in scored]
        rewards = torch.cat([self.rewards_of(rollout) for rollout in scored])
        if config.whiten_rewards:
            rewards = whitened(rewards, center=False)
        values = torch.cat([rollout.at_trained(rollout.fields["values"]).double() for rollout in scored])
        parts = [*zip(rewards.split(lengths), values.split(lengths), strict=True)]
        advantages = torch.cat([gae(*part, config.gamma, config.lam) for part in parts])
        to_go = torch.cat([gae(part[0], torch.zeros_like(part[1]), config.gamma, 1.0) for part in parts])
        returns = advantages + values
        told = {"critic/values": values.mean().item(), "critic/returns": returns.mean().item(),
                "critic/explained_variance": explained_variance(values, to_go)}
        self.told_of_update = {name: value for name, value in told.items() if math.isfinite(value)}
        if config.whiten_advantages:
            advantages = whitened(advantages)
        for rollout, own, target in zip(scored, advantages.split(lengths), returns.split(lengths), strict=True):
            rollout.token_advantages, rollout.advantage = rollout.with_context(own), own.mean().item()
            rollout.fields["returns"] = rollout.with_context(target)

    def scored(self, rollouts: list[Rollout]) -> list[Rollout]:
        return [rollout for rollout in rollouts if rollout.reward is not None and rollout.num_trained]

    def rewards_of(self, rollout: Rollout) -> Tensor:
        """Return the rewards (N,) of a rollout's sampled tokens, in float64."""
        rewards = token_rewards(rollout, self.critic.weights, self.critic.paid)
        return rewards - self.config.beta * token_kl(rollout) if self.config.kl_in_reward else rewards

    def stepped(self, step: int) -> None:
        self.steps = step

    def state(self) -> dict[str, Any]:
        return super().state() | {"steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.steps = state.get("steps", 0)


class ValueObjective(Objective):
    """The objective of the critic: the clipped squared error of its values, a mean over the step's tokens."""

    def __init__(self, policy: CriticObjective) -> None:
        self.policy = policy

    def counted(self, rollouts: list[Rollout]) -> list[Rollout]:
        return self.policy.scored(self.policy.counted(rollouts))

    def with_gradient(self, rollouts: list[Rollout]) -> list[Rollout]:
        return self.counted(rollouts)

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        old, returns = (batch.at_trained(batch.fields[name]) for name in ("values", "returns"))
        values = self.policy.critic.values(outputs)
        losses, clipped = value_losses(values, old, returns, self.policy.config.cliprange_value)
        return LossOutput(losses.sum() / max(totals.tokens, 1), {"clipped": clipped.float().mean()})


class CriticGuard(Guard):
    """Tells which of the critic's steps were skipped because of NaN or infinity in its own numbers. An alarm says what
    to try; what else is not finite is the policy's guard's."""

    def judge(self, parameters: list[str], handled: bool = False) -> dict[str, float]:
        own = any({"loss", "values", "returns"} & {*entry.what} for entry in self.bad)
        others, self.bad, self.groups = bool(self.bad), [], []
        return {"skipped": float(own or (bool(parameters) and not handled and not others))}


class CriticLearner(Learner):
    """The learner of a policy, with one of its critic beside it, which has the same passes and steps."""

    objective: CriticObjective
    critic: Learner

    def __init__(self, policy: Policy, config: GRPOConfig, objective: CriticObjective, *given: Any,
                 **options: Any) -> None:
        super().__init__(policy, config, objective, *given, **options)
        self.slot = slot = objective.critic.slot
        if config.critic_warmup_steps >= self.guard.state.max_steps:
            raise ValueError(f"critic_warmup_steps is {config.critic_warmup_steps}, and the run has "
                             f"{self.guard.state.max_steps} steps, so that the policy would never be trained; lower it")
        optimizer = make_optimizer([{"params": [*slot.parameters.values()], "lr": config.critic_rate}], config)
        self.critic = Learner(
            slot.policy, config, ValueObjective(objective), optimizer,
            make_scheduler(optimizer, config, self.guard.state.max_steps), parameters=slot.parameters,
            offload=self.offload, fp16=self.scaler.is_enabled(), bound=self.bound,
            guard=CriticGuard(config.nonfinite_steps, TrainerState()), ranks=self.ranks)

    def forward_backward(self, groups: list[RolloutGroup], num_tokens: float | None = None,
                         begun: StepAccumulator | None = None) -> dict[str, float]:
        """Add the gradients of both, and return the metrics of both."""
        metrics = super().forward_backward(groups, num_tokens, begun)
        with self.slot.active():
            found = self.critic.forward_backward(groups)
        own = {f"critic/{name}": found[name] for name in ("loss", "clipped") if name in found}
        return metrics | own | self.objective.told_of_update

    def optim_step(self, notify: Callable[[str], None] = lambda event: None) -> dict[str, float]:
        """Make the optimizer steps of both, and return the metrics of both."""
        metrics = super().optim_step(notify)
        self.whole = False
        with self.slot.active():
            found = self.critic.optim_step()
        return metrics | {f"critic/{name}": found[name] for name in ("grad_norm", "learning_rate", "skipped")}

    def beside(self) -> tuple[Any, dict[str, dict[str, Tensor]]]:
        steps: dict[str, Tensor] = {}
        parts = {name: getattr(self.critic, name).state_dict() for name in STEPS}
        own = {name: parameter.detach().cpu() for name, parameter in self.slot.parameters.items()}
        return encode(parts, "", steps), super().beside()[1] | {CRITIC: own, OF_STEPS: steps}

    @torch.no_grad()
    def restore_beside(self, state: Any, read: Callable[[str], dict[str, Tensor]], weights: bool = True) -> None:
        if state is None:
            raise MismatchError("the checkpoint is of a run without a critic; resume with its advantage_estimator, or "
                                "begin a new run that continues its adapter")
        saved, steps = read(CRITIC), read(OF_STEPS)
        check_adapter(Path(KEPT.format(CRITIC)), saved, self.slot.parameters)
        for name, parameter in self.slot.parameters.items() if weights else ():
            parameter.copy_(saved[name])
        parts, own = decode(state, steps), {name.removeprefix("optimizer."): value for name, value in steps.items()}
        restore_optimizer(self.critic.optimizer, parts["optimizer"], own)
        for name in STEPS[1:]:
            getattr(self.critic, name).load_state_dict(parts[name])
        self.critic.optimizer.zero_grad(set_to_none=True)  # gradients of a failed step
        self.critic.guard.bad, self.critic.guard.groups = [], []
