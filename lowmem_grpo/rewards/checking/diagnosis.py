"""Trials of reward functions, each by itself, and the findings from the trials."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from lowmem_grpo.rewards.calling.contract import (
    MissingColumnError,
    RewardError,
    RewardFunction,
    TooLateError,
    own_limit,
    unwrap,
)
from lowmem_grpo.rewards.calling.reward_batch import score_groups
from lowmem_grpo.rewards.calling.scorer import RewardScorer
from lowmem_grpo.rewards.reward import Reward, VerifiedReward
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Finding, RolloutGroup, by_severity

LOW_SHARE = 0.25  # share of groups with signal, below which most samples of a step teach nothing
MOSTLY_CUT = 0.5  # share of completions that reached the length limit
ENOUGH_GROUPS = 4  # with fewer groups, little can be said about each function and about the share with signal
COLUMN_FIX = "rename a column of the dataset (dataset.rename_column), or the one that the function reads"
OF_EPISODES_FIX = ("give the trainer tools or an environment_factory; rewards.check samples single answers, so try the "
                   "function in a run with max_steps=1")
CONTRACT_FIX = "return a list with one float or None for each completion"


@dataclass
class RewardTrial:
    """The results of one reward function on N sampled completions, and on an empty completion of each prompt."""

    name: str
    kind: str  # "verifier": it pays for a verdict; "reward": it computes the number itself
    weight: float
    pays: list[float | None] = field(default_factory=list)  # (N,) rewards; empty if it failed
    empty: list[float | None] = field(default_factory=list)  # rewards of an empty completion, one per prompt
    invalid: int = 0  # number of NaN and infinite rewards, which are None in `pays`
    converted: list[str] = field(default_factory=list)  # types that it returned other than numbers
    verdicts: float | None = None  # the share of right verdicts, if it is a "verifier"
    seconds: float = 0.0  # for the N completions
    error: Exception | None = None  # why it failed on the samples
    empty_error: Exception | None = None  # why it failed on empty completions only
    own_limit: float | None = None  # its own time limit in seconds, whatever the run allows
    trouble: Finding | None = None  # the reason that it gives for returning None

    @property
    def paid(self) -> list[float]:
        return [pay for pay in self.pays if pay is not None]


def try_all(scorer: RewardScorer, groups: list[RolloutGroup], state: TrainerState) -> list[RewardTrial]:
    functions = zip(scorer.names, scorer.funcs, scorer.weights, strict=True)
    return [try_function(name, func, weight, scorer, groups, state) for name, func, weight in functions]


def try_function(
    name: str, func: RewardFunction, weight: float, whole: RewardScorer, groups: list[RolloutGroup], state: TrainerState
) -> RewardTrial:
    """Return the trial of a function of the scorer `whole` on the rollouts, and on an empty completion of each prompt.
    """
    trial = RewardTrial(name, "verifier" if isinstance(unwrap(func), VerifiedReward) else "reward", weight)
    scorer = RewardScorer(func, None, whole.timeout)
    scorer.names, scorer.reads = [name], whole.reads
    scorer.said.add(name)  # conversions become findings here
    started = time.monotonic()
    try:
        scores = score_groups(scorer, groups, state)
    except RewardError as error:
        trial.error = error
        return trial
    finally:
        trial.seconds = time.monotonic() - started
    trial.pays, trial.invalid = scores.rewards[name], scores.invalid[name]
    trial.converted = scores.converted.get(name, [])
    trial.own_limit, trial.trouble = own_limit(func), getattr(unwrap(func), "trouble", None)
    trial.verdicts = scores.metrics.get(f"verdicts/{getattr(func, '__name__', name)}")
    try:
        trial.empty = score_groups(scorer, [without_text(group) for group in groups], state).rewards[name]
    except RewardError as error:
        trial.empty_error = error
    return trial


def without_text(group: RolloutGroup) -> RolloutGroup:
    rollout = replace(group.rollouts[0], completion_ids=[], rollout_logprobs=[], text="", turns=[], rewards={},
                      extras={})
    return replace(group, rollouts=[rollout])


def findings_of(trials: list[RewardTrial], group_size: int, columns: Sequence[str] = (), limit: float = math.inf,
                allowed: float = math.inf, per_step: int = 0) -> list[Finding]:
    """Return the findings about functions. The time limit of a function is `limit` seconds in these trials, and
    `allowed` seconds in a run, whose steps have `per_step` completions."""
    findings: list[Finding] = []
    telling = any(trial.weight and any(map(differs, in_groups(trial.pays, group_size))) for trial in trials)
    for trial in trials:
        if trial.error is not None:
            findings.append(failed(trial.name, trial.error, columns, limit, allowed))
            continue
        findings += unlike_numbers(trial)
        findings += without_judgement(trial)
        findings += no_difference(trial, group_size, telling)
        findings += about_the_empty(trial)
        findings += slow(trial, allowed, per_step)
    return [*findings, *equal_ones([trial for trial in trials if len(set(trial.paid)) > 1])]


def failed(name: str, error: Exception, columns: Sequence[str], limit: float = math.inf, allowed: float = math.inf,
           dataset: str = "dataset") -> Finding:
    """Return the finding that a function failed; for a missing column, with the `columns` of the `dataset`."""
    if isinstance(error, TooLateError):
        severity = "error" if limit >= allowed else "warning"
        return Finding(severity, name, f"it did not return within {limit:g} s",
                       "make it faster, or async if it waits; GRPOConfig(reward_timeout=...) is the limit of a run, "
                       "check(timeout=...) the limit of this check")
    missing = missing_column(error, columns)
    if missing:
        fix = OF_EPISODES_FIX if "environment_factory" in missing else COLUMN_FIX
        return Finding("error", name, f"{missing}; the {dataset}'s columns are {', '.join(columns)}", fix)
    problem = "it " + str(error).removeprefix(f"reward function {name} ")
    fix = CONTRACT_FIX if problem.startswith("it returned") else "correct the function: a run would stop here"
    return Finding("error", name, problem, fix)


def missing_column(error: Exception, columns: Sequence[str]) -> str | None:
    """Return words that name the missing column which made a function fail; None if it failed for another reason."""
    if isinstance(error, MissingColumnError):
        return "it requires " + str(error).partition(" requires ")[2].partition("; available")[0]
    key = error.__cause__.args[0] if isinstance(error.__cause__, KeyError) and error.__cause__.args else None
    return f"it reads the column {key!r}" if isinstance(key, str) and key not in columns else None


def faulty_rows(
    name: str, func: Any, rows: Iterable[tuple[int, dict[str, Any]]], which: str = "row"
) -> Iterator[Finding]:
    """Find rows, given as (index, row), that a function can never judge."""
    reward = unwrap(func)
    if not isinstance(reward, Reward):
        return
    looked = [(number, reward.fault_of_row(row)) for number, row in rows]
    faults = [(number, fault) for number, fault in looked if fault]
    if faults:
        numbers = ", ".join(str(number) for number, _ in faults[:10]) + (", ..." if len(faults) > 10 else "")
        column = f", column {reward.columns[0]!r}" if reward.columns else ""
        yield Finding("error", name, f"it can never judge {len(faults)} of {len(looked)} {which}s (number {numbers}); "
                      f"{which} {faults[0][0]}{column}: {faults[0][1]}",
                      "correct these rows, or leave them out (dataset.filter); an empty column is None")


def unlike_numbers(trial: RewardTrial) -> Iterator[Finding]:
    """Find NaN, infinity, and values that had to be converted to floats."""
    if trial.invalid:
        yield Finding("error", trial.name, f"NaN or infinity for {trial.invalid} of {len(trial.pays)} completions; a "
                      "run makes no step on their groups",
                      "look for a division by zero or an overflow; to give no reward, return None")
    if trial.converted:
        yield Finding("note", trial.name, f"it returns {' and '.join(trial.converted)}, taken as floats",
                      "return a list of floats; True counts as 1.0, False as 0.0")


def without_judgement(trial: RewardTrial) -> Iterator[Finding]:
    """Find a function that could not judge some completions, and say why. A run leaves their groups out of the step."""
    missing = len(trial.pays) - len(trial.paid) - trial.invalid
    if trial.trouble is not None and missing:
        yield Finding("warning" if trial.paid else "error", trial.name, f"None for {missing} of {len(trial.pays)} "
                      f"completions: {trial.trouble.problem}", trial.trouble.fix)


def silent(trial: RewardTrial) -> Iterator[Finding]:
    """Find a function that returned None for all completions, and gave no reason."""
    if not trial.paid and not trial.invalid and trial.trouble is None:
        yield Finding("warning", trial.name, f"None for all {len(trial.pays)} completions",
                      "check that its column holds labels that it can read")


def no_difference(trial: RewardTrial, group_size: int, telling: bool) -> Iterator[Finding]:
    """Find a function that pays the same for all completions, or within each group. If any function tells completions
    apart (`telling`), a positive reward that all earn is only a note."""
    same = f"it pays {trial.paid[0]:g} for all {len(trial.paid)} completions" if len(set(trial.paid)) == 1 else ""
    if not trial.paid:
        yield from silent(trial)
    elif same and trial.paid[0] * trial.weight > 0 and telling:
        yield Finding("note", trial.name, f"{same}: all earn it", "nothing, if this is intended; if it should tell "
                      "them apart, grade in smaller steps")
    elif same:
        yield Finding("warning", trial.name, same,
                      "grade in smaller steps, choose easier prompts, or teach the format first (SFT warm-up)")
    elif not any(differs(group) for group in in_groups(trial.pays, group_size)):
        yield Finding("warning", trial.name, "its pay never differs inside a group, so it gives no advantage",
                      "let it depend on the completion, not only on the prompt")


def about_the_empty(trial: RewardTrial) -> Iterator[Finding]:
    """Find a reward function that fails on an empty completion, or rewards it, which a policy would soon exploit."""
    if trial.empty_error is not None:
        yield Finding("error", trial.name, f"on an empty completion {trial.empty_error}"[:300],
                      "handle the empty text: a model can end its answer at once")
    pays = [pay * trial.weight for pay in trial.empty if pay is not None]
    if pays and max(pays) > 0 and len(set(trial.paid)) > 1:
        best = max(pay * trial.weight for pay in trial.paid)
        yield Finding("warning", trial.name,
                      f"it pays {max(pays):g} for the empty answer; the best sample got {best:g}",
                      "pay nothing for an empty completion, or make sure that a right answer pays much more")


def slow(trial: RewardTrial, allowed: float, per_step: int) -> Iterator[Finding]:
    """Find a function that would exceed its time limit on the completions of a step, at the pace of its trial."""
    expected = trial.seconds * per_step / max(len(trial.pays), 1)
    if expected > allowed and trial.own_limit is None:
        yield Finding("warning", trial.name, f"{trial.seconds:.1f} s for {len(trial.pays)} completions: the {per_step} "
                      f"of a step may take {expected:.0f} s, and reward_timeout is {allowed:g} s",
                      "make it faster, or async if it waits, or set GRPOConfig(reward_timeout=...)")


def equal_ones(trials: list[RewardTrial]) -> Iterator[Finding]:
    """Find pairs of functions that pay the same for every completion, and so count twice."""
    for first, second in combinations(trials, 2):
        if first.pays == second.pays:
            yield Finding("warning", second.name,
                          f"on all {len(second.pays)} completions it pays what {first.name} pays",
                          "leave one of them out, and give the other one twice the weight if it should count double")


def about_samples(groups: list[RolloutGroup], failures: int = 0, enough: bool = True,
                  taught: bool = False) -> Iterator[Finding]:
    """Report that most completions were cut off, or that few groups have signal: rewards that differ. `failures` counts
    the functions that failed. If `enough` is False, a lack of signal is reported only if no group has any; never if a
    policy is `taught`, which learns without."""
    with_signal, rollouts = groups_with_signal(groups), [rollout for group in groups for rollout in group.rollouts]
    cut = sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts)
    if cut > MOSTLY_CUT:
        yield Finding("warning", "", f"{cut:.0%} of the completions were cut off at max_completion_length, before any "
                      "answer at their end", "raise max_completion_length, or ask for shorter answers")
    if not taught and with_signal < LOW_SHARE * len(groups) and (enough or not with_signal):
        without = f" (without the {failures} functions that failed)" if failures else ""
        alike = "in the others all completions earn the same" if with_signal else (
            "in each group all completions earn the same, and there is no gradient")
        yield Finding("warning", "", f"{with_signal} of {len(groups)} groups carry signal{without}, {alike}",
                      "choose prompts that are sometimes solved, take a stronger model, teach the format first "
                      "(SFTTrainer), grade in smaller steps, or raise num_generations")


def about_rewards(groups: list[RolloutGroup], weights: Mapping[str, float], taught: bool = False) -> list[Finding]:
    """Return the findings about the rewards of a training step; `weights` are by function name. With fewer than
    ENOUGH_GROUPS groups, or if no group has signal, functions that pay the same for all completions are not listed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trials = [RewardTrial(name, "reward", weight, [rollout.rewards.get(name) for rollout in rollouts],
                    invalid=sum(name in rollout.invalid_rewards for rollout in rollouts))
              for name, weight in weights.items() if weight]
    enough = len(groups) >= ENOUGH_GROUPS
    if enough and groups_with_signal(groups):
        findings = findings_of(trials, len(groups[0].rollouts))
    else:
        mute = trials if enough or not any(trial.paid for trial in trials) else []
        findings = [finding for trial in mute for finding in silent(trial)]
        findings += [finding for trial in trials for finding in unlike_numbers(trial)]
    return by_severity([*findings, *about_samples(groups, enough=enough, taught=taught)])


def groups_with_signal(groups: list[RolloutGroup]) -> int:
    """Return the number of groups in which the rewards differ; groups marked as `unjudged` do not count."""
    return sum(not group.unjudged and differs([rollout.reward for rollout in group.rollouts]) for group in groups)


def differs(pays: list[float | None]) -> bool:
    return len({pay for pay in pays if pay is not None}) > 1


def in_groups(values: list[float | None], size: int) -> list[list[float | None]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
