"""Checks of the prompts: unusable rows, lengths, number, and duplicates."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.data.stream import IMAGES
from lowmem_grpo.trainer.preflight.subject import Subject, bit_reversed
from lowmem_grpo.types import Finding

FEW = 64  # rows whose prompts for a teacher, or stored completions, are looked at; they may be long
MANY_ALIKE = 0.1  # share of rows that may repeat the prompt of another row
BLOCK = 64  # neighbouring rows compared together, since copies of a prompt are often adjacent
SECONDS = 0.3  # after one block, no further rows are compared once this time has passed
CUT_FIX = {False: "truncate_prompts=True", True: "truncation_mode='keep_start'"}  # in GRPO, in fine-tuning
SMALLER = "from_pretrained(max_pixels=...) makes images smaller, and no prompt with images is cut"
USUAL_STEPS, USUAL_ROWS = 300, 500
BALANCE = (0.75, 1.75)  # KTO's equation 8 wants weights times numbers of the labels at 1 to 4/3; a sample is less exact


def unreadable(subject: Subject) -> Iterator[Finding]:
    """Find rows that cannot become a prompt, for example messages that the chat template refuses."""
    failed = Counter((type(looked.error).__name__, str(looked.error)) for looked in subject.sample.rows if looked.error)
    for (kind, message), count in failed.items():
        if kind == "DataError":
            yield Finding("error", "", *split_advice(message))
            continue
        line = (message.strip().splitlines() or ["no message"])[0][:200]
        yield Finding("error", "", f"{subject.sample.share(count)} cannot be made into a prompt ({kind}: {line})",
                      "change these rows, or tokenizer.chat_template (some templates refuse system messages, some "
                      "messages of user and assistant that do not alternate)")


def split_advice(message: str) -> tuple[str, str]:
    """Return (problem, fix) of a message that ends in ': FIX' or '; FIX'."""
    for sign in (": ", "; "):
        if sign in message:
            problem, _, fix = message.rpartition(sign)
            return problem, fix
    return message, "change the dataset"


def unusable(subject: Subject) -> Iterator[Finding]:
    """Find rows that are skipped because the prompt is empty or has a wrong type. It is an error if no row is left."""
    reasons = Counter(looked.reason for looked in subject.sample.rows if looked.reason)
    listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    if reasons and reasons.total() == len(subject.sample.rows):
        yield Finding("error", "", f"no row of the dataset can be used: {listed}",
                      f"correct the column {subject.sample.encoder.source}")
    elif reasons:
        yield Finding("warning", "", f"{subject.sample.share(reasons.total())} will be skipped: {listed}",
                      "correct or remove these rows")


def too_long(subject: Subject) -> Iterator[Finding]:
    """Find rows that are skipped or cut because they are longer than `max_prompt_length` or, in SFTTrainer,
    `max_length`. It is an error if no row is left, and a note if long rows are cut."""
    sample, args = subject.sample, subject.args
    over = [looked for looked in sample.usable if looked.tokens > sample.limit]
    if getattr(args, "truncate_prompts", False) or getattr(args, "truncation_mode", None):
        if cut := [looked.tokens for looked in over if not looked.image_tokens]:
            yield Finding("note", "", f"{sample.share(len(cut))} will be cut to {sample.limit} tokens; the longest has "
                          f"{max(cut)}", "")
        over = [looked for looked in over if looked.image_tokens]
    if not over:
        return
    longest = max(over, key=lambda looked: looked.tokens)
    none_left = len(over) == len(sample.usable)
    setting = "max_length" if not subject.does_sampling else "max_prompt_length"
    bound, fix = f"{setting} ({sample.limit})", f"raise {setting}, or shorten the rows"
    if getattr(args, setting) is None:
        bound = f"the {sample.limit} tokens that the context of {subject.context} leaves"
        fix = "load with a larger max_seq_length, or shorten the rows"
    which = "no row of the dataset can be used" if none_left else f"{sample.share(len(over))} will be skipped"
    images, instead = longest.image_tokens, f"{CUT_FIX[not subject.does_sampling]} cuts them instead"
    yield Finding("error" if none_left else "warning", "", f"{which}: longer than {bound}, the longest has "
                  f"{longest.tokens} tokens" + (f", {images} of them of images" if images else ""),
                  f"{fix}; {SMALLER if images else instead}")


def too_long_for_teacher(subject: Subject) -> Iterator[Finding]:
    """Find rows that leave a teacher too little room for what only it is told: a part of it is read, or the completions
    are not distilled. It is an error if no completion is distilled."""
    prompts, rows = subject.teacher_prompts, subject.sample.fitting[:FEW]
    if prompts is None or not rows or (prompts.same and not prompts.tells):
        return
    lengths = [prompts.lengths(looked.row) for looked in rows]
    over, unread = (sum(length[which] > prompts.limit for length in lengths) for which in (0, 1))
    results = {"the end of what only the teacher is told is cut": over - unread, "no completion is distilled": unread}
    if not over:
        return
    fix = ("raise max_reprompt_len" if prompts.limit == subject.args.max_reprompt_len else
           "load with a larger max_seq_length, or lower max_completion_length")
    yield Finding("error" if unread == len(rows) else "warning", "", f"{over} of {len(rows)} rows make a prompt of the "
                  f"teacher that is longer than {prompts.limit} tokens, the longest has {max(lengths)[0]}: "
                  + ", ".join(f"{what} ({count})" for what, count in results.items() if count),
                  f"{fix}, or shorten the rows")


def unfit_completions(subject: Subject) -> Iterator[Finding]:
    """Find rows whose stored completions or teacher's tokens cannot be trained on."""
    for which, sample in subject.datasets if subject.stored is not None else ():
        faults, rows = [], sorted(sample.fitting[:FEW], key=lambda looked: looked.index)
        for looked in rows:
            try:
                subject.stored.rollout(replace(looked.prompt, index=looked.index))  # type: ignore[type-var]
            except DataError as error:
                faults.append(str(error))
        if faults:
            yield Finding("error", "", f"{len(faults)} of {len(rows)} rows of the {which} cannot be trained on; "
                          f"{faults[0]}", "correct these rows, or leave them out (dataset.filter)")


def few_rows(subject: Subject) -> Iterator[Finding]:
    """Find a dataset with too few rows for one generation batch, so that each batch is smaller."""
    needed = subject.args.prompts_per_generation
    whole = len(subject.sample.rows) == subject.sample.total
    rows = len(subject.sample.fitting) if whole else subject.sample.total
    if 0 < rows < needed:
        yield Finding("warning", "", f"one generation takes {needed} prompts and the dataset has {rows}, so each "
                      f"has only {rows}", "lower per_device_train_batch_size, gradient_accumulation_steps or "
                      "steps_per_generation, or add rows")


def alike(subject: Subject) -> Iterator[Finding]:
    """Find a dataset in which more than 10% of the prompts repeat another prompt. Since copies may be adjacent, more
    rows are read than the sample has. If an environment makes the task, equal prompts are normal: nothing is found."""
    if subject.turns is not None and subject.turns.begins:
        return
    repeated, seen = count_repeats(subject.sample.dataset)
    if repeated > MANY_ALIKE * max(seen, 1):
        rows = f"{seen} rows" + (" compared" if seen < subject.sample.total else "")
        yield Finding("warning", "", f"{repeated} of {rows} repeat the prompt of another row",
                      "remove the duplicates; to train longer, raise num_train_epochs")


def count_repeats(dataset: Any) -> tuple[int, int]:
    """Return the number of rows that repeat an earlier prompt, and of rows compared (not all rows if time runs out)."""
    known: set[int] = set()
    seen, began = 0, time.monotonic()
    for index in in_blocks(len(dataset)):
        if prompt := prompt_of(dataset, index):
            known.add(hash(repr(prompt)))
            seen += 1
        if seen >= BLOCK and time.monotonic() - began > SECONDS:
            break
    return seen - len(known), seen


def in_blocks(total: int) -> Iterator[int]:
    """Yield the indices of all rows in blocks, ordered so that every prefix is spread over the dataset."""
    for place in bit_reversed(-(-total // BLOCK)):
        yield from range(place * BLOCK, min((place + 1) * BLOCK, total))


def prompt_of(dataset: Any, index: int) -> Any:
    """Return a row's prompt; None for a row that cannot be read, or whose pictures tell it from others."""
    try:
        row = dataset[index]
        return None if any(row.get(name) is not None for name in IMAGES) else row["prompt"]
    except Exception:  # noqa: BLE001 - a row may raise anything; `unreadable` reports it
        return None


def small_scale(subject: Subject) -> Iterator[Finding]:
    """Find a run with fewer than 500 rows or 300 optimizer steps. This is no error, but may prevent progress."""
    few = [f"{count} {what} ({usual} or more are usual)" for count, usual, what in (
        (subject.state.max_steps, USUAL_STEPS, "steps"), (subject.sample.total, USUAL_ROWS, "rows")) if count < usual]
    if few:
        yield Finding("note", "", f"the run has {' and '.join(few)}",
                      f"use more before you conclude that a {'reward' if subject.rewards else 'teacher'} does not work")


def unequal_labels(subject: Subject) -> Iterator[Finding]:
    """Find rows of which one label outweighs the other by far, in KTO (arXiv 2402.01306, equation 8)."""
    labels = Counter(bool(looked.row.get("label")) for looked in subject.sample.usable)
    weights = {True: subject.args.desirable_weight, False: subject.args.undesirable_weight}
    if not labels or 0.0 in weights.values():  # a weight of 0 is a choice: its rows only serve the KL term
        return
    if missing := [label for label in weights if not labels[label]]:
        yield Finding("warning", "", f"{subject.sample.share(labels[not missing[0]])} have label {not missing[0]}, and "
                      "KTO learns from both labels", f"add rows with label {missing[0]}")
    elif not BALANCE[0] <= (balance := labels[True] * weights[True] / (labels[False] * weights[False])) <= BALANCE[1]:
        yield Finding("warning", "", f"label True outweighs label False by {balance:.2f} to 1 (rows times desirable_"
                      "weight, to rows times undesirable_weight); KTO's paper wants 1 to 1.33",
                      f"set desirable_weight={weights[True] / balance:.2g}, or undesirable_weight="
                      f"{weights[False] * balance:.2g}")
