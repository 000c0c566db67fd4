"""What is done while the last sequences of a step are still sampled."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.rules import TRUTH, Rule, at_least, number, one_of

PARALLEL = "parallel"
LOOKUP = "lookup"

NOT_CARRIED: dict[str, tuple[Any, ...]] = {  # what partial_rollouts goes with
    "vllm_importance_sampling_correction": (None, True), "extra_generations": (0,), "train_while_sampling": (False,),
    "dynamic_sampling_rounds": (0,), "replay_buffer_size": (0,), "advantage_estimator": (
        "grpo", "rloo", "passk", "reinforce++", None), "score_while_sampling": (None, False),
}


@dataclass(kw_only=True)
class OverlapSettings:
    """Fields of GRPOConfig that TRL does not have; all are off by default."""

    train_while_sampling: bool | str = False
    """True: the gradient of groups that are complete is computed while the last sequences decode, in turn with them.
    "parallel": at the same time, in a thread of its own (on a card in a stream of its own). The policy stays as it is
    until the step ends, so the gradient is the same but for rounding."""

    speculation: str | None = None
    """"lookup": the next tokens of the last sequences of a call are guessed from the prompt, the other answers of the
    group and earlier epochs' answers, and several are checked in one pass of the model. The distribution of what is
    drawn is the same."""

    extra_generations: int = 0
    """Sample so many more completions of each prompt than `num_generations`, and go on as soon as `num_generations` of
    them are done; the others are dropped. Short completions are done first, so the groups are biased towards them: the
    log measures by how much."""

    partial_rollouts: bool = False
    """End the sampling of a step when its groups are complete, and go on with what is unfinished in the next step. Its
    tokens are then of an older policy, which is corrected token by token."""
    partial_rollouts_ahead: float = 0.5
    """With `partial_rollouts`: so many more prompts are sampled at once than a step needs, as a share of these."""
    partial_rollouts_staleness: int = 1
    """With `partial_rollouts`: the most optimizer steps that a token may be old when it is trained on. A step waits for
    groups that would be older in the next."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "train_while_sampling": one_of(False, True, PARALLEL), "speculation": one_of(None, LOOKUP),
        "extra_generations": at_least(0), "partial_rollouts": TRUTH, "partial_rollouts_staleness": at_least(1),
        "partial_rollouts_ahead": number("above 0, and at most 1", lambda value: 0 < value <= 1),
    }

    def check_partial(self) -> None:
        """Raise ValueError where completions cannot be carried to the next step."""
        if not self.partial_rollouts:
            return
        for name, wanted in NOT_CARRIED.items():
            value = getattr(self, name)
            if value not in wanted:
                raise ValueError(f"partial_rollouts=True trains on tokens of several policies, which does not go with "
                                 f"{name}={value!r}; set {name}={wanted[0]!r}, or leave partial_rollouts out")
        stride = getattr(self, "steps_per_rollout", 1)
        if self.partial_rollouts_staleness < stride:
            raise ValueError(
                f"partial_rollouts_staleness is {self.partial_rollouts_staleness}, and a generation is used for "
                f"{stride} optimizer steps (num_iterations, steps_per_generation), so nothing could be carried; set it "
                f"to {stride} or more, or leave partial_rollouts out"
            )

    def check_overlap(self) -> None:
        """Raise ValueError where a group cannot be trained before all groups are sampled."""
        if not self.train_while_sampling:
            return
        for name, wanted in needs(self).items():
            value = getattr(self, name)
            if value not in wanted:
                raise ValueError(
                    f"train_while_sampling={self.train_while_sampling!r} trains a group before the others are sampled, "
                    f"and {name}={value!r} needs all of them; set {name}={wanted[0]!r}, or leave train_while_sampling "
                    "out"
                )


def needs(config: Any) -> dict[str, tuple[Any, ...]]:
    """The values of other fields with which a group is trained as it would be alone."""
    once = {
        "num_iterations": (1,), "steps_per_generation": (None, config.gradient_accumulation_steps),
        "dynamic_sampling_rounds": (0,), "replay_buffer_size": (0,), "top_entropy_quantile": (1.0,),
        "entropy_coef": (0.0,), "use_adaptive_entropy": (False,), "scale_rewards": ("group", "none", None),
        "advantage_estimator": ("grpo", "rloo", "passk"), "multi_objective_aggregation": ("sum_then_normalize",),
        "score_while_sampling": (None, True),
    }
    return once | ({"beta": (0.0,)} if config.train_while_sampling == PARALLEL else {})
