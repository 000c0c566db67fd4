"""Checks of the prompts: their rows, lengths and number, repetitions, and the chat template."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lowmem_grpo.preflight.rows import spread
from lowmem_grpo.preflight.subject import Messages, Subject
from lowmem_grpo.runs.findings import Finding

ANSWER = "Forty-two"  # the answer with which a template is tried
MANY_ALIKE = 0.1  # share of rows that may repeat the prompt of another row
BLOCK = 64  # neighbouring rows: copies of a prompt often stand side by side
SECONDS = 0.3  # after one block, no further rows are compared once this time has passed
CUT_FIX = {False: "truncate_prompts=True", True: "truncation_mode='keep_start'"}  # in GRPO, in fine-tuning
USUAL_STEPS, USUAL_ROWS = 300, 500
NO_GENERATION_FIX = "end the template in {% if add_generation_prompt %}...{% endif %} with that text"


def unreadable(subject: Subject) -> Iterator[Finding]:
    """Rows that would end the run when they are drawn: without a chat template, refused by it, or broken."""
    failed = Counter(f"{type(looked.error).__name__}\n{looked.error}" for looked in subject.sample.rows if looked.error)
    for words, count in failed.items():
        kind, _, message = words.partition("\n")
        if kind == "DataError":
            yield Finding("error", "", *split_advice(message))
        else:
            why = f"{kind}: {one_line(message)}"
            yield Finding("error", "", f"{subject.sample.share(count)} cannot be made into a prompt ({why})",
                          "change these rows, or tokenizer.chat_template (some templates take no system message, some "
                          "only user and assistant in turns)")


def unusable(subject: Subject) -> Iterator[Finding]:
    """Rows that will be skipped for a reason other than their length."""
    reasons = Counter(looked.reason for looked in subject.sample.rows if looked.reason)
    if not reasons:
        return
    listed = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
    if sum(reasons.values()) == len(subject.sample.rows):
        yield Finding("error", "", f"no row of the dataset can be used: {listed}", "correct the column `prompt`")
    else:
        yield Finding("warning", "", f"{subject.sample.share(sum(reasons.values()))} will be skipped: {listed}",
                      "correct or remove these rows")


def too_long(subject: Subject) -> Iterator[Finding]:
    """Rows that will be skipped for their length."""
    sample = subject.sample
    long = [looked.tokens for looked in sample.usable if looked.tokens > sample.limit]
    if not long:
        return
    if cutting(subject):
        yield Finding("note", "", f"{sample.share(len(long))} will be cut to {sample.limit} tokens, the longest of "
                      f"{max(long)}", "")
        return
    none_left = len(long) == len(sample.usable)
    setting = "max_length" if subject.scorer is None else "max_prompt_length"
    bound, fix = f"{setting} ({sample.limit})", f"raise {setting}, or shorten the rows"
    if getattr(subject.args, setting) is None:
        bound = f"the {sample.limit} tokens that the context of {subject.context} leaves"
        fix = "load with a larger max_seq_length, or shorten the rows"
    fix += f"; {CUT_FIX[subject.scorer is None]} cuts them instead"
    which = "no row of the dataset can be used" if none_left else f"{sample.share(len(long))} will be skipped"
    yield Finding(
        "error" if none_left else "warning", "", f"{which}: longer than {bound}, the longest has {max(long)} tokens",
        fix,
    )


def cutting(subject: Subject) -> bool:
    """Whether longer rows are cut, and not left out."""
    return bool(getattr(subject.args, "truncate_prompts", False) or getattr(subject.args, "truncation_mode", None))


def few_rows(subject: Subject) -> Iterator[Finding]:
    """Fewer rows than one generation needs."""
    needed = subject.args.prompts_per_generation
    whole = len(subject.sample.rows) == subject.sample.total
    rows = len(subject.sample.fitting) if whole else subject.sample.total
    if 0 < rows < needed:
        yield Finding("warning", "", f"one generation needs {needed} prompts and the dataset has {rows}, so some are "
                      "repeated within it", "lower per_device_train_batch_size, gradient_accumulation_steps or "
                      "steps_per_generation, or add rows")


def alike(subject: Subject) -> Iterator[Finding]:
    """Prompts that occur more than once. This compares more rows than the sample has: copies may stand side by side.
    Where an environment makes the task, equal prompts say nothing."""
    if subject.turns is not None and subject.turns.begins:
        return
    repeated, seen = count_repeats(subject.sample.dataset)
    if repeated > MANY_ALIKE * max(seen, 1):
        rows = f"{seen} rows" + (" compared" if seen < subject.sample.total else "")
        yield Finding("warning", "", f"{repeated} of {rows} repeat the prompt of another row",
                      "remove the duplicates; to train longer, raise num_train_epochs")


def count_repeats(dataset: Any) -> tuple[int, int]:
    """(rows that repeat an earlier prompt, rows compared). Compares the whole dataset if there is time, else blocks
    spread over it. Rows without a prompt, and rows that cannot be read, do not count."""
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
    """All rows in blocks, in an order whose beginnings are spread over the dataset."""
    for place in spread(-(-total // BLOCK)):
        yield from range(place * BLOCK, min((place + 1) * BLOCK, total))


def prompt_of(dataset: Any, index: int) -> Any:
    """The prompt of a row; None for a broken row."""
    try:
        return dataset[index]["prompt"]
    except Exception:  # noqa: BLE001 - a row may raise anything; `unreadable` reports it
        return None


def small_scale(subject: Subject) -> Iterator[Finding]:
    """Few steps or rows by the rules of thumb of guides to GRPO: not a mistake, but a possible cause of no progress."""
    few = [f"{found} {what} ({usual} or more are usual)" for found, usual, what in (
        (subject.state.max_steps, USUAL_STEPS, "steps"), (subject.sample.total, USUAL_ROWS, "rows")) if found < usual]
    if few:
        yield Finding("note", "", f"the run has {' and '.join(few)}", "use more before you judge a reward")


def no_generation_prompt(subject: Subject) -> Iterator[Finding]:
    """A template that adds nothing for the assistant's turn, although answers in it begin with a header."""
    for looked in subject.chats[:1]:
        messages = looked.row["prompt"]
        alone, ready = subject.render(messages, False), subject.render(messages, True)
        whole = answered(subject, messages)
        if whole is None or alone != ready or not whole.startswith(ready):
            continue
        head = whole[len(ready) :].partition(ANSWER)[0].strip()
        if head:
            yield Finding("warning", "", f"the chat template leaves out {head!r} at the end of a prompt, so the model "
                          "must write it before each answer", NO_GENERATION_FIX)


def left_out(subject: Subject) -> Iterator[Finding]:
    """Messages that the template leaves out."""
    dropped = Counter(
        message["role"] for looked in subject.chats for message in looked.row["prompt"]
        if message["role"] in ("system", "user") and looked.prompt and message["content"].strip()
        not in looked.prompt.text
    )
    for role, count in dropped.items():
        yield Finding("warning", "", f"the chat template leaves out the text of {count} {role} messages in the "
                      f"{len(subject.chats)} sampled prompts", "put the text into a message that the template keeps, "
                      "or set another tokenizer.chat_template")


def answered(subject: Subject, messages: Messages) -> str | None:
    """The text of the messages followed by an answer; None where the template does not allow that."""
    try:
        return subject.render([*messages, {"role": "assistant", "content": ANSWER}], False)
    except Exception:  # noqa: BLE001 - a template may raise anything; the prompt itself was rendered
        return None


def split_advice(message: str) -> tuple[str, str]:
    """(problem, fix) of a message that ends in ': FIX' or '; FIX'."""
    for sign in (": ", "; "):
        problem, found, fix = message.rpartition(sign)
        if found:
            return problem, fix
    return message, "change the dataset"


def one_line(text: str) -> str:
    """The first line, at most 200 characters."""
    return (text.strip().splitlines() or ["no message"])[0][:200]
