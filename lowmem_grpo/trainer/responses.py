"""`train_on_responses_only`, as in Unsloth: only the text that follows a response marker is trained."""

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowmem_grpo.data.examples import IGNORED, Example, Examples, each_of, shared_start
from lowmem_grpo.data.packing import PackEncoder
from lowmem_grpo.data.stream import Stream
from lowmem_grpo.trainer.sft import SFTTrainer

LOOKED_AT = 100  # the first rows, in which an answer must be found
QUESTION, ANSWER, NEXT = "\u2460q\u2460", "\u2461a\u2461", "\u2462n\u2462"  # texts that no template contains


def train_on_responses_only(
    trainer: SFTTrainer, instruction_part: str | None = None, response_part: str | None = None,
    force_match: bool = True, tokenizer: Any = None, return_function: bool = False, num_proc: int | None = None,
    last_response_only: bool = False,
) -> SFTTrainer:
    """Return the trainer, changed to train only the text between a `response_part` and the next `instruction_part` (or
    the end), such as "<|im_start|>assistant\\n" and "<|im_start|>user\\n". By default both parts come from the
    tokenizer's chat template. `last_response_only` trains only the last answer of a text. `force_match` and `num_proc`
    have no effect. ValueError for another kind of trainer, and if none of the first 100 rows has an answer."""
    if not isinstance(trainer, SFTTrainer):
        raise ValueError(f"train_on_responses_only takes an SFTTrainer; got a {type(trainer).__name__}")
    if return_function:
        raise ValueError("return_function=True is not supported: rows are encoded when they are needed, so there is no "
                         "function over a whole dataset. Leave it out")
    text = tokenizer or trainer.tokenizer
    if instruction_part is None or response_part is None:
        parts = parts_of(text)
        instruction_part, response_part = instruction_part or parts[0], response_part or parts[1]
    wrap = partial(ResponsesOnly, instruction=instruction_part, response=response_part, last_only=last_response_only)
    source: Any = trainer.source
    packs = isinstance(source.encoder, PackEncoder)
    rows, encoder = (source.dataset.rows, source.encoder.inner) if packs else (source.dataset, source.encoder)
    check_rows(rows, wrap(encoder))
    trainer.train_only(wrap)
    return trainer


@dataclass
class ResponsesOnly:
    """An encoder that trains only the answers in the examples of the encoder `inner`."""

    inner: Any
    instruction: str
    response: str
    last_only: bool = False

    def __getattr__(self, name: str) -> Any:
        if name == "inner" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    def encode(self, row: dict[str, Any]) -> Example | Examples | str:
        """Return the row's example (or examples), or the reason to skip the row."""
        example = self.inner.encode(row)
        if not isinstance(example, Examples):
            return example if isinstance(example, str) else self.answers_of(example)
        kept = [self.answers_of(part) for part in example.parts]
        parts = [part for part in kept if isinstance(part, Example)]
        return Examples(row, [], "", parts=parts) if parts else str(kept[0])

    def answers_of(self, example: Example) -> Example | str:
        """Return the example with only its answers trained, or the reason to skip it."""
        ids = example.input_ids
        trained = self.mask(ids)
        if trained is None:
            return "its tokens are not those of its text, so the answers in it cannot be found"
        both = [is_answer and label != IGNORED for is_answer, label in zip(trained, example.labels, strict=True)]
        if not any(both):
            return f"no answer after {self.response!r}"
        kept: Example | str = self.inner.example(example.row, example.text, ids, both, "text")
        return kept

    def mask(self, ids: list[int]) -> list[bool] | None:
        """Return a flag for each token, True in answers; None if tokenizing the decoded text gives other tokens."""
        tokenizer = self.inner.tokenizer
        text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] != ids:
            return None
        starts, trained = [start for start, _ in again["offset_mapping"]], [False] * len(ids)
        for span in self.spans(text):
            first, last = (bisect_left(starts, at) for at in span)
            if not {*ids[first:last]} & {*self.inner.end_ids}:
                last = self.inner.through_end(ids, last)  # in GLM's template the next part begins with the end token
            trained[first:last] = [True] * (last - first)
        return trained

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the (first, end) offsets of the answers, in characters."""
        answers, at = [], text.find(self.response)
        while at >= 0:
            begin = at + len(self.response)
            end = text.find(self.instruction, begin)
            end = len(text) if end < 0 else end
            answers.append((begin, end))
            at = text.find(self.response, end)
        return answers[-1:] if self.last_only else answers


def check_rows(dataset: Any, encoder: ResponsesOnly) -> None:
    """Raise ValueError if none of the first rows has an answer. Streams are skipped, as reading uses them up."""
    if isinstance(dataset, Stream):
        return
    rows = [dataset[index] for index in range(min(LOOKED_AT, len(dataset)))]
    reasons = [encoder.encode(row) for row in rows]
    if all(isinstance(reason, str) for reason in reasons):
        first = encoder.inner.encode(rows[0])
        shown = first if isinstance(first, str) else encoder.inner.tokenizer.decode(each_of(first)[0].input_ids)
        raise ValueError(f"none of the first {len(rows)} rows has an answer after response_part={encoder.response!r} "
                         f"({reasons[0]}). The first row is {shown[:300]!r}")


def parts_of(tokenizer: Any) -> tuple[str, str]:
    """Return the texts that a chat template puts before a user's message and before an answer, or raise ValueError."""
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": NEXT}]
    try:
        asked = tokenizer.apply_chat_template(chat[:1], tokenize=False)
        prompted = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception as error:
        raise ValueError("no usable chat template; pass instruction_part and response_part") from error
    first, between = asked.partition(QUESTION)[0], whole.partition(ANSWER)[2].partition(NEXT)[0]
    behind = [text.partition(QUESTION)[2] for text in (asked, prompted, whole)]
    shorter = min(len(first), len(between))
    same = next((count for count in range(shorter, 0, -1) if first[-count:] == between[-count:]), 0)
    head = shared_start(behind[1], behind[2])  # without a thinking block that only the generation prompt opens
    response = head.removeprefix(behind[0]) or head
    if not same or not response:
        raise ValueError("the chat template does not show what stands before a message; pass instruction_part and "
                         "response_part")
    return between[-same:], response
