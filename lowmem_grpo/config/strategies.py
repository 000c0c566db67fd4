"""Settings of strategies that choose the groups of an update, and of training while sampling."""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from lowmem_grpo.utils import TRUTH, Rule, at_least, check_ranges, one_of

PARALLEL = "parallel"
LATE = "the rewards {} are computed after sampling (score_while_sampling=True computes them before)"
MEND = "mend that, or leave train_while_sampling out"


@dataclass(kw_only=True)
class StrategySettings:
    """Options that choose the groups of an update; none of these is in TRL. They do not change the number of steps, or
    of groups in a step; rows are used up faster, and `epoch` counts the rows used."""

    dynamic_sampling_rounds: int = 0
    """Maximum extra sampling rounds per step, which replace groups without signal; 0 turns it off."""
    difficulty_pools: bool = False
    """True skips rows whose completions all earned the same, for 1 epoch, then 2, 4 and 8."""
    replay_buffer_size: int = 0
    """Number of groups to keep, each to be used once more in place of a group without signal; 0 turns it off."""
    replay_max_age: int | None = None
    """Optimizer steps after which a kept group is discarded; None: never."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "dynamic_sampling_rounds": at_least(0, Integral), "difficulty_pools": TRUTH,
        "replay_buffer_size": at_least(0, Integral), "replay_max_age": at_least(1, Integral),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        self.check_replay()

    def check_replay(self) -> None:
        """Raise ValueError for a `replay_max_age` without replay."""
        if self.replay_max_age is not None and not self.replay_buffer_size:
            raise ValueError(
                f"replay_max_age is {self.replay_max_age}, and nothing is replayed: set replay_buffer_size, or leave "
                "replay_max_age out"
            )


@dataclass(kw_only=True)
class OverlapSettings:
    """Fields of GRPOConfig for training while sampling; none is in TRL, and all are off by default."""

    train_while_sampling: bool | str = False
    """True: gradients of complete groups are computed between decode steps of the last sequences. "parallel": at the
    same time as these, in another thread (on a card, in another stream). False: after all sampling. The policy does not
    change before the step ends, so the gradient is the same up to rounding."""

    RANGES: ClassVar[dict[str, Rule]] = {"train_while_sampling": one_of(False, True, PARALLEL)}

    def check_overlap(self) -> None:
        """Raise ValueError for a setting that needs all groups sampled before one is trained."""
        if not self.train_while_sampling:
            return
        for name, wanted in needs(self).items():
            value = getattr(self, name)
            if value not in wanted:
                raise ValueError(f"train_while_sampling={self.train_while_sampling!r} trains a group before the others "
                                 f"are sampled, and {name}={value!r} needs all of them; set {name}={wanted[0]!r}, or "
                                 "leave train_while_sampling out")


def needs(config: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values that other fields must have so that a group's gradient does not depend on other groups."""
    once = {"num_iterations": (1,), "steps_per_generation": (None, *range(1, config.gradient_accumulation_steps + 1)),
            "dynamic_sampling_rounds": (0,), "replay_buffer_size": (0,), "top_entropy_quantile": (1.0,),
            "entropy_coef": (0.0,), "use_adaptive_entropy": (False,), "scale_rewards": ("group", "none", None),
            "advantage_estimator": ("grpo", "rloo", "passk"), "multi_objective_aggregation": ("sum_then_normalize",),
            "score_while_sampling": (None, True), "normalize_advantages": (False,)}
    return once | ({"beta": (0.0,)} if config.train_while_sampling == PARALLEL else {})
