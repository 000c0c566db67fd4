"""The table of checks, through which the code works and from which docs/preflight.md is generated; and the checks of
the columns that rewards read. No function is called."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lowmem_grpo.preflight import prompts, room, template
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.rewards.calling.contract import (
    NOT_PASSED,
    OF_EPISODES,
    RESERVED,
    MissingColumnError,
    RewardError,
    bind,
    passed_columns,
)
from lowmem_grpo.rewards.checking.diagnosis import failed, faulty_rows
from lowmem_grpo.runs.findings import Finding


def reserved_columns(subject: Subject) -> Iterator[Finding]:
    """Find columns with the name of an argument of reward functions."""
    for which, sample in subject.datasets:
        try:
            passed_columns({name: [] for name in sample.columns})
        except RewardError as error:
            problem, _, fix = str(error).removeprefix("dataset ").partition("; ")
            yield Finding("error", "", f"{which} {problem}", f"{fix} (dataset.rename_column)")


def missing_columns(subject: Subject) -> Iterator[Finding]:
    """Find functions that need a missing column. A `rollout_func` brings columns that nobody knows yet."""
    scorer = subject.scorer
    if scorer is None or scorer.late_columns:
        return
    others = (*RESERVED, *(OF_EPISODES if scorer.episodes else ()), "completion_ids")
    for which, sample in subject.datasets:
        available = dict.fromkeys([*(name for name in sample.columns if name not in NOT_PASSED), *others])
        for name, function in subject.functions:
            try:
                bind(name, function, available)
            except MissingColumnError as error:
                yield failed(name, error, sample.columns, dataset=which)


def empty_columns(subject: Subject) -> Iterator[Finding]:
    """Find columns that a function reads, and that are None in every sampled row."""
    sample = subject.sample
    empty = [name for name in sample.columns if all(looked.row.get(name) is None for looked in sample.usable)]
    for name, function in subject.functions if sample.usable else ():
        for column in [column for column in empty if column in inspect.signature(function).parameters]:
            yield Finding("warning", name, f"it reads the column {column!r}, which is None in "
                          f"{sample.share(len(sample.usable))}", "fill the column with what the function compares with")


def unjudged_rows(subject: Subject) -> Iterator[Finding]:
    """Find rows that a function can never judge, for example tests that no code can pass."""
    for which, sample in subject.datasets:
        rows = sorted(((looked.index, looked.row) for looked in sample.fitting), key=lambda pair: pair[0])
        for name, function in subject.functions:
            yield from faulty_rows(name, function, rows, f"{which} row".removeprefix("dataset "))


def unusable_evaluation(subject: Subject) -> Iterator[Finding]:
    """Find an evaluation dataset without a usable row."""
    sample = subject.eval_sample
    if sample is None or sample.fitting:
        return
    first = sample.rows[0]
    reason = first.reason or str(first.error or f"prompt longer than {sample.limit} tokens")
    yield Finding("error", "", f"no row of the evaluation dataset can be used; the first one: {reason}",
                  "correct its column `prompt`, or leave the dataset out")


@dataclass(frozen=True)
class Check:
    """One check. `severity` is the worst that it can find."""

    name: str
    severity: str
    finds: str
    look: Callable[[Subject], Iterable[Finding]]
    with_sft: bool = True  # it also applies to SFTTrainer
    of_rows: bool = False  # it looks at the rows of a dataset, which not every trainer has

    def fits(self, subject: Subject) -> bool:
        """Return whether it has something to look at."""
        return (self.with_sft or subject.scorer is not None) and not (self.of_rows and subject.without_rows)


CHECKS = (
    Check("rows", "error", "rows that cannot become a prompt: chat messages without a chat template (base models have "
          "none), a template that fails on a system message, a broken row", prompts.unreadable),
    Check("skipped rows", "error", "rows that will be skipped: empty prompts, wrong types; an error if none is left",
          prompts.unusable),
    Check("prompt lengths", "error", "prompts longer than `max_prompt_length`, or than the context minus "
          "`max_completion_length`; an error if none is left", prompts.too_long),
    Check("few rows", "warning", "fewer rows than one generation needs", prompts.few_rows,
          with_sft=False, of_rows=True),
    Check("duplicates", "warning", f"more than {prompts.MANY_ALIKE:.0%} of the prompts repeat another prompt",
          prompts.alike, with_sft=False, of_rows=True),
    Check("generation prompt", "warning", "a chat template that adds nothing for the assistant's turn",
          template.no_generation_prompt),
    Check("dropped messages", "warning", "a chat template that leaves out system or user messages", template.left_out),
    Check("answers without an end", "error", "rows of fine-tuning of which no trained token ends a completion; a "
          "warning where only some answers of a row have no end, and for rows of token ids", template.endless),
    Check("no end token", "warning", "neither the tokenizer nor the generation config names a token that ends a "
          "completion", template.no_end, with_sft=False),
    Check("another end token", "warning", "the chat template ends an answer with a token that does not end a "
          "completion", template.other_end),
    Check("unknown tokens", "error", "end, padding or prompt tokens beyond the model's vocabulary",
          template.unknown_ids),
    Check("turns", "error", "several turns with a chat template that has no tools, leaves messages out, refuses a user "
          "message behind an answer, or cannot render a history anew where `history=\"template\"` asks for it",
          template.not_rendered, with_sft=False),
    Check("rewritten history", "warning", "a chat template that rewrites what was sampled once more messages follow, "
          "before which of them, and what `history=\"template\"` then costs", template.rewritten, with_sft=False),
    Check("reserved columns", "error", "a dataset column with the name of an argument of reward functions",
          reserved_columns, with_sft=False),
    Check("missing columns", "error", "a reward function needs a column that the dataset or the evaluation dataset "
          "does not have", missing_columns, with_sft=False),
    Check("empty columns", "warning", "a reward function names a column that is None in every row",
          empty_columns, with_sft=False),
    Check("rows without a verdict", "error", "rows that a reward can never judge: for `code_passes_tests`, tests "
          "that are empty, cannot be read, or that no code can pass", unjudged_rows, with_sft=False),
    Check("evaluation rows", "error", "no row of the evaluation dataset can be used", unusable_evaluation,
          with_sft=False),
    Check("output_dir", "error", "the folder cannot be made, or cannot be written to", room.unwritable),
    Check("disk", "error", "no room for one checkpoint; a warning if there is no room for all of them (up to "
          "`save_total_limit`) and completions.jsonl", room.full_disk),
    Check("host memory", "warning", "with a card: little host memory is left beside offloaded layer inputs and a paged "
          "optimizer", room.little_host_memory),
    Check("plan", "warning", "the memory plan needs more than the card has", room.over_plan),
    Check("cache in 8 bits", "warning", "vLLM's keys and values are in 8 bits, and nothing corrects or measures how "
          "far its samples then differ from the trainer", room.cache_in_8_bits, with_sft=False),
    Check("bfloat16", "warning", "the run computes in bfloat16 on a card that only emulates it", room.emulated_dtype),
    Check("scale", "note", "fewer rows or steps than guides usually advise", prompts.small_scale, with_sft=False,
          of_rows=True),
)
