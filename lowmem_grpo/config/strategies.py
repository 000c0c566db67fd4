"""Sampling strategies: what to do about groups that teach nothing, as settings and as the documentation shows them."""

from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

from lowmem_grpo.rules import TRUTH, Rule, at_least, check_ranges


@dataclass(frozen=True)
class Strategy:
    """One way to more signal out of as many completions."""

    rule: str
    when: str
    source: str


STRATEGIES: dict[str, Strategy] = {
    "dynamic_sampling_rounds": Strategy(
        "groups without any advantage give their places to freshly sampled ones, up to so many times a step",
        "Many groups are solved or failed by all completions, and sampling is cheap beside training.",
        "DAPO, arXiv 2503.14476, section 3.2",
    ),
    "difficulty_pools": Strategy(
        "a row whose completions all earned the same rests for 1 epoch, then 2, 4, 8",
        "Several epochs over rows that differ in difficulty: none is sampled in vain each time.",
        "Online difficulty filtering, arXiv 2504.03380; prime-rl's difficulty pools",
    ),
    "replay_buffer_size": Strategy(
        "groups without any advantage give their places to kept ones of earlier steps, the largest spread first",
        "Signal is rare, and sampling dear; kept completions are stale, and weighed for it.",
        "RePO, arXiv 2506.09340; that they replace groups without spread is from TRL's experimental trainer",
    ),
}


@dataclass(kw_only=True)
class StrategySettings:
    """How the groups of an update are chosen; none of these is in TRL. The number of steps, and of groups in a step,
    stays what it is without them; rows are gone through faster, and `epoch` counts these."""

    dynamic_sampling_rounds: int = 0
    """Extra rounds of sampling at most, while there are groups without signal."""
    difficulty_pools: bool = False
    """Rows that were solved or failed by all completions rest for some epochs."""
    replay_buffer_size: int = 0
    """Groups kept, to be used once more in place of groups without signal."""
    replay_max_age: int | None = None
    """Policy versions after which a kept group is of no use; None is never."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "dynamic_sampling_rounds": at_least(0, Integral), "difficulty_pools": TRUTH,
        "replay_buffer_size": at_least(0, Integral), "replay_max_age": at_least(1, Integral),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        self.check_replay()

    def check_replay(self) -> None:
        """Raise ValueError for an age that nothing uses."""
        if self.replay_max_age is not None and not self.replay_buffer_size:
            raise ValueError(
                f"replay_max_age is {self.replay_max_age}, and nothing is replayed: set replay_buffer_size, or leave "
                "replay_max_age out"
            )
