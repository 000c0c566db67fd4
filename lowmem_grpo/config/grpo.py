"""The settings of a GRPO run, under TRL's field names and meanings (TRL 1.16's GRPOConfig)."""

from dataclasses import dataclass
from typing import ClassVar

from lowmem_grpo.config.critic import CriticSettings
from lowmem_grpo.config.rollout import SEVERAL, RewardSettings, RolloutSettings
from lowmem_grpo.config.sampling import EpisodeSettings, StrategySettings
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.config.teacher import TeacherSettings
from lowmem_grpo.losses.advantages import COMPARING, GAE, UNGROUPED, AdvantageSettings
from lowmem_grpo.losses.loss_settings import LossSettings
from lowmem_grpo.utils import COUNT, SHARE, TRUTH, Rule, count_text, one_of


@dataclass
class MovingReference:
    """Fields about a reference that follows the policy."""

    sync_ref_model: bool = False
    """True moves the reference toward the policy: every `ref_model_sync_steps` steps, its adapter weights become
    ref_model_mixup_alpha * policy + (1 - ref_model_mixup_alpha) * reference."""
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512

    RANGES: ClassVar[dict[str, Rule]] = {
        "sync_ref_model": TRUTH, "ref_model_mixup_alpha": SHARE, "ref_model_sync_steps": COUNT,
    }

    def reference_share(self, step: int) -> float:
        due = self.sync_ref_model and not step % self.ref_model_sync_steps
        return self.ref_model_mixup_alpha if due else 0.0


@dataclass
class ReferenceSettings(MovingReference):
    """Fields of GRPOConfig about the reference of the KL term, and completions without an end."""

    kl_reference: str = "start"
    """Not in TRL: the reference of the KL term (`beta`). "start", as in TRL: the policy at the start of training, so
    that a run that continues an adapter stays near what it has learned. "base": the model without any adapter."""
    mask_truncated_completions: bool = False

    RANGES: ClassVar[dict[str, Rule]] = {"kl_reference": one_of("start", "base")}


@dataclass
class GRPOConfig(  # type: ignore[misc]  # max_completion_length may be None only in LossSettings alone
        RewardSettings, ReferenceSettings, RolloutSettings, LossSettings, AdvantageSettings, StrategySettings,
        EpisodeSettings, TeacherSettings, CriticSettings, TrainSettings):
    """Every field means what it means in TRL; fields that TRL does not have say so.

    One optimizer step uses `per_device_train_batch_size * gradient_accumulation_steps` completions, rounded up to whole
    groups (`completions_per_step`). On a card only the memory plan cuts them into micro-batches, of at most
    `max_tokens_per_micro_batch` tokens. Without a plan (on the CPU, or for a model that cannot be planned), a
    micro-batch also holds at most `per_device_train_batch_size` completions. Neither limit changes the gradient.
    """

    evaluated: ClassVar[str] = "reward"
    READ_ONCE: ClassVar[tuple[str, ...]] = (
        *TrainSettings.READ_ONCE, "num_generations", "steps_per_generation", "max_prompt_length", "truncate_prompts",
        "max_completion_length", "temperature", "top_p", "top_k", "min_p", "vllm_sampling_params", "reward_weights",
        "entropy_coef", "teacher", "distillation_weight", "distillation_mode", "distillation_topk", "max_reprompt_len",
        "gamma", "lam", "cliprange_value", "critic_learning_rate", "critic_warmup_steps", "critic_adapter")

    def check_combinations(self) -> None:
        super().check_combinations()
        self.check_step()
        self.check_replay()
        self.check_overlap()
        self.check_teacher(self)
        self.check_critic(self)
        self.check_generations()
        self.turn_limit  # noqa: B018  (refuses a contradiction)
        if self.replay_buffer_size and self.vllm_importance_sampling_correction is False:
            raise ValueError(f"replay_buffer_size is {self.replay_buffer_size} and "
                             "vllm_importance_sampling_correction is False: replayed completions are of an older "
                             "policy, and would be trained on as if they were of this one; leave one of them out")

    def check_generations(self) -> None:
        """Raise ValueError for a single completion of each prompt, if it would be compared with others."""
        if self.num_generations == 1 and not (self.needs_teacher or self.advantage_estimator in UNGROUPED):
            raise ValueError(f"num_generations is 1; it must be {SEVERAL}. A single one is enough for "
                             f"advantage_estimator={' or '.join(map(repr, UNGROUPED))}")
        if self.num_generations == 1 and self.difficulty_pools:
            raise ValueError("difficulty_pools is True, which skips rows whose completions all earn the same, and "
                             "num_generations is 1; leave one of them out")

    def check_step(self) -> None:
        """Raise ValueError if settings that may differ from step to step contradict each other or other settings."""
        self.check_loss_options()
        self.check_advantage_options()
        self.check_credit()
        if self.sync_ref_model and not self.kl_weight:
            raise ValueError("sync_ref_model=True, and there is no KL term, whose weight is GRPOConfig's beta: nothing "
                             "is compared with the reference. Set it, or leave sync_ref_model out")
        if self.sync_ref_model and self.kl_reference == "base":
            raise ValueError("sync_ref_model=True, and kl_reference is 'base', which stays as it is; leave one of them "
                             "out")
        if self.pass_at_k is not None and not 1 <= self.pass_at_k < self.num_generations:
            raise ValueError(f"pass_at_k is {self.pass_at_k}; it must be at least 1 and below num_generations "
                             f"({self.num_generations})")

    def check_credit(self) -> None:
        """Raise ValueError if `turn_discount` is set, and the advantages do not compare turns with the group's mean."""
        name = self.advantage_estimator
        if self.multi_objective_aggregation == "normalize_then_sum":
            name = "normalize_then_sum (GDPO)"
        if self.turn_discount is not None and name not in COMPARING:
            raise ValueError(f"turn_discount is {self.turn_discount}, which compares turns with the mean of their "
                             f"group, and the advantages are those of {name}; take "
                             f"advantage_estimator={' or '.join(map(repr, COMPARING))}, or leave turn_discount out")
        if self.turn_discount is not None and self.kl_in_reward:
            raise ValueError(f"turn_discount is {self.turn_discount}, and with loss_type 'rloo' and beta {self.beta} "
                             "the KL term is part of the reward of a whole completion; set beta=0, or leave "
                             "turn_discount out")

    @property
    def passes(self) -> int:
        return self.num_iterations

    @property
    def kl_weight(self) -> float:
        """The weight of the KL term against the reference; 0: there is none."""
        return self.beta

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL term is part of the advantages and not of the loss."""
        rloo = self.advantage_estimator == self.loss_type == "rloo"
        return bool(self.kl_weight) and (rloo or self.advantage_estimator in ("reinforce++", GAE))

    def doubts(self) -> list[str]:
        """Return TRL's warnings about settings that differ from those of a method's paper."""
        doubts = []
        if self.loss_type == "luspo" and self.level != "sequence":
            doubts.append("loss_type is 'luspo' and importance_sampling_level 'token'; its paper has 'sequence'")
        if self.level == "sequence" and self.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
            doubts.append(f"importance_sampling_level is 'sequence', and loss_type {self.loss_type!r} sums over "
                          "tokens, which weights each sequence by its completion length. GSPO's paper has loss_type "
                          "'grpo'")
        return doubts


def check_weights(weights: list[float] | None, names: list[str]) -> None:
    """Raise ValueError unless there is one weight for each of these reward functions, or `weights` is None."""
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"reward_weights has {count_text(len(weights), 'number')} for "
                         f"{count_text(len(names), 'reward function')} ({', '.join(names)}); give one for each")


@dataclass
class RLOOConfig(GRPOConfig):
    """TRL's RLOOConfig: a completion is one action, compared with the others of its prompt, and the KL term is part of
    its reward. The options are those of TRL's class, and those of GRPOConfig that do not concern the loss."""

    num_generations: int = 2
    beta: float = 0.05
    advantage_estimator: str = "rloo"
    loss_type: str = "rloo"
