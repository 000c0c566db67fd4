"""The five usual GSM8K rewards: for a right answer, for an integer answer, and three for the format."""

import re
from typing import Any

from lowmem_grpo.rewards.reading import between, stated
from lowmem_grpo.rewards.texts import completion_texts, labels_of

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")

SYSTEM_PROMPT = """\
Think the problem through step by step, then give the final answer as a bare number. Reply in exactly this form:
<reasoning>
your steps
</reasoning>
<answer>
the number
</answer>
"""

STRICT_FORMAT = re.compile(r"<reasoning>\n.*\n</reasoning>\n<answer>\n.*\n</answer>\n", re.DOTALL)
JOINT = re.compile(r"</reasoning>\s*<answer>")
INTEGER = re.compile(r"[+-]?[0-9]+")


def extract_xml_answer(text: str) -> str:
    """Return the text inside the last <answer>...</answer>, stripped; empty if there is no such pair."""
    return between(text, "<answer>", "</answer>") or ""


def extract_hash_answer(text: str) -> str | None:
    """Return the label of a GSM8K row: the text after "####", stripped, without commas; None without "####"."""
    _, mark, label = text.partition("####")
    return label.strip().replace(",", "") if mark else None


def correctness_reward_func(prompts: list[Any], completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """Return 2.0 for each completion whose <answer> equals the label or the answer that the label states, else 0.0."""
    extracted = [extract_xml_answer(text) for text in completion_texts(completions)]
    labels = [[form.strip() for each in labels_of(cell) for form in (
        str(each), extract_hash_answer(str(each)) or stated(str(each)))] for cell in answer]
    return [2.0 if text and text in label else 0.0 for text, label in zip(extracted, labels, strict=True)]


def int_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """Return 0.5 for each completion whose <answer> is an integer (digits with an optional sign), else 0.0."""
    extracted = [extract_xml_answer(text) for text in completion_texts(completions)]
    return [0.5 if INTEGER.fullmatch(text) else 0.0 for text in extracted]


def strict_format_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """Return 0.5 for each completion in the exact format: each tag once and alone on its line; else 0.0."""
    # Tags are counted first: the pattern takes linear time only if each occurs once.
    return [0.5 if count_single_tags(text) == len(TAGS) and STRICT_FORMAT.fullmatch(text) else 0.0
            for text in completion_texts(completions)]


def soft_format_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """Return 0.5 for each completion that begins with <reasoning>...</reasoning> and <answer>...</answer>, else 0.0."""
    return [0.5 if keeps_softly(text) else 0.0 for text in completion_texts(completions)]


def keeps_softly(text: str) -> bool:
    """Return whether the text begins with <reasoning>...</reasoning><answer>, and </answer> comes later."""
    joint = JOINT.search(text) if text.startswith("<reasoning>") else None
    return joint is not None and text.find("</answer>", joint.end()) >= 0


def xmlcount_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """Return 0.125 per tag that occurs exactly once, minus 0.001 per character after the first </answer>."""
    texts = completion_texts(completions)
    return [0.125 * count_single_tags(text) - 0.001 * len(text.partition("</answer>")[2]) for text in texts]


def count_single_tags(text: str) -> int:
    return sum(text.count(tag) == 1 for tag in TAGS)
