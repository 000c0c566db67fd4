"""KL and entropy terms, which keep a policy from moving too far and from narrowing.

Estimates of KL(policy || reference) per token (Schulman, 2020), from d = logp - ref_logp: in the loss, or in the
reward. Entropy in the loss: top-entropy masks, and a bonus of fixed or adaptive strength."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowmem_grpo.losses.advantages import STD_EPSILON, centered, leave_one_out, nanstd, normalized
from lowmem_grpo.losses.loss_types import held, k3_of
from lowmem_grpo.utils import torch

if TYPE_CHECKING:
    from torch import Tensor

    from lowmem_grpo.losses.advantages import AdvantageSettings
    from lowmem_grpo.types import Rollout, RolloutGroup


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d: unbiased, of high variance. Its gradient is the KL's own only if it is weighted by the ratio."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return d^2 / 2, a biased estimate. Its gradient equals the gradient of k1 in the reward."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d: unbiased, never negative (DeepSeekMath, eq. 4)."""
    return k3_of(ref_logprobs - logprobs)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def weighed_kl(name: str, logprobs: Tensor, ref_logprobs: Tensor, log_weight: Tensor, of_token: bool = True) -> Tensor:
    """Return the KL estimate `name` times w = exp(log_weight), (N,), finite even where only the estimate overflows.
    With `of_token`, the gradient of w reaches only its own token (d log w = d logp)."""
    difference = ref_logprobs - logprobs
    far = (difference > 1) & (name == "k3")
    estimate = KL_ESTIMATORS[name](logprobs, torch.where(far, logprobs.detach(), ref_logprobs))
    near = estimate * held(log_weight, estimate == 0).exp()
    if name != "k3":
        return near
    log_weight, difference = torch.where(far, log_weight, 0.0), torch.where(far, difference, 0.0)
    both = log_weight + difference
    product = (both.detach() if of_token else both).exp() - log_weight.exp() * (1 + difference)
    return torch.where(far, product, near)


# In the reward


def put_kl_in_reward(rollouts: list[Rollout], beta: float) -> None:
    """Set `token_advantages` (REINFORCE++): R - beta * the sum of k1 from this token on, normalised over all tokens. It
    needs `ref_logprobs`, and `old_logprobs` or else the sampler's. If k1 at a token is NaN or infinite, this and the
    earlier tokens of its rollout get NaN, and no others."""
    scored = [rollout for rollout in rollouts if rollout.reward is not None and rollout.num_trained]
    returns = [reward_to_go(rollout, beta) for rollout in scored]
    if not returns:
        return
    flat = torch.cat(returns)
    flat = flat.where(flat.isfinite(), torch.nan)  # a broken reference marks its own tokens only
    scores = centered(flat[None])[0] / (nanstd(flat, dim=-1) + STD_EPSILON)
    for rollout, values in zip(scored, scores.split([len(per_token) for per_token in returns]), strict=True):
        rollout.token_advantages = rollout.with_context(values.float())


def take_kl_from_rewards(groups: list[RolloutGroup], beta: float, settings: AdvantageSettings) -> None:
    """Set `advantage` (RLOO): leave-one-out of R - beta * the sum of k1 over the completion, as in TRL. The KL of a
    masked completion, which has no `ref_logprobs`, counts as 0."""
    rows = [[without_kl(rollout, beta) for rollout in group.rollouts] for group in groups]
    widest = max(map(len, rows), default=0)
    table = torch.tensor([[*row, *[torch.nan] * (widest - len(row))] for row in rows], dtype=torch.float64)
    advantages = leave_one_out(table.where(table.isfinite(), torch.nan), "none", None, 0)
    advantages = (normalized(advantages) if settings.normalize_advantages else advantages).nan_to_num(nan=0.0)
    for group, values in zip(groups, advantages.tolist(), strict=True):
        for rollout, value in zip(group.rollouts, values, strict=False):
            rollout.advantage = value


def without_kl(rollout: Rollout, beta: float) -> float:
    """Return R - beta * sum (log pi - log ref) over a rollout's trained tokens; NaN if it has no reward."""
    if rollout.reward is None or rollout.ref_logprobs is None or not rollout.num_trained:
        return torch.nan if rollout.reward is None else rollout.reward
    return float(reward_to_go(rollout, beta)[0])


def reward_to_go(rollout: Rollout, beta: float) -> Tensor:
    """Return R - beta * sum_{s >= t} (log pi_s - log ref_s) at the rollout's trained tokens (N,), in float64."""
    assert rollout.reward is not None
    return rollout.reward - beta * token_kl(rollout).flip(0).cumsum(0).flip(0)


def token_kl(rollout: Rollout) -> Tensor:
    """Return log pi - log ref at the rollout's trained tokens (N,), in float64; log pi is that before the update."""
    assert rollout.ref_logprobs is not None
    policy = rollout.old_logprobs if rollout.old_logprobs is not None else torch.tensor(rollout.rollout_logprobs)
    return rollout.at_trained(policy - rollout.ref_logprobs).double()


# Entropy


def top_entropy_mask(entropy: Tensor, share: float) -> Tensor:
    """Return (N,) bool: the `share` of tokens with the highest entropy (N,) over the whole step (arXiv 2506.01939),
    that is, of at least the (1 - share) quantile. Tokens of equal entropy are treated alike."""
    if entropy.numel() == 0 or share >= 1:
        return torch.ones_like(entropy, dtype=torch.bool)
    values = entropy.float()
    ordered = values.sort().values  # torch.quantile takes only 16 million values
    place = (1 - share) * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return values >= torch.lerp(ordered[below], ordered[above], place - below)


@dataclass
class EntropyControl:
    """The coefficient of the entropy bonus: fixed, or steered towards a target (Skywork-OR1, arXiv 2505.22312).
    If a step's mean entropy is at or below the target, adaptive control raises the coefficient by `delta`, and the next
    step has the bonus. After any other step it lowers the coefficient, and the next step has no bonus."""

    coef: float
    adaptive: bool = False
    lowest: float = 0.0
    highest: float = 1.0
    delta: float = 0.005
    target: float = 0.2
    last_entropy: float | None = None  # the previous step's

    @property
    def applied(self) -> float:
        """The coefficient for the next step. It is 0 if adaptive control omits the bonus."""
        low = self.last_entropy is not None and self.last_entropy <= self.target
        return self.coef if low or not self.adaptive else 0.0

    @property
    def enabled(self) -> bool:
        return self.adaptive or self.coef != 0

    def update(self, entropy: float) -> None:
        """Adapt the coefficient to `entropy`, the mean entropy of the step that has just ended."""
        if self.adaptive:
            step = self.delta if entropy <= self.target else -self.delta
            self.coef = min(max(self.coef + step, self.lowest), self.highest)
            self.last_entropy = entropy

    def state(self) -> dict[str, float | None]:
        return {"coef": self.coef, "last_entropy": self.last_entropy}

    def restore(self, state: dict[str, float | None] | None) -> None:
        """Restore the result of `state`. For None, as in checkpoints older than the bonus, change nothing."""
        if state is not None and state["coef"] is not None:
            self.coef, self.last_entropy = state["coef"], state["last_entropy"]
