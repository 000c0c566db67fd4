"""The settings of PPO, `advantage_estimator="gae"`: a critic estimates a value for every token."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from lowmem_grpo.losses.advantages import GAE
from lowmem_grpo.utils import PATH, POSITIVE, SHARE, ZERO_OR_MORE, Rule, at_least

FASTER, FASTEST = 10, 1e-3  # a critic's learning rate: as a multiple of the policy's, and where that ends


@dataclass(kw_only=True)
class CriticSettings:
    """Fields of GRPOConfig for advantage_estimator="gae" only. `gamma`, `lam`, `cliprange_value` and `whiten_rewards`
    are names and defaults of the PPOConfig that TRL had."""

    gamma: float = 1.0
    """With gae: the discount of rewards, per token that the policy samples."""
    lam: float = 0.95
    """With gae: lambda, from 0 (advantages trust the critic) to 1 (they trust the rewards)."""
    cliprange_value: float | None = 0.2
    """With gae: how far a value may move from what it was at the generation until its loss is bounded; None: freely."""
    critic_learning_rate: float | None = None
    """With gae: the critic's learning rate; None: 10 times `learning_rate`, but at most 1e-3 or `learning_rate`."""
    critic_warmup_steps: int = 0
    """With gae: optimizer steps at the start that train the critic alone."""
    critic_adapter: str | None = None
    """With gae: a folder that RewardTrainer wrote. The critic starts as this reward model; None: as values of 0."""
    whiten_advantages: bool = True
    """With gae: the advantages of a generation's tokens get the mean 0 and the std 1."""
    whiten_rewards: bool = False
    """With gae: the rewards of a generation's tokens get the std 1, and keep their mean."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "gamma": SHARE, "lam": SHARE, "cliprange_value": POSITIVE, "critic_learning_rate": ZERO_OR_MORE,
        "critic_warmup_steps": at_least(0), "critic_adapter": PATH,
    }

    def check_critic(self, config: Any) -> None:
        """Raise ValueError for settings of the critic without one, and for those of `config` that it cannot have."""
        estimator = config.advantage_estimator
        if estimator != GAE:
            for field in fields(CriticSettings):
                if (value := getattr(self, field.name)) != field.default:
                    raise ValueError(f"{field.name} is {value!r}, a setting of PPO's critic, and advantage_estimator "
                                     f"is {estimator!r}; set advantage_estimator={GAE!r}, or leave it out")
            return
        for name in ("dynamic_sampling_rounds", "difficulty_pools", "replay_buffer_size"):
            if value := getattr(config, name):
                raise ValueError(f"{name} is {value!r}, which goes by rewards that differ within a group, and "
                                 f"advantage_estimator={GAE!r} learns from every completion; leave one of them out")
        if config.teaching or config.needs_teacher:
            raise ValueError(f"advantage_estimator is {GAE!r}, whose critic learns from rewards, and the loss has a "
                             "teacher's term; leave one of them out, as in advantage_estimator='grpo'")

    @property
    def critic_rate(self) -> float:
        """The critic's learning rate."""
        own: Any = self
        usual = max(own.learning_rate, min(FASTER * own.learning_rate, FASTEST))
        return float(usual) if self.critic_learning_rate is None else self.critic_learning_rate
