"""Alarms: what a step's metrics say of a run that goes wrong, what that means, and what to try.

Each reads a step's metrics line. Where its condition has held for `patience` steps in a row it warns, once until the
condition is over, and leaves `alarms/NAME` = 1 in that line. The bounds lie well outside of what a healthy run shows.
What is missing from a line, or is NaN, says nothing: neither for the condition nor against it.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from lowmem_grpo.runs.findings import Finding
from lowmem_grpo.runs.state import TrainerState

logger = logging.getLogger(__name__)

Line = Mapping[str, Any]
Condition = Callable[[Line, list[float]], str | None]
"""(line, what the alarm keeps between steps) -> what is wrong in words, "" where nothing is, None where unmeasured."""

MISMATCH_K3 = 0.01  # mean k3 between sampler and trainer; a correction is in effect from 0.001 on
EFFECTIVE_SAMPLES = 0.5  # share of the samples that the mismatch leaves
CLIPPED = 0.3  # share of tokens (of sequences, at the sequence level) without gradient
KL = 1.0  # nats for a token
ENTROPY_SHARE, ENTROPY_FLOOR, FIRST_STEPS = 0.01, 1e-3, 5  # of the mean over the first steps; nats for a token
SPIKE, NORMS_KEPT, NORMS_NEEDED = 10.0, 50, 10  # times the median of the last norms, of which some must be there
CONSTANT_STEPS = 20


@dataclass(frozen=True)
class Alarm:
    """One alarm, as the code works through it and as the documentation shows it."""

    name: str
    title: str
    when: str
    patience: int  # steps in a row
    condition: Condition
    means: str
    fix: str
    repeats: bool = False  # warns again each time that the patience is over


def number(line: Line, name: str) -> float | None:
    """A metric; None where it is missing or not finite."""
    value = line.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def outside(wrong: Callable[[float], bool], *names: str) -> Condition:
    """The first of these metrics that is wrong."""

    def condition(line: Line, kept: list[float]) -> str | None:
        found = {name: value for name in names if (value := number(line, name)) is not None}
        bad = [f"{name} is {value:.3g}" for name, value in found.items() if wrong(value)]
        return ", ".join(bad) if found else None

    return condition


def no_signal(line: Line, kept: list[float]) -> str | None:
    """Whether no group had any spread of rewards."""
    groups = number(line, "groups/with_signal")
    if groups is None or groups:
        return None if groups is None else ""
    return f"in every group all completions earned the same reward (mean {line.get('reward', 'none')})"


def mismatch(line: Line, kept: list[float]) -> str | None:
    """Whether sampler and trainer compute different probabilities."""
    each = (outside(lambda k3: k3 > MISMATCH_K3, "mismatch/k3")(line, kept),
            outside(lambda share: share < EFFECTIVE_SAMPLES, "mismatch/effective_samples")(line, kept))
    return None if each == (None, None) else ", ".join(filter(None, each))


def entropy_collapse(line: Line, kept: list[float]) -> str | None:
    """Whether next to nothing is left of the entropy; `kept` is that of the first steps."""
    entropy = number(line, "entropy")
    if entropy is None:
        return None
    if len(kept) < FIRST_STEPS:
        kept.append(entropy)
    low = entropy < max(ENTROPY_FLOOR, ENTROPY_SHARE * fmean(kept))
    return f"entropy is {entropy:.2g}, and was {fmean(kept):.2g} in the first steps" if low else ""


def gradient_spike(line: Line, kept: list[float]) -> str | None:
    """Whether the gradient's norm is far above the median of those before, which are `kept`."""
    norm = number(line, "grad_norm")
    if not norm:  # 0: a step without gradient
        return None
    usual = median(kept) if len(kept) >= NORMS_NEEDED else math.inf
    kept[:] = [*kept, norm][-NORMS_KEPT:]
    return f"grad_norm is {norm:.3g}, {norm / usual:.0f} times the usual {usual:.3g}" if norm > SPIKE * usual else ""


def constant(name: str, line: Line, kept: list[float]) -> str | None:
    """Whether a function's rewards are all the same, also from step to step; `kept` is the last value."""
    mean, std = number(line, f"rewards/{name}/mean"), number(line, f"rewards/{name}/std")
    if mean is None or std is None:
        return None
    same = std == 0 and kept in ([], [mean])
    kept[:] = [mean] if std == 0 else []
    return f"reward {name} is {mean:.3g} for every completion" if same else ""


def any_constant(line: Line, kept: list[float]) -> str | None:
    """Stands in the table for `constant`, which is watched for each reward function by itself."""
    return None


ALARMS = (
    Alarm(
        "nothing_to_learn", "nothing to learn", "groups/with_signal is 0 (nothing_to_learn_steps)", 10, no_signal,
        "so no gradient",
        "if it is low, easier problems, a reward for partial success, a stronger model, SFT on the format first; if it "
        "is high, harder problems; else more num_generations or a higher temperature", repeats=True,
    ),
    Alarm(
        "truncated", "all completions were cut off", "completions/clipped_ratio is 1", 3,
        outside(lambda share: share >= 1, "completions/clipped_ratio"),
        "so no completion came to its end, and no answer at the end was seen by a reward",
        "try a longer max_completion_length, a chat template whose end token the model knows, stop strings in "
        "vllm_sampling_params, a prompt that asks for less. With mask_truncated_completions nothing is trained",
    ),
    Alarm(
        "mismatch", "sampler and trainer disagree",
        f"mismatch/k3 above {MISMATCH_K3} or mismatch/effective_samples below {EFFECTIVE_SAMPLES}", 3, mismatch,
        "so completions come from another distribution than the one in training",
        "try bfloat16 or fp32 in both, a sampler without quantization of its own, no top_p, top_k or min_p, fewer "
        "steps between sampling and training; vllm_importance_sampling_correction=None corrects what is left",
    ),
    Alarm(
        "clipping", "much of the gradient is clipped", f"clip_ratio/region_mean or cispo_clip_ratio above {CLIPPED}", 3,
        outside(lambda share: share > CLIPPED, "clip_ratio/region_mean", "cispo_clip_ratio"),
        "so the policy moves further within an update than its bounds allow",
        "try a lower learning_rate, fewer num_iterations or steps_per_generation; bounds that are wider only where "
        "they were made narrow (those of gspo are, on purpose)",
    ),
    Alarm(
        "kl", "the policy is far from its reference", f"kl above {KL}", 3, outside(lambda kl: kl > KL, "kl"),
        "so it may have lost what the model knew, or found a way around the reward",
        "try reading completions.jsonl, a lower learning_rate, a higher beta, an earlier checkpoint",
    ),
    Alarm(
        "entropy_collapse", "the entropy has collapsed",
        f"entropy below {ENTROPY_SHARE:.0%} of the mean of the first {FIRST_STEPS} steps, or below {ENTROPY_FLOOR}", 3,
        entropy_collapse, "so completions of a prompt are nearly the same, and little is left to compare",
        "try an earlier checkpoint with a lower learning_rate, a higher epsilon_high, entropy_coef, "
        "top_entropy_quantile, a higher temperature",
    ),
    Alarm(
        "gradient_spike", "the gradient has spiked",
        f"grad_norm above {SPIKE:.0f} times the median of the last {NORMS_KEPT} steps with one", 1, gradient_spike,
        "and what is left of it after clipping points where a few completions want",
        "look at this step in completions.jsonl. If it happens often: a lower max_grad_norm or learning_rate, larger "
        "groups, delta as a bound on the ratio, scale_rewards=\"batch\" or \"none\"",
    ),
    Alarm(
        "nonfinite", "NaN or infinity", "nonfinite/rollouts above 0", 1,
        outside(lambda rollouts: rollouts > 0, "nonfinite/rollouts"), "so nothing was trained on them",
        "read nonfinite.jsonl, which holds them and says where it was. Try a reward function that returns None for "
        "what it cannot judge, bfloat16 in place of fp16, a lower learning_rate",
    ),
    Alarm(
        "constant_reward", "a reward function is constant",
        "rewards/NAME/std is 0 and rewards/NAME/mean does not change", CONSTANT_STEPS, any_constant,
        "so it adds nothing to what is learned",
        "if all is solved, leave it out or ask for more; if not, look whether it reads what it should: the columns it "
        "gets, the format of the completions",
    ),
)


class Alarms:
    """Watches the lines of a run. What it remembers is in the trainer's state, and so is saved with it."""

    def __init__(self, state: TrainerState, nothing_to_learn_steps: int) -> None:
        self.state = state
        patience = {"nothing_to_learn": nothing_to_learn_steps}
        self.alarms = [replace(alarm, patience=patience.get(alarm.name, alarm.patience)) for alarm in ALARMS]

    def watch(self, line: Line) -> dict[str, float]:
        """Warn of what has been wrong for long enough; `alarms/NAME` of each alarm that did."""
        return {f"alarms/{alarm.name}": 1.0 for key, alarm in self.expanded(line) if self.fires(key, alarm, line)}

    def expanded(self, line: Line) -> Iterator[tuple[str, Alarm]]:
        """Each alarm under the key that it remembers by; that of constant rewards once for each function."""
        for alarm in self.alarms:
            if alarm.name != "constant_reward":
                yield alarm.name, alarm
                continue
            for metric in line:
                if metric.startswith("rewards/") and metric.endswith("/std"):
                    name = metric.removeprefix("rewards/").removesuffix("/std")
                    yield f"{alarm.name}/{name}", replace(alarm, condition=partial(constant, name))

    def fires(self, key: str, alarm: Alarm, line: Line) -> bool:
        """Take a line for one alarm; whether it has warned."""
        memory = self.state.alarms.setdefault(key, {"steps": 0, "kept": []})
        wrong = alarm.condition(line, memory["kept"])
        if wrong is None:
            return False
        memory["steps"] = memory["steps"] + 1 if wrong else 0
        steps = memory["steps"]
        due = steps == alarm.patience or (alarm.repeats and steps > 0 and steps % alarm.patience == 0)
        if due:
            long = f"for {steps} steps" if steps > 1 else f"in step {self.state.global_step}"
            finding = Finding("warning", f"{alarm.title} {long}", f"{wrong}, {alarm.means}", alarm.fix, alarm.name)
            logger.warning("%s", finding)
        return due
