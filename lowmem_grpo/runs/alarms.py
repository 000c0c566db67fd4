"""Alarms on a step's metrics: warnings that say what goes wrong in a run, what it means and what to do. An alarm warns
(and sets `alarms/NAME` = 1) when its condition has held for `patience` steps in a row. Steps whose metric is missing or
NaN are skipped."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

from lowmem_grpo.memory.cards import AUTO
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Finding

logger = logging.getLogger(__name__)
Line = Mapping[str, Any]
Condition = Callable[[Line, list[float]], str | None]
"""(line, values that the alarm keeps between steps) -> what is wrong; "" if nothing is, None without the metric."""

# Mean k3 between sampler and trainer, far above what a KV cache of this dtype does (bench/LOG.md: 0.0014, 0.033, 0.14)
MISMATCH_K3 = {AUTO: 0.01, "fp8": 0.1, "fp8_e4m3": 0.1, "fp8_e5m2": 0.4}
EFFECTIVE_SAMPLES = 0.5  # effective sample size under the mismatch, as a share
CLIPPED = 0.3  # share of tokens (of sequences, at the sequence level) without gradient
KL = 1.0  # nats per token
ENTROPY_SHARE, ENTROPY_FLOOR, FIRST_STEPS = 0.01, 1e-3, 5  # share of the mean of the first steps; nats per token
SPIKE, NORMS_KEPT, NORMS_NEEDED = 10.0, 50, 10  # factor of the median of the last norms, if there are enough
CONSTANT_STEPS = 20
REPETITION, MORE_REPETITION = 0.3, 0.2  # share of repeated 4-grams; above that of the first steps
OF_TEACHER = DIVERGENCE, SUCCESSES = "distillation/divergence", "self_distillation/success_group_fraction"
SHRUNK, RISEN, RISEN_BY = 0.5, 1.5, 0.1  # of the mean of the first steps; nats per token above it
WORSE, GROWN = -1.0, 100.0  # explained variance; factor of a critic's mean loss in the first steps
MANY_ENDS = 0.5  # share of the episodes with one ending, or of failed tool calls
MANY_PREEMPTED = 0.5  # preemptions per sequence of the decode batch
MANY_FAILURES = 0.1  # share of the episodes in which an environment failed


@dataclass(frozen=True)
class Alarm:
    """One alarm: its condition, and the texts for warnings and for the documentation."""

    name: str
    title: str
    when: str
    patience: int  # steps in a row
    condition: Condition
    means: str
    fix: str
    repeats: bool = False  # whether it warns again every `patience` steps


def number(line: Line, name: str) -> float | None:
    value = line.get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def outside(wrong: Callable[[float], bool], *names: str) -> Condition:
    """Return a condition that holds if `wrong` is true for any of the metrics `names`."""

    def condition(line: Line, kept: list[float]) -> str | None:
        measured = {name: value for name in names if (value := number(line, name)) is not None}
        bad = [f"{name} is {value:.3g}" for name, value in measured.items() if wrong(value)]
        return ", ".join(bad) if measured else None

    return condition


def no_signal(line: Line, kept: list[float]) -> str | None:
    groups = None if any(number(line, name) is not None for name in OF_TEACHER) else number(line, "groups/with_signal")
    if groups is None or groups:
        return None if groups is None else ""
    return f"in every group all completions earned the same reward (mean {line.get('reward', 'none')})"


def mismatch(most: float, line: Line, kept: list[float]) -> str | None:
    each = (outside(lambda k3: k3 > most, "mismatch/k3")(line, kept),
            outside(lambda share: share < EFFECTIVE_SAMPLES, "mismatch/effective_samples")(line, kept))
    return None if each == (None, None) else ", ".join(filter(None, each))


def entropy_collapse(line: Line, kept: list[float]) -> str | None:
    """Report if the entropy has collapsed. `kept` collects the entropies of the first steps."""
    entropy = number(line, "entropy")
    if entropy is None:
        return None
    if len(kept) < FIRST_STEPS:
        kept.append(entropy)
    low = entropy < max(ENTROPY_FLOOR, ENTROPY_SHARE * fmean(kept))
    return f"entropy is {entropy:.2g}, and was {fmean(kept):.2g} in the first steps" if low else ""


def repetition(line: Line, kept: list[float]) -> str | None:
    """Report if completions repeat themselves more than in the first steps, and earn more. `kept` collects the shares
    of repeated 4-grams and the rewards of the first steps, in turn."""
    share, reward = number(line, "completions/repetition"), number(line, "reward")
    if share is None or reward is None:
        return None
    if len(kept) < 2 * FIRST_STEPS:
        kept += [share, reward]
    first, paid = fmean(kept[::2]), fmean(kept[1::2])
    more = share > max(REPETITION, first + MORE_REPETITION) and reward > paid
    return (f"completions/repetition is {share:.2g}, and was {first:.2g} in the first steps, while the reward rose "
            f"from {paid:.3g} to {reward:.3g}") if more else ""


def gradient_spike(line: Line, kept: list[float]) -> str | None:
    """Report if the gradient norm is far above the median of the earlier norms in `kept`."""
    norm = number(line, "grad_norm")
    if not norm:  # 0: a step without gradient
        return None
    usual = median(kept) if len(kept) >= NORMS_NEEDED else math.inf
    kept[:] = [*kept, norm][-NORMS_KEPT:]
    return f"grad_norm is {norm:.3g}, {norm / usual:.0f} times the usual {usual:.3g}" if norm > SPIKE * usual else ""


def shrunk(line: Line, kept: list[float]) -> str | None:
    """Report if completions are much shorter than in the first steps, and nearer to the teacher. `kept` collects the
    lengths and divergences of the first steps, in turn."""
    length, divergence = number(line, "completions/mean_length"), number(line, DIVERGENCE)
    if length is None or divergence is None:
        return None
    if len(kept) < 2 * FIRST_STEPS:
        kept += [length, divergence]
    first, apart = fmean(kept[::2]), fmean(kept[1::2])
    return (f"completions/mean_length is {length:.0f}, and was {first:.0f} in the first steps, while {DIVERGENCE} fell "
            f"from {apart:.3g} to {divergence:.3g}") if length < SHRUNK * first and divergence < apart else ""


def risen(line: Line, kept: list[float]) -> str | None:
    """Report if the policy is further from its teacher than in the first steps, whose divergences `kept` collects."""
    divergence = number(line, DIVERGENCE)
    if divergence is None:
        return None
    if len(kept) < FIRST_STEPS:
        kept.append(divergence)
    first = fmean(kept)
    more = divergence > first + max(RISEN_BY, (RISEN - 1) * first)
    return f"{DIVERGENCE} is {divergence:.3g}, and was {first:.3g} in the first steps" if more else ""


def critic_explodes(line: Line, kept: list[float]) -> str | None:
    """Report if a critic is far worse than a constant, or than in the first steps, whose losses `kept` collects."""
    loss, explained = number(line, "critic/loss"), number(line, "critic/explained_variance")
    if loss is None:
        return None
    if loss and len(kept) < FIRST_STEPS:
        kept.append(loss)
    if explained is not None and explained < WORSE:
        return f"critic/explained_variance is {explained:.3g}"
    first = fmean(kept) if kept else math.inf
    return f"critic/loss is {loss:.3g}, and was {first:.3g} in the first steps" if loss > GROWN * first else ""


def no_success(line: Line, kept: list[float]) -> str | None:
    share = number(line, SUCCESSES)
    if share is None:
        return None
    read = number(line, "self_distillation/feedback_used_fraction")
    return "" if share or read else f"{SUCCESSES} is 0, and no feedback is read"


def preempted(line: Line, kept: list[float]) -> str | None:
    times, together = number(line, "sampling/preemptions"), number(line, "sampling/most_together")
    if times is None or not together:
        return None
    many = times > MANY_PREEMPTED * together
    return f"{times:.0f} times in a step a sequence had to leave the full key-value cache" if many else ""


def constant(name: str, line: Line, kept: list[float]) -> str | None:
    """Report if a reward function is constant within and across steps. `kept` holds the value of the last step."""
    mean, std = number(line, f"rewards/{name}/mean"), number(line, f"rewards/{name}/std")
    if mean is None or std is None:
        return None
    same = std == 0 and kept in ([], [mean])
    kept[:] = [mean] if std == 0 else []
    return f"reward {name} is {mean:.3g} for every completion" if same else ""


ALARMS = (
    Alarm(
        "nothing_to_learn", "nothing to learn", "groups/with_signal is 0, and there is no teacher", 10, no_signal,
        "so the rewards give no gradient",
        "if the mean reward is low, use easier problems, a reward for partial success, a stronger model, or SFT on the "
        "format first; if the mean reward is high, use harder problems; otherwise raise num_generations or the "
        "temperature",
        repeats=True,
    ),
    Alarm(
        "no_success", "no success in any group", f"{SUCCESSES} is 0, and no feedback is read", 10, no_success,
        "so SDPO's teacher has nothing to show, and nothing is distilled",
        "lower success_reward_threshold, use easier problems or a reward for partial success, raise num_generations, "
        "or give the teacher feedback (include_environment_feedback)",
        repeats=True,
    ),
    Alarm(
        "shorter_answers", "answers shrink",
        f"completions/mean_length is below {SHRUNK:.0%} of its mean in the first {FIRST_STEPS} steps, and {DIVERGENCE} "
        "below its mean there", 3, shrunk,
        "so the policy may leave out the reasoning that a teacher who knows the answer does not need",
        "read completions.jsonl. If the teacher itself answers so briefly, all is well; if right answers are lost, go "
        "back to an earlier checkpoint, make fewer steps, take distillation_alpha=0, or add rewards "
        "(distillation_weight below 1)",
    ),
    Alarm(
        "divergence_rises", "the policy moves away from its teacher",
        f"{DIVERGENCE} is above {RISEN} times its mean in the first {FIRST_STEPS} steps, and {RISEN_BY} above it", 5,
        risen, "so the policy learns something else than the teacher's answers",
        "lower learning_rate, raise distillation_weight if rewards pull elsewhere, lower teacher_update_rate, or check "
        "that the teacher reads what it should",
    ),
    Alarm(
        "truncated", "all completions were cut off", "completions/clipped_ratio is 1", 3,
        outside(lambda share: share >= 1, "completions/clipped_ratio"),
        "so rewards and teachers see unfinished answers (with mask_truncated_completions=True, nothing is trained)",
        "raise max_completion_length, use a chat template whose end token the model knows, set stop strings in "
        "vllm_sampling_params, or ask for shorter answers in the prompt",
    ),
    Alarm(
        "mismatch", "sampler and trainer disagree",
        f"mismatch/k3 is above {MISMATCH_K3[AUTO]} (with a cache in fp8_e4m3 {MISMATCH_K3['fp8_e4m3']}, in fp8_e5m2 "
        f"{MISMATCH_K3['fp8_e5m2']}), or mismatch/effective_samples is below {EFFECTIVE_SAMPLES}", 3,
        partial(mismatch, MISMATCH_K3[AUTO]),  # `Alarms` takes the bound of the run's cache
        "so completions come from another distribution than the policy's",
        "use bfloat16 or fp32 in sampler and trainer, do not quantize the sampler's weights or cache separately, or "
        "leave out top_p, top_k and min_p. The loss is corrected unless vllm_importance_sampling_correction is False",
    ),
    Alarm(
        "clipping", "much of the gradient is clipped", f"clip_ratio/region_mean or cispo_clip_ratio is above {CLIPPED}",
        3,
        outside(lambda share: share > CLIPPED, "clip_ratio/region_mean", "cispo_clip_ratio"),
        "so on many tokens the policy moves further than the clip range allows",
        "lower learning_rate, num_iterations or steps_per_generation. Widen the clip range only if you have narrowed "
        "it (the default range of gspo is narrow on purpose)",
    ),
    Alarm("kl", "the policy is far from its reference", f"kl is above {KL}", 3, outside(lambda kl: kl > KL, "kl"),
          "so the policy may have lost abilities of the model, or exploit a flaw of the reward",
          "read completions.jsonl; lower learning_rate, raise beta, or go back to an earlier checkpoint"),
    Alarm(
        "entropy_collapse", "the entropy has collapsed",
        f"entropy is below {ENTROPY_SHARE:.0%} of its mean in the first {FIRST_STEPS} steps, or below {ENTROPY_FLOOR}",
        3, entropy_collapse, "so the completions of a prompt are nearly the same",
        "go back to an earlier checkpoint and lower learning_rate, raise epsilon_high or the temperature, or use "
        "entropy_coef or top_entropy_quantile",
    ),
    Alarm(
        "repetition", "completions repeat themselves, and are paid for it",
        f"completions/repetition is above {REPETITION}, and {MORE_REPETITION} above its mean in the first "
        f"{FIRST_STEPS} steps, and the reward is above its mean there", 3, repetition,
        "so the policy may exploit a flaw of the reward",
        "read the commonest completions in the report. Make the reward function stricter, add "
        "rewards.repetition_penalty(), or use sentence=True in rewards.follows_instructions",
    ),
    Alarm(
        "gradient_spike", "the gradient has spiked",
        f"grad_norm is above {SPIKE:.0f} times the median of its last {NORMS_KEPT} values other than 0", 1,
        gradient_spike, "so a few completions may dominate the update",
        "look at this step in completions.jsonl. If spikes are frequent, lower max_grad_norm or learning_rate, use "
        "larger groups, bound the ratio with delta, or set scale_rewards to \"batch\" or \"none\"",
    ),
    Alarm(
        "critic", "the critic explodes",
        f"critic/explained_variance is below {WORSE:g}, or critic/loss above {GROWN:g} times its mean in the first "
        f"{FIRST_STEPS} steps", 10, critic_explodes, "so its values mislead the policy more than none would",
        "lower critic_learning_rate, raise critic_warmup_steps, scale the rewards to about 1 (cliprange_value is in "
        "their units), or begin with a reward model (critic_adapter). lam=1 trusts the rewards alone",
    ),
    Alarm(
        "critic_nonfinite", "NaN or infinity in the critic", "critic/skipped is above 0", 1,
        outside(lambda skipped: skipped > 0, "critic/skipped"), "so its optimizer step was skipped",
        "if it goes on, lower critic_learning_rate, scale the rewards to about 1, or use bfloat16 instead of fp16",
    ),
    Alarm(
        "nonfinite", "NaN or infinity", "nonfinite/rollouts is above 0", 1,
        outside(lambda rollouts: rollouts > 0, "nonfinite/rollouts"), "so the run skipped an optimizer step",
        "read nonfinite.jsonl, which lists the affected rollouts and where the value appeared. Let reward functions "
        "return None for completions that they cannot judge, use bfloat16 instead of fp16, or lower learning_rate",
    ),
    Alarm(
        "unreadable_calls", "tool calls fail",
        f"episodes/parse_error or tools/failure_frequency is above {MANY_ENDS}", 3,
        outside(lambda share: share > MANY_ENDS, "episodes/parse_error", "tools/failure_frequency"),
        "so the policy does not know the format of tool calls, or the tools and their arguments",
        "read completions.jsonl, which has each call and its result. Use a model that knows tool calls, show a call in "
        "the prompt, or explain the arguments in the tools' docstrings",
    ),
    Alarm(
        "no_room", "episodes run out of tokens", f"episodes/max_tokens or episodes/context is above {MANY_ENDS}", 3,
        outside(lambda share: share > MANY_ENDS, "episodes/max_tokens", "episodes/context"),
        "so many episodes end early",
        "raise max_completion_length, which limits the turns of a sequence together with the messages between them; "
        "lower max_tool_tokens, max_turn_tokens or the number of turns; or let the environment send shorter messages",
    ),
    Alarm(
        "turns_cut", "all turns were cut off", "turns/cut_ratio is 1", 3,
        outside(lambda share: share >= 1, "turns/cut_ratio"), "so no turn came to its end",
        "raise max_turn_tokens or max_completion_length, ask for shorter replies, or use a chat template whose end "
        "token the model knows",
    ),
    Alarm(
        "unused_tools", "no tool is called", "tools/call_frequency is 0", 10,
        outside(lambda calls: calls == 0, "tools/call_frequency"), "so the policy does not learn to use its tools",
        "use a model that knows tool calls, name the tools and show a call in the prompt, or begin with SFT on calls",
    ),
    Alarm(
        "failing_environments", "environments fail",
        f"episodes/timeout or episodes/environment_error is above {MANY_FAILURES}", 1,
        outside(lambda share: share > MANY_FAILURES, "episodes/timeout", "episodes/environment_error"),
        "so the affected episodes failed twice, and were left out of training",
        "look in the log for the call that failed, with its traceback, and correct the call. If the call was slow "
        "(episodes/timeout), you can raise environment_timeout or episode_timeout instead",
    ),
    Alarm(
        "preempted", "sequences are computed again",
        f"sampling/preemptions is above {MANY_PREEMPTED} times sampling/most_together", 3, preempted,
        "so the engine computed the tokens of evicted sequences again",
        "lower max_num_seqs to the number of sequences that the cache can hold at full length, enlarge the cache with "
        'kv_cache_bytes or gpu_memory_utilization, or halve the cache entries with kv_cache_dtype="fp8"',
    ),
    Alarm(
        "constant_reward", "a reward function is constant",
        "for a reward function NAME, rewards/NAME/std is 0 and rewards/NAME/mean does not change", CONSTANT_STEPS,
        partial(constant, "NAME"),  # `Alarms.expanded` replaces NAME by each reward function's name
        "so the model learns nothing from this function",
        "if every completion deserves this reward, leave the function out or make it stricter; if not, check that the "
        "function reads the right columns and the format of the completions",
    ),
)


class Alarms:
    """The alarms of a run. Their memory is in the trainer's state, so checkpoints save it."""

    def __init__(self, state: TrainerState, nothing_to_learn_steps: int, cache_dtype: str = AUTO) -> None:
        """`cache_dtype` is the dtype of the sampler's key-value cache."""
        self.state = state
        changes: dict[str, dict[str, Any]] = {"nothing_to_learn": {"patience": nothing_to_learn_steps},
                                              "mismatch": {"condition": partial(mismatch, MISMATCH_K3[cache_dtype])}}
        self.alarms = [replace(alarm, **changes.get(alarm.name, {})) for alarm in ALARMS]

    def watch(self, line: Line) -> dict[str, float]:
        """Check a step's metrics and log the due warnings; return `alarms/NAME` = 1 for each alarm that warned."""
        return {f"alarms/{alarm.name}": 1.0 for key, alarm in self.expanded(line) if self.fires(key, alarm, line)}

    def expanded(self, line: Line) -> Iterator[tuple[str, Alarm]]:
        """Yield each alarm with its key in the saved state; `constant_reward` comes once per reward function."""
        for alarm in self.alarms:
            if alarm.name != "constant_reward":
                yield alarm.name, alarm
                continue
            for metric in line:
                if metric.startswith("rewards/") and metric.endswith("/std"):
                    name = metric.removeprefix("rewards/").removesuffix("/std")
                    yield f"{alarm.name}/{name}", replace(alarm, condition=partial(constant, name))

    def fires(self, key: str, alarm: Alarm, line: Line) -> bool:
        """Check a step's metrics with one alarm; return whether it warned."""
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
