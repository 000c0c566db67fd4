"""What is done while the last sequences of a step are still sampled."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.rules import Rule, at_least, one_of

PARALLEL = "parallel"
LOOKUP = "lookup"


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

    RANGES: ClassVar[dict[str, Rule]] = {
        "train_while_sampling": one_of(False, True, PARALLEL), "speculation": one_of(None, LOOKUP),
        "extra_generations": at_least(0),
    }

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
