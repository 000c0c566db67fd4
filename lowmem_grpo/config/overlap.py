"""What is done while the last sequences of a step are still sampled."""

from dataclasses import dataclass
from typing import Any, ClassVar

from lowmem_grpo.rules import Rule, one_of

PARALLEL = "parallel"


@dataclass(kw_only=True)
class OverlapSettings:
    """Fields of GRPOConfig that TRL does not have; all are off by default."""

    train_while_sampling: bool | str = False
    """True: the gradient of groups that are complete is computed while the last sequences decode, in turn with them.
    "parallel": at the same time, in a thread of its own (on a card in a stream of its own). The policy stays as it is
    until the step ends, so the gradient is the same but for rounding."""

    RANGES: ClassVar[dict[str, Rule]] = {"train_while_sampling": one_of(False, True, PARALLEL)}

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
