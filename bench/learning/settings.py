"""The settings that bench/learning/bench.py compares, and its verdicts: every run must learn, and settings that must
agree must do so within the noise of seeds."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

Rows = list[dict[str, Any]]
FIRST, LAST = 2, 5  # steps whose means are the beginning and the end of a run
LEAST_GAIN = 0.15  # in the share of right answers, of every run
ERRORS = 2.5  # standard errors that two settings may differ by

COMMON: dict[str, Any] = {  # of every run
    "learning_rate": 3e-3, "max_completion_length": 64, "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 2, "num_generations": 8, "adam_beta2": 0.99, "lr_scheduler_type": "linear",
    "save_strategy": "no", "disable_tqdm": True, "parity_steps": 0,
}


@dataclass(frozen=True)
class Setting:
    """One line of the table: what differs from dr_grpo on-policy through the transformers engine."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    engine: str = "transformers"
    four_bit: bool = False
    stale: int = 0  # updates between drawing samples and training on them
    like: str | None = None  # the setting that it must agree with, within the noise of seeds


DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
FASTER = {"train_while_sampling": "parallel", "score_while_sampling": True}
SETTINGS = (
    Setting("dr_grpo", DR_GRPO),
    Setting("grpo", {"loss_type": "grpo"}),
    Setting("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
    Setting("gspo", {"loss_type": "gspo"}),
    Setting("cispo", {"loss_type": "cispo"}),
    Setting("rloo", {"loss_type": "dapo", "advantage_estimator": "rloo"}),
    Setting("reinforce++", {"loss_type": "dapo", "advantage_estimator": "reinforce++"}),
    Setting("dr_grpo, 4-bit", DR_GRPO, four_bit=True, like="dr_grpo"),
    Setting("dr_grpo, one by one", DR_GRPO | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 128},
            like="dr_grpo"),
    Setting("dr_grpo, vLLM", DR_GRPO, engine="vllm", like="dr_grpo"),
    Setting("dr_grpo, one step stale", DR_GRPO | {"vllm_importance_sampling_correction": False}, stale=1),
    Setting("dr_grpo, one step stale, corrected", DR_GRPO, stale=1, like="dr_grpo"),
    Setting("dr_grpo, trained while sampling", DR_GRPO | FASTER, like="dr_grpo"),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}


def beginning(row: dict[str, Any]) -> float:
    """Return the share of right answers in the first steps."""
    return fmean(row["right"][:FIRST])


def end(row: dict[str, Any]) -> float:
    """Return the share of right answers in the last steps."""
    return fmean(row["right"][-LAST:])


def by_setting(rows: Rows) -> dict[str, Rows]:
    """Return the finished runs of each setting, in the order of the settings."""
    found: dict[str, Rows] = {name: [] for name in BY_NAME}
    for row in rows:
        if "missing" not in row and row["setting"] in found:
            found[row["setting"]].append(row)
    return {name: kept for name, kept in found.items() if kept}


def seed_deviation(rows: Rows) -> float:
    """Return the standard deviation of `end` over seeds, pooled over the settings."""
    squares, freedom = 0.0, 0
    for kept in by_setting(rows).values():
        mean = fmean(map(end, kept))
        squares += sum((end(row) - mean) ** 2 for row in kept)
        freedom += len(kept) - 1
    return (squares / max(freedom, 1)) ** 0.5


def distance(rows: Rows, name: str) -> tuple[float, float] | None:
    """Return (difference of the ends, what is allowed) between a setting and the one it must agree with."""
    found, like = by_setting(rows), BY_NAME[name].like
    if like is None or name not in found or like not in found:
        return None
    error = seed_deviation(rows) * (1 / len(found[name]) + 1 / len(found[like])) ** 0.5
    return fmean(map(end, found[name])) - fmean(map(end, found[like])), ERRORS * error


def failures(rows: Rows) -> list[str]:
    """Return a line for each run that is missing or did not learn, and each pair that does not agree."""
    lines = [f"{row['setting']}, seed {row['seed']}: {row['missing']}" for row in rows if "missing" in row]
    for name, kept in by_setting(rows).items():
        for row in kept:
            if end(row) - beginning(row) < LEAST_GAIN:
                lines.append(f"{name}, seed {row['seed']}: {beginning(row):.1%} -> {end(row):.1%}, so it did not learn")
        apart = distance(rows, name)
        if apart is not None and abs(apart[0]) > apart[1]:
            lines.append(f"{name}: {apart[0]:+.1%} from {BY_NAME[name].like}, allowed are {apart[1]:.1%}")
    return lines
