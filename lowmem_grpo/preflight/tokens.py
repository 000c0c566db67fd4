"""Checks of the tokens that end a completion, and of ids that the model does not have.

Padding and end may be the same token: masks come from lengths, never from comparing ids.
"""

from collections.abc import Iterator
from itertools import groupby, islice

from lowmem_grpo.data.examples import Example
from lowmem_grpo.preflight.prompts import ANSWER, answered
from lowmem_grpo.preflight.subject import Subject
from lowmem_grpo.runs.findings import Finding

STOP = "a string of vllm_sampling_params=SamplingParams(stop=...)"


def no_end(subject: Subject) -> Iterator[Finding]:
    """Only the longest length ends a completion."""
    if not subject.all_end_ids and not subject.end_texts and subject.scorer is not None:
        yield Finding("warning", "", "no token ends a completion: neither the tokenizer nor the model's generation "
                      "config names one, so each completion goes on to max_completion_length",
                      f"set tokenizer.eos_token, or {STOP}")


def other_end(subject: Subject) -> Iterator[Finding]:
    """The template ends an answer with a token that does not end a completion."""
    if not subject.all_end_ids:
        return
    for looked in subject.chats[:1]:
        whole = answered(subject, looked.row["prompt"])
        tail = "" if whole is None else whole.rpartition(ANSWER)[2]
        ids = subject.tokenizer(tail, add_special_tokens=False).input_ids if tail.strip() else []
        if not ids or subject.all_end_ids & {*ids} or any(text in tail for text in subject.end_texts):
            continue
        ends = " or ".join(repr(subject.tokenizer.decode([end])) for end in sorted(subject.all_end_ids))
        yield Finding("warning", "", f"the chat template ends an answer with {tail.strip()!r}, but only {ends} ends a "
                      "completion, so answers may go on to their longest length", f"set tokenizer.eos_token to the "
                      f"template's, or give {STOP}" if subject.scorer else "set tokenizer.eos_token to the template's")


def endless(subject: Subject) -> Iterator[Finding]:
    """Rows of fine-tuning with trained answers that hold no token that ends a completion."""
    ends = subject.all_end_ids
    ended = [[bool(ends & {*answer}) for answer in answers(looked.prompt)] for looked in subject.sample.fitting
             if isinstance(looked.prompt, Example)]
    names = " or ".join(repr(subject.tokenizer.decode([end])) for end in sorted(ends))
    never = "warning" if subject.sample.encoder.column == "input_ids" else "error"
    for which, severity, count in (("no answer of", never, sum(not any(row) for row in ended)),
                                   ("not every answer of", "warning", sum(any(row) > all(row) for row in ended))):
        if count and ends:
            yield Finding(severity, "", f"{which} {subject.sample.share(count)} is trained with a token that ends a "
                          f"completion ({names}), so a model does not learn to stop there", "let what is trained hold "
                          "the end token ({% generation %} marks in a chat template, labels, the parts of "
                          "train_on_responses_only), or set tokenizer.eos_token to what the chat template writes there")


def answers(example: Example) -> list[list[int]]:
    """Return the runs of trained tokens of an example."""
    trained = example.trained or [True] * len(example.completion_ids)
    runs = groupby(zip(trained, example.completion_ids, strict=True), lambda pair: pair[0])
    return [[token for _, token in run] for counts, run in runs if counts]


def unknown_ids(subject: Subject) -> Iterator[Finding]:
    """Ids without a row in the embedding: the model would fail on them, or never sample them."""
    rows, tokenizer = subject.embeddings, subject.tokenizer
    fix = ("use the model's own tokenizer. For tokens that you add, resize the model's embedding, save model and "
           "tokenizer in a folder, and load that")
    ends = sorted(end for end in subject.all_end_ids if end >= rows)
    if ends:
        severity = "error" if len(ends) == len(subject.all_end_ids) and not subject.end_texts else "warning"
        yield Finding(severity, "", f"the end token {ends[0]} is beyond the model's vocabulary of {rows}, so it is "
                      "never sampled", fix)
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= rows:
        yield Finding("error", "", f"the padding token {tokenizer.pad_token_id} is beyond the model's vocabulary of "
                      f"{rows}", fix)
    unknown = (token for looked in subject.sample.fitting if looked.prompt
               for token in (*looked.prompt.ids, *getattr(looked.prompt, "completion_ids", ())) if token >= rows)
    for token in islice(unknown, 1):
        yield Finding("error", "", f"a row contains the token {token} ({tokenizer.decode([token])!r}), but the "
                      f"model's vocabulary has {rows}", fix)
