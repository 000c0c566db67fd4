"""The five usual GSM8K rewards: a right answer, an integer answer, and three grades of keeping to the format.

Each follows the contract of `rewards.scorer`: called by keyword, one float per completion. A completion is a string,
or a list of chat messages, of which the last one's content counts.

    correctness      2.0    the text inside <answer> equals the label
    int              0.5    the text inside <answer> is an integer
    strict format    0.5    the whole completion is the format, line breaks included
    soft format      0.5    it begins with <reasoning>...</reasoning>, then <answer>...</answer>
    xmlcount         0.125  for each of the four tags found exactly once; -0.001 per character behind </answer>
"""

import re
from typing import Any

from lowmem_grpo.rewards.ready.reading import between
from lowmem_grpo.rewards.texts import completion_texts

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
    """The text inside the last <answer>...</answer>, stripped; empty where there is no such pair."""
    return between(text, "<answer>", "</answer>") or ""


def extract_hash_answer(text: str) -> str | None:
    """The label of a GSM8K row: what follows "####", stripped and without thousands commas; None without "####"."""
    _, mark, label = text.partition("####")
    return label.strip().replace(",", "") if mark else None


def correctness_reward_func(prompts: list[Any], completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
    """2.0 where the extracted answer equals the label, both stripped; an empty answer never counts as right."""
    extracted = [extract_xml_answer(text) for text in completion_texts(completions)]
    return [2.0 if e and e == str(label).strip() else 0.0 for e, label in zip(extracted, answer, strict=True)]


def int_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """0.5 where the extracted answer is an integer: digits with at most a sign in front."""
    extracted = [extract_xml_answer(text) for text in completion_texts(completions)]
    return [0.5 if INTEGER.fullmatch(text) else 0.0 for text in extracted]


def strict_format_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """0.5 where the completion is the format and nothing else: tags on lines of their own, each exactly once."""
    texts = completion_texts(completions)
    return [0.5 if keeps_strictly(text) else 0.0 for text in texts]


def keeps_strictly(text: str) -> bool:
    """The tags are counted first: the pattern takes time linear in the text only where each stands there once."""
    return count_single_tags(text) == len(TAGS) and STRICT_FORMAT.fullmatch(text) is not None


def soft_format_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """0.5 where the completion begins with both blocks in order; line breaks are free, and so is what follows."""
    return [0.5 if keeps_softly(text) else 0.0 for text in completion_texts(completions)]


def keeps_softly(text: str) -> bool:
    """The two blocks are joined somewhere, and closed behind that; if the first joint has no end, no later one has."""
    joint = JOINT.search(text) if text.startswith("<reasoning>") else None
    return joint is not None and text.find("</answer>", joint.end()) >= 0


def xmlcount_reward_func(completions: list[Any], **_: Any) -> list[float]:
    """0.125 for each tag found exactly once, less 0.001 per character behind the first </answer>; may be negative."""
    texts = completion_texts(completions)
    return [0.125 * count_single_tags(text) - 0.001 * len(text.partition("</answer>")[2]) for text in texts]


def count_single_tags(text: str) -> int:
    """How many of the four tags occur exactly once, 0 .. 4."""
    return sum(text.count(tag) == 1 for tag in TAGS)
