"""Checks of the columns that rewards read. No function is called."""

import inspect
from collections.abc import Iterator
from typing import Any

from lowmem_grpo.preflight.rows import RowSample
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.rewards.calling.contract import (
    NOT_PASSED,
    OF_EPISODES,
    RESERVED,
    MissingColumnError,
    RewardError,
    RewardFunction,
    bind,
    passed_columns,
)
from lowmem_grpo.rewards.checking.diagnosis import failed, faulty_rows
from lowmem_grpo.runs.findings import Finding


def reserved_names(subject: Subject) -> Iterator[Finding]:
    """A column with the name of an argument of reward functions."""
    for which, sample in samples_of(subject):
        try:
            passed_columns({name: [] for name in sample.columns})
        except RewardError as error:
            problem, _, fix = str(error).removeprefix("dataset ").partition("; ")
            yield Finding("error", "", f"{which} {problem}", f"{fix} (dataset.rename_column)")


def missing_columns(subject: Subject) -> Iterator[Finding]:
    """A function that needs a column that does not exist. A `rollout_func` brings columns that nobody knows yet."""
    if subject.scorer is not None and subject.scorer.late_columns:
        return
    seconds = subject.args.reward_limit
    for which, sample in samples_of(subject):
        for name, function in functions_of(subject):
            try:
                bind(name, function, arguments_of(sample, subject))
            except MissingColumnError as error:
                found = failed(name, error, sample.columns, seconds, seconds)
                yield Finding("error", name, found.problem.replace("the dataset's", f"the {which}'s"), found.fix)


def empty_columns(subject: Subject) -> Iterator[Finding]:
    """A column that a function reads, and that is None in every sampled row."""
    sample = subject.sample
    empty = [name for name in sample.columns if all(looked.row.get(name) is None for looked in sample.usable)]
    for name, function in functions_of(subject):
        read = inspect.signature(function).parameters
        for column in [column for column in empty if column in read and sample.usable]:
            yield Finding("warning", name, f"it reads the column {column!r}, which is None in "
                          f"{sample.share(len(sample.usable))}", "fill the column with what the function compares with")


def unjudged_rows(subject: Subject) -> Iterator[Finding]:
    """Rows that a function can never judge, for example tests that no code can pass."""
    for which, sample in samples_of(subject):
        rows = [(looked.index, looked.row) for looked in sorted(sample.fitting, key=lambda looked: looked.index)]
        for name, function in functions_of(subject):
            yield from faulty_rows(name, function, rows, f"{which} row".removeprefix("dataset "))


def unusable_evaluation(subject: Subject) -> Iterator[Finding]:
    """An evaluation dataset without a usable row."""
    sample = subject.eval_sample
    if sample is None or sample.fitting:
        return
    first = sample.rows[0]
    reason = first.reason or str(first.error or f"prompt longer than {sample.limit} tokens")
    yield Finding("error", "", f"no row of the evaluation dataset can be used; the first one: {reason}",
                  "correct its column `prompt`, or leave the dataset out")


def functions_of(subject: Subject) -> list[tuple[str, RewardFunction]]:
    """(name, function) of every reward; none in fine-tuning."""
    scorer = subject.scorer
    return [] if scorer is None else list(zip(scorer.names, scorer.funcs, strict=True))


def samples_of(subject: Subject) -> list[tuple[str, RowSample]]:
    """The name and the sampled rows of each dataset that rewards see."""
    evaluation = [] if subject.eval_sample is None else [("evaluation dataset", subject.eval_sample)]
    return [("dataset", subject.sample), *evaluation]


def arguments_of(sample: RowSample, subject: Subject) -> dict[str, Any]:
    """Every argument that a function may have, by name."""
    columns = [name for name in sample.columns if name not in NOT_PASSED]
    episodes = OF_EPISODES if subject.scorer is not None and subject.scorer.episodes else ()
    return {name: [] for name in (*columns, *RESERVED, *episodes, "completion_ids")}
