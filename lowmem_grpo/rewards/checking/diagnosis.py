"""Turns trials of reward functions into findings, each with what to do about it."""

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any

from lowmem_grpo.rewards.calling.contract import MissingColumnError, TooLateError, unwrap
from lowmem_grpo.rewards.checking.result import Trial
from lowmem_grpo.rewards.reward import Reward
from lowmem_grpo.runs.findings import Finding

LOW_SHARE = 0.25  # of groups with signal; below this most samples of a step teach nothing
MOSTLY_CUT = 0.5  # share of completions that reached the length limit
COLUMN_FIX = "rename a column of the dataset (dataset.rename_column), or the one that the function reads"
OF_EPISODES_FIX = ("give the trainer tools or an environment_factory; rewards.check samples single answers, so try the "
                   "function in a run with max_steps=1")
CONTRACT_FIX = "return a list with one float or None for each completion"


def findings_of(
    trials: list[Trial], group_size: int, columns: list[str], limit: float, allowed: float, per_step: int
) -> list[Finding]:
    """Findings about functions. A function may take `limit` seconds here, and `allowed` seconds in the
    run for the `per_step` completions of a step."""
    found: list[Finding] = []
    telling = any(trial.weight and any(map(differs, in_groups(trial.pays, group_size))) for trial in trials)
    for trial in trials:
        if trial.error is not None:
            found.append(failed(trial.name, trial.error, columns, limit, allowed))
            continue
        found += unlike_numbers(trial)
        found += without_judgement(trial)
        found += no_difference(trial, group_size, telling)
        found += about_the_empty(trial)
        found += slow(trial, allowed, per_step)
    found += equal_ones([trial for trial in trials if len(set(trial.paid)) > 1])
    return found


def failed(name: str, error: Exception, columns: list[str], limit: float, allowed: float) -> Finding:
    """Why a function gave no rewards, and what it needs."""
    if isinstance(error, TooLateError):
        severity = "error" if limit >= allowed else "warning"
        return Finding(severity, name, f"it did not return within {limit:g} s",
                       "make it faster, or async if it waits; GRPOConfig(reward_timeout=...) is the limit of a run, "
                       "check(timeout=...) the limit of this check")
    missing = missing_column(error, columns)
    if missing:
        fix = OF_EPISODES_FIX if "environment_factory" in missing else COLUMN_FIX
        return Finding("error", name, f"{missing}; the dataset's columns are {', '.join(columns)}", fix)
    problem = "it " + str(error).removeprefix(f"reward function {name} ")
    fix = CONTRACT_FIX if problem.startswith("it returned") else "correct the function: a run would stop here"
    return Finding("error", name, problem, fix)


def missing_column(error: Exception, columns: list[str]) -> str | None:
    """Which column is missing, if that is why the function failed."""
    if isinstance(error, MissingColumnError):
        return "it requires " + str(error).partition(" requires ")[2].partition("; available")[0]
    key = error.__cause__.args[0] if isinstance(error.__cause__, KeyError) and error.__cause__.args else None
    return f"it reads the column {key!r}" if isinstance(key, str) and key not in columns else None


def faulty_rows(
    name: str, func: Any, rows: Iterable[tuple[int, dict[str, Any]]], which: str = "row"
) -> Iterator[Finding]:
    """Rows, with their numbers in the dataset, that a function can never judge."""
    reward = unwrap(func)
    if not isinstance(reward, Reward):
        return
    looked = [(number, reward.fault_of_row(row)) for number, row in rows]
    faults = [(number, fault) for number, fault in looked if fault]
    if faults:
        numbers = ", ".join(str(number) for number, _ in faults[:10]) + (", ..." if len(faults) > 10 else "")
        yield Finding("error", name, f"it can never judge {len(faults)} of {len(looked)} {which}s (number {numbers}); "
                      f"{which} {faults[0][0]}, column {reward.columns[0]!r}: {faults[0][1]}",
                      "correct these rows, or leave them out (dataset.filter); an empty column is None")


def unlike_numbers(trial: Trial) -> Iterator[Finding]:
    """It returned NaN or infinity, or values that had to be made into floats."""
    if trial.invalid:
        yield Finding("error", trial.name, f"NaN or infinity for {trial.invalid} of {len(trial.pays)} completions; a "
                      "run makes no step on their groups",
                      "look for a division by zero or an overflow; to give no reward, return None")
    if trial.converted:
        yield Finding("note", trial.name, f"it returns {' and '.join(trial.converted)}, taken as floats",
                      "return a list of floats; True counts as 1.0, False as 0.0")


def without_judgement(trial: Trial) -> Iterator[Finding]:
    """It could not judge, and says why. A run makes no step on such groups."""
    missing = sum(pay is None for pay in trial.pays) - trial.invalid
    if trial.trouble is not None and missing:
        severity, problem = "warning" if trial.paid else "error", trial.trouble.problem
        yield Finding(severity, trial.name, f"None for {missing} of {len(trial.pays)} completions: {problem}",
                      trial.trouble.fix)


def silent(trial: Trial) -> Iterator[Finding]:
    """It has no opinion on anything, and does not say why."""
    if not trial.paid and not trial.invalid and trial.trouble is None:
        yield Finding("warning", trial.name, f"None for all {len(trial.pays)} completions",
                      "check that its column holds labels that it can read")


def no_difference(trial: Trial, group_size: int, telling: bool = False) -> Iterator[Finding]:
    """It pays the same for all completions, or for all of each group, and so teaches nothing. If other functions differ
    (`telling`), a reward that all completions earn is no mistake: for example, all may keep a format."""
    if not trial.paid:
        yield from silent(trial)
    elif len(set(trial.paid)) == 1 and trial.paid[0] * trial.weight > 0 and telling:
        yield Finding("note", trial.name, f"it pays {trial.paid[0]:g} for all {len(trial.paid)} completions: all earn "
                      "it", "nothing, if this is intended; if it should tell them apart, grade in smaller steps")
    elif len(set(trial.paid)) == 1:
        yield Finding("warning", trial.name, f"it pays {trial.paid[0]:g} for all {len(trial.paid)} completions",
                      "grade in smaller steps, choose easier prompts, or teach the format first (SFT warm-up)")
    elif not any(differs(group) for group in in_groups(trial.pays, group_size)):
        yield Finding("warning", trial.name, "its pay never differs inside a group, so it gives no advantage",
                      "let it depend on the completion, not only on the prompt")


def about_the_empty(trial: Trial) -> Iterator[Finding]:
    """It fails on an empty completion, or pays for it, which is the easiest thing for a policy to learn."""
    if trial.empty_error is not None:
        yield Finding("error", trial.name, f"on an empty completion {trial.empty_error}"[:300],
                      "handle the empty text: a model can end its answer at once")
    pays = [pay * trial.weight for pay in trial.empty if pay is not None]
    if pays and max(pays) > 0 and len(set(trial.paid)) > 1:
        best = max(pay * trial.weight for pay in trial.paid)
        yield Finding("warning", trial.name,
                      f"it pays {max(pays):g} for the empty answer; the best sample got {best:g}",
                      "pay nothing for an empty completion, or make sure that a right answer pays much more")


def slow(trial: Trial, allowed: float, per_step: int) -> Iterator[Finding]:
    """At this pace the completions of a step take longer than the run allows."""
    expected = trial.seconds * per_step / max(len(trial.pays), 1)
    if expected > allowed and trial.own_limit is None:
        yield Finding("warning", trial.name, f"{trial.seconds:.1f} s for {len(trial.pays)} completions: the {per_step} "
                      f"of a step may take {expected:.0f} s, and reward_timeout is {allowed:g} s",
                      "make it faster, or async if it waits, or set GRPOConfig(reward_timeout=...)")


def equal_ones(trials: list[Trial]) -> Iterator[Finding]:
    """Two functions that always pay the same count one thing twice."""
    for first, second in combinations(trials, 2):
        if first.pays == second.pays:
            yield Finding("warning", second.name,
                          f"on all {len(second.pays)} completions it pays what {first.name} pays",
                          "leave one of them out, and give the other one twice the weight if it should count double")


def about_signal(share: float, with_signal: int, groups: int, failed_functions: int) -> list[Finding]:
    """There are few groups whose completions differ in reward, and only these teach."""
    if share >= LOW_SHARE:
        return []
    without = f" (without the {failed_functions} functions that failed)" if failed_functions else ""
    alike = "in the others all completions earn the same" if with_signal else (
        "in each group all completions earn the same, and there is no gradient")
    return [Finding("warning", "", f"{with_signal} of {groups} groups carry signal{without}, {alike}",
                    "choose prompts that are sometimes solved, take a stronger model, teach the format first "
                    "(SFTTrainer), grade in smaller steps, or raise num_generations")]


def about_length(cut: float) -> list[Finding]:
    """A share `cut` of the completions reached the longest length, and that is most of them."""
    if cut <= MOSTLY_CUT:
        return []
    return [Finding("warning", "", f"{cut:.0%} of the completions were cut off at max_completion_length, before any "
                    "answer at their end", "raise max_completion_length, or ask for shorter answers")]


def differs(pays: list[float | None]) -> bool:
    """Whether the numbers among them are not all equal."""
    return len({pay for pay in pays if pay is not None}) > 1


def in_groups(values: list[float | None], size: int) -> list[list[float | None]]:
    """The values of P * G completions as P lists of G = `size`."""
    return [values[start : start + size] for start in range(0, len(values), size)]
