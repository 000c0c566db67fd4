"""The five usual GSM8K rewards, on plain and on chat completions."""

from typing import Any

import pytest
from tables import every_row

from lowmem_grpo.rewards import (
    SYSTEM_PROMPT,
    correctness_reward_func,
    extract_hash_answer,
    extract_xml_answer,
    int_reward_func,
    soft_format_reward_func,
    strict_format_reward_func,
    xmlcount_reward_func,
)

STRICT = "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>\n"
RIGHT = STRICT.format("48 / 2 = 24\n\n48 + 24 = 72", "72")


def gsm8k(func: Any, text: str, label: Any = "72") -> float:
    """The reward of `text`, which must be the same for a string and for a chat completion."""
    chat = [{"role": "assistant", "content": text}]
    plain, chatted = func(prompts=["p"] * 2, completions=[text, chat], answer=[label] * 2, trainer_state=None)
    assert plain == chatted
    return plain


@every_row(("text", "label", "expected"), [
    (RIGHT, " 72\n", 2.0), (RIGHT, 72, 2.0), (RIGHT, "71", 0.0), (RIGHT, None, 0.0), ("<answer>72", "72", 0.0),
    ("", "", 0.0), ("<answer></answer>", "", 0.0), ("<answer>72</answer> and <answer>", "72", 2.0),
])
def test_correctness_pays_for_the_tagged_answer_only(text: str, label: Any, expected: float) -> None:
    assert gsm8k(correctness_reward_func, text, label) == expected


@every_row(("answer", "expected"), [
    ("72", 0.5), ("-72", 0.5), (" 72 ", 0.5), ("72.5", 0.0), ("seventy-two", 0.0), ("", 0.0), ("7 2", 0.0), ("²", 0.0),
])
def test_int_pays_for_integers_only(answer: str, expected: float) -> None:
    assert gsm8k(int_reward_func, f"<answer>\n{answer}\n</answer>") == expected
    assert gsm8k(int_reward_func, answer) == 0.0


@every_row(("text", "strict", "soft"), [
    (RIGHT, 0.5, 0.5), (STRICT.format("one line", "72"), 0.5, 0.5), (STRICT.format("r", "7\n2"), 0.5, 0.5),
    (RIGHT[:-1], 0.0, 0.5), (RIGHT + "\n", 0.0, 0.5), (RIGHT + "so", 0.0, 0.5), (RIGHT * 2, 0.0, 0.5),
    ("<reasoning>a\nb</reasoning>  <answer>1</answer>", 0.0, 0.5), ("Sure! " + RIGHT, 0.0, 0.0),
    ("<reasoning>a</reasoning> so <answer>1</answer>", 0.0, 0.0), ("<reasoning>a</reasoning><answer>1", 0.0, 0.0),
    ("<answer>1</answer><reasoning>a</reasoning>", 0.0, 0.0), ("72", 0.0, 0.0), ("", 0.0, 0.0),
])
def test_formats_pay_for_multi_line_blocks_and_not_for_broken_ones(text: str, strict: float, soft: float) -> None:
    assert (gsm8k(strict_format_reward_func, text), gsm8k(soft_format_reward_func, text)) == (strict, soft)


@every_row(("text", "expected"), [
    (RIGHT[:-1], 0.5), (RIGHT, 0.499), (RIGHT[:-1] + "x" * 100, 0.4), ("<reasoning>a</reasoning>", 0.25),
    ("<answer>1</answer><answer>", 0.125 - 0.008), ("</answer>" + "x" * 200, 0.125 - 0.2), ("72", 0.0), ("", 0.0),
    ("<answer>1</answer>" * 2, -0.018),
])
def test_xmlcount_pays_per_tag_and_charges_for_text_behind_the_answer(text: str, expected: float) -> None:
    assert gsm8k(xmlcount_reward_func, text) == pytest.approx(expected)


def test_chat_completions_are_read_from_the_last_message_and_other_shapes_are_refused() -> None:
    turns = [{"role": "assistant", "content": None}, {"role": "tool", "content": "x"}]
    assert int_reward_func([[*turns, {"role": "assistant", "content": RIGHT}], turns[:1]]) == [0.5, 0.0]
    for broken in (3, [], [3], [{"content": ["part"]}]):
        with pytest.raises(TypeError, match="a string or a list of chat messages"):
            int_reward_func([broken])


def test_answers_are_extracted_as_text_and_labels_as_plain_numbers() -> None:
    assert (extract_xml_answer(RIGHT), extract_xml_answer("none")) == ("72", "")
    assert extract_hash_answer("5 * 2 = 10\n#### 1,234,567 ") == "1234567"
    assert extract_hash_answer("no label") is None
    assert soft_format_reward_func([SYSTEM_PROMPT[SYSTEM_PROMPT.index("<reasoning>"):]]) == [0.5]
