"""The ready-made verifiers and rewards: what they say and pay, and bad arguments."""

import math
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tables import every_row
from trl.rewards import get_soft_overlong_punishment

from lowmem_grpo import rewards
from lowmem_grpo.rewards.reading import read_number
from lowmem_grpo.rewards.ready import math_answer
from lowmem_grpo.runs.views.charts import figures

ROW = {"answer": "10", "keyword": "step", "ideal": "Yes.", "recipient": "Bo"}
TAGGED = "<start_working_out>{}<end_working_out><SOLUTION>{}</SOLUTION>"


def pay(reward: Any, text: str, ids: list[int] | None = None, **row: Any) -> float | None:
    """The pay of one completion, which must be the same as text and as chat."""
    chat = [{"role": "assistant", "content": text}]
    columns = {name: [value] * 2 for name, value in row.items()}
    plain, chatted = reward(prompts=["p"] * 2, completions=[text, chat], completion_ids=[ids or [7]] * 2, **columns)
    assert plain == chatted
    return plain


# Where the answer stands, and numbers


@every_row(("text", "written", "value"), [
    ("so 1,234.5 it is", "1,234.5", "1234.5"), ("-$5", "-$5", "-5"), ("is -0.", "-0", "0"), ("2E-2", "2E-2", "0.02"),
    ("(3)-4", "4", "4"), ("\u22127", "\u22127", "-7"), ("3,4,5", "5", "5"), ("€1.50!", "€1.50", "1.5"),
])
def test_the_last_number_is_read(text: str, written: str, value: str) -> None:
    assert rewards.last_number(text) == written
    assert read_number(written) == Fraction(value)


@every_row("text", ["", "ten", "-", "$", "e", "\u0663", "\u00b2", "\u0967\u0968", "∞", "NaN"])
def test_what_is_no_ascii_number_is_not_read(text: str) -> None:
    assert read_number(text) is None and read_number(rewards.last_number(text)) is None


@every_row("text", [
    "1e400", "1e-400", "1e99999999", "9" * 65, "9" * 100_000, "1/0", "1,23", "1_0", "0x1", "1 2", "--5", True, None,
])
def test_a_number_beyond_reason_is_not_read(text: Any) -> None:
    assert read_number(text) is None


def test_a_huge_number_does_not_give_way_to_one_before_it() -> None:
    for text in ("10 or 1e400", "10, no: " + "1" * 5000):
        assert rewards.number_match().verify(text, answer="10") is False


@every_row(("text", "found"), [
    (r"\boxed{5}", "5"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{a} \boxed{b}", "b"), (r"\boxed{1 \boxed{2} 3}", "2"), (r"\boxed{5", None), (r"\boxed{1} \boxed{2", "1"),
    (r"\boxed{ \boxed{5}", "5"), (r"{ } } \boxed{\{1\}}", r"\{1\}"), (r"\boxed{}", None), ("boxed{5}", None),
    (r"\boxed 5", None), (r"\boxed {5}", "5"), ("", None),
])
def test_the_last_complete_box_is_found(text: str, found: str | None) -> None:
    assert rewards.boxed(text) == found


@every_row(("text", "found"), [
    ("<answer> 5 </answer>", "5"), ("<answer>4</answer><answer>5</answer>", "5"), ("<answer>5</answer><answer>", "5"),
    ("<answer><answer>5</answer>", "5"), ("</answer>5<answer>", None), ("<answer></answer>", None), ("5", None),
    ("<answer>5</answer></answer>", "5"),
])
def test_the_last_complete_tag_is_found(text: str, found: str | None) -> None:
    assert rewards.in_tag("answer")(text) == found
    assert rewards.in_tag("<answer>", "</answer>")(text) == found


def test_other_places_read_their_text() -> None:
    assert rewards.after("####")("#### 1\n#### 5 \nend") == "5" and rewards.after("####")("5") is None
    assert rewards.last_line("a\n b \n\n") == "b" and rewards.last_line(" ") is None
    assert rewards.whole(" a ") == "a" and rewards.whole("\n") is None


# Verifiers


def test_a_verifier_is_no_reward_and_its_reward_pays_and_logs_verdicts() -> None:
    with pytest.raises(TypeError, match=r"the verifier number_match, which .*\.reward\(right=1\.0, wrong=0\.0\)"):
        rewards.RewardScorer(rewards.number_match())  # type: ignore[arg-type]
    scorer = rewards.RewardScorer(rewards.number_match().reward(2.0, -1.0))
    columns = {"answer": ["10", "10", "ten", None]}
    scores = scorer.score(["p"] * 4, ["10", "9", "10", "10"], [[1]] * 4, columns, None)
    assert scores.rewards == {"number_match": [2.0, -1.0, None, None]}
    assert scores.metrics == {"verdicts/number_match": 0.5}  # of the two that have a verdict


def test_the_report_draws_verdicts_apart_from_what_they_pay() -> None:
    row = {"step": 1, "rewards/number_match/mean": 2.0, "verdicts/number_match": 0.75}
    drawn = {chart.title: chart.lines[0].points for chart in figures([row])}
    assert drawn == {"Reward functions": [(1, 2.0)], "Verified right": [(1, 0.75)]}


@every_row(("verifier", "text", "label", "verdict"), [
    (rewards.answer_match(), "Paris ", "Paris", True), (rewards.answer_match(), "paris", "Paris", False),
    (rewards.answer_match(ignore_case=True), "paris", "Paris", True), (rewards.answer_match(), "", "", None),
    (rewards.answer_match(), "a  b\nc", "a b c", True), (rewards.answer_match(), "", "a", False),
    (rewards.answer_match(where=rewards.in_tag("answer")), "<answer>5</answer>", 5, True),
    (rewards.number_match(), "0", "-0", True), (rewards.number_match(), "0.1", 0.1, True),
    (rewards.number_match(tolerance=0.1), "11", "10", True), (rewards.number_match(tolerance=0.1), "11.1", "10", False),
    (rewards.number_match(tolerance=0.1), "-10", "10", False), (rewards.number_match(), "5", "five", None),
    (rewards.number_match(where=rewards.boxed), "5", "5", False), (rewards.number_match(), "~70", "~70", True),
    *[(rewards.number_match(), label, label, None) for label in ("2:30 PM", "about 70", "70 apples")],
    (rewards.boxed_match(), r"\boxed{1{,}000}", "1000", True),
    (rewards.boxed_match(), r"\boxed{$x + 1$}", "x+1", True), (rewards.boxed_match(), r"\boxed{x}", r"\boxed{x}", True),
    (rewards.boxed_match(), "5", "5", False), (rewards.boxed_match(), r"\boxed{5}", "", None),
])
def test_each_verifier_gives_the_right_verdict(
    verifier: rewards.Verifier, text: str, label: Any, verdict: bool | None
) -> None:
    assert verifier.verify(text, answer=label) is verdict


SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether she sold 43.\n#### 43"
LABELS = [  # as data sets and people write that the answer is 43
    SOLUTION, "#### 43", "####43", "The answer is 43.", "The final answer is $43$. I hope it is correct.", "$43$",
    "Answer: 43", "So the answer is: 43", "answer = 43", r"so $x = 43$: \boxed{43}", "$43", "43%", "43.0", "43.",
    "**43**", "The answer is **43**.", r"\(43\)", r"The answer is \[ 43 \]", " 43 ", "43 ",
]


@every_row("label", LABELS)
@pytest.mark.parametrize("match", ["boxed_match", "math_match", "number_match", "number_equal", "proximity"])
def test_a_right_answer_is_paid_however_the_label_is_written(match: str, label: str) -> None:
    if match == "math_match":
        pytest.importorskip("math_verify")
    made = getattr(rewards, match)()
    reward = made.reward() if isinstance(made, rewards.Verifier) else made
    right, wrong = reward(completions=[r"so it is $\boxed{43}$", r"so it is $\boxed{4300}$"], answer=[label, label])
    assert right == {"number_equal": 3.0, "proximity": 3.0}.get(match, 1.0) and wrong is not None and wrong <= 0.0


def test_answers_of_text_are_found_in_labels_too() -> None:
    texts = ["<answer>43</answer>", "<answer>44</answer>"]
    assert rewards.correctness_reward_func(prompts=["p"] * 2, completions=texts, answer=[SOLUTION] * 2) == [2.0, 0.0]
    solved = rewards.answer_match(where=rewards.after("####"))
    assert solved.verdicts(["so\n#### 43", "so\n#### 44"], answer=[SOLUTION] * 2) == [True, False]
    assert rewards.boxed_match().verify(r"\boxed{(B)}", answer="What is it? The answer is (B). As was shown.") is True


@every_row("label", [
    "Answer is forty two.", "forty two", "She sold twice as many clips as in May.", "x+" * 200,
])
def test_a_label_that_is_no_answer_gives_no_verdict_and_one_line(label: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    reward = rewards.boxed_match().reward()
    for _ in range(2):
        assert reward(completions=[r"\boxed{42}", "nothing"], answer=[label] * 2) == [None, None]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "boxed_match gives no verdict on 2 of 2 completions" in line and "column 'answer'" in line
    assert "Write the answer alone" in line
    assert reward(completions=[r"\boxed{5}"], answer=[None]) == [None], "a row without a label says so itself"
    assert rewards.boxed_match().verify(r"\boxed{forty two}", answer="forty two") is True, "the same text is right"
    assert rewards.boxed_match().verify(r"\boxed{x}", answer=r"\text{no real solutions}") is False


@every_row("label", [b"43", {"value": 43}, [["43"]], [b"43"], [[43, 44], [45, 46]]])
@every_row("verifier", [rewards.answer_match(), rewards.boxed_match(), rewards.number_match(), rewards.math_match()])
def test_a_label_that_no_text_can_equal_is_told_of_and_not_counted_as_wrong(
    verifier: Any, label: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    assert verifier.reward()(completions=[r"\boxed{43}", "43"], answer=[label] * 2) == [None, None]
    assert "no verdict on 2 of 2 completions" in caplog.text


@every_row(("reward", "label"), [
    (rewards.proximity(column="label"), "about 70"), (rewards.proximity(column="label"), "70 apples"),
    (rewards.proximity(column="label"), b"70"), (rewards.keyword_present(column="label"), b"refund"),
    (rewards.keyword_present(column="label"), [["refund"]]), (rewards.recipient_named(column="label"), b"Bo"),
    (rewards.recipient_named(column="label"), {"name": "Bo"}),
])
def test_a_reward_that_cannot_read_its_label_says_so_once_and_counts_nothing_as_wrong(
    reward: Any, label: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    for _ in range(2):
        assert reward(completions=["Dear Bo, a refund of 70"] * 2, label=[label, None]) == [None, None]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no verdict on 1 of 2 completions" in line and "column 'label'" in line


def test_any_recipient_of_a_list_may_be_named() -> None:
    named = rewards.recipient_named()
    assert named(completions=["Dear Al,\nyes", "Dear Cy,\nyes"], recipient=[["Bo", "Al"]] * 2) == [1.0, 0.0]


@every_row(("text", "verdict"), [
    ('{"n": 3}', True), ('{"n": 3.0}', True), ('Here:\n```json\n{"n": 3}\n```\nDone.', True), ('```{"n": 3}```', True),
    ('```\n{"n": 1}\n```\n```\n{"m": 3}\n```', False), ('{"n": "3"}', False), ('{"n": 3', False), ("", False),
    ('{"n": NaN}', False), ('{"n": 1e400}', False), ('{"n": ' + "9" * 10_000 + "}", False), ("[" * 100_000, False),
    ('{"n": 3} and more', False), ('{"n": 3, "code": "```py\\n1\\n```"}', True),
    ('So:\n```json\n{"n": 3, "code": "```py\\n1\\n```"}\n```', True), ('```{"n": 3}``` and ```{"n": 1.5}```', False),
])
def test_json_is_right_where_it_satisfies_the_schema(text: str, verdict: bool) -> None:
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert rewards.json_match(schema).verify(text) is verdict


@every_row(("text", "kept", "counted"), [
    (TAGGED.format("a", "10"), True, 2.0), ("\n" + TAGGED.format("a\nb", "10") + "\n", True, 2.0),
    (TAGGED.format("a", "10") * 2, False, -4.0), (TAGGED.format("", "10"), False, 2.0),
    (TAGGED.format("a", " "), False, 2.0), (TAGGED.format("a", "10") + ".", False, 2.0),
    ("<SOLUTION>1</SOLUTION><start_working_out>a<end_working_out>", False, 2.0), ("10", False, -4.0), ("", False, -4.0),
])
def test_the_format_of_tags_is_judged_and_counted(text: str, kept: bool, counted: float) -> None:
    assert rewards.format_match().verify(text) is kept
    assert pay(rewards.format_kept(), text) == (3.0 if kept else 0.0)
    assert pay(rewards.tags_counted(), text) == counted


def test_a_format_that_the_prompt_opens_does_not_expect_the_first_tag_again() -> None:
    text = TAGGED.format("a", "10").removeprefix("<start_working_out>")
    assert rewards.format_match(opened=True).verify(text) and not rewards.format_match().verify(text)
    assert pay(rewards.tags_counted(opened=True), text) == 1.5


# Rewards


def test_a_nearer_answer_earns_more_and_an_outlier_loses() -> None:
    pays = [pay(rewards.proximity(), str(x), answer="10") for x in (10, 9, 8, 3, 0, -4, -50, 10**60)]
    assert pays == pytest.approx([3.0, 2.7, 2.4, 0.9, 0.0, -1.2, -1.5, -1.5])
    assert pay(rewards.proximity(), "12", answer="10") == pay(rewards.proximity(), "8", answer=10)
    assert pay(rewards.proximity(), "10", answer="ten") is None
    assert pay(rewards.proximity(), "0.5", answer="0") == 1.5
    assert pay(rewards.proximity(reach=0.5), "9", answer="10") == pytest.approx(2.4)


@every_row("seed", range(5))
def test_every_length_is_punished_as_by_trl(seed: int) -> None:
    rng = random.Random(seed)
    longest = rng.randint(1, 500)
    cache = rng.randint(1, longest)
    ids = [[7] * length for length in (*(rng.randint(0, longest + 20) for _ in range(200)), longest - cache, longest)]
    theirs = get_soft_overlong_punishment(longest, cache)(completion_ids=ids)
    assert rewards.soft_overlong_penalty(longest, cache)(completion_ids=ids, cache_length=[9] * 202) == theirs


def test_a_length_is_paid_in_its_unit() -> None:
    assert pay(rewards.length_near(3, 2), "a b c d e", [1, 2]) == 0.5
    assert pay(rewards.length_near(3, 2, "characters"), "abcde") == 0.0
    assert [pay(rewards.too_long(3), "", [1] * count) for count in (0, 3, 4)] == [0.0, 0.0, -1.0]


def test_repeated_tokens_of_a_tensor_count_like_those_of_a_list() -> None:
    ids = [1, 2, 1, 2]
    paid = rewards.repetition_penalty(2)(completions=["x"] * 2, completion_ids=[torch.tensor(ids), ids])
    assert paid == pytest.approx([-1 / 3] * 2)


MAIL = "Dear Ms Bo,\n\nyour ReFund is due.\n\nBest regards,  \nAda Moss\n"


@every_row(("reward", "text", "row", "expected"), [
    (rewards.keyword_present(), MAIL, {"keyword": "fund"}, 0.0),
    (rewards.keyword_present(), MAIL, {"keyword": ["refund", "due"]}, 1.0),
    (rewards.keyword_present(), MAIL, {"keyword": ["refund", "late"]}, 0.0),
    (rewards.keyword_present(), MAIL, {"keyword": ""}, None),
    (rewards.keyword_present(), MAIL, {"keyword": None}, None),
    (rewards.keyword_present(), "c++ here", {"keyword": "C++"}, 1.0),
    (rewards.recipient_named(), MAIL, {"recipient": "Ms  bo"}, 1.0),
    (rewards.recipient_named(), MAIL, {"recipient": "Ada"}, 0.0),
    (rewards.recipient_named(), "", {"recipient": "Bo"}, 0.0), (rewards.signed("Ada Moss"), MAIL, {}, 1.0),
    (rewards.signed("Ada Moss"), MAIL + "PS: hi", {}, 0.0), (rewards.signed("Ada Moss"), "", {}, 0.0),
])
def test_a_mail_is_paid_for_what_it_has(reward: Any, text: str, row: dict[str, Any], expected: float | None) -> None:
    assert pay(reward, text, **row) == expected


def test_the_five_of_the_mail_example_have_names_and_pay() -> None:
    five = rewards.email_rewards("Ada Moss", longest_words=9)
    row = {"keyword": "refund", "ideal": "Hi.", "recipient": "Bo"}
    assert [pay(reward, MAIL, **row) for reward in five] == [1.0, 0.0, -1.0, 1.0, 1.0]
    assert len({reward.__name__ for reward in five}) == 5


# The five usual ones of GSM8K


STRICT = "<reasoning>\n{}\n</reasoning>\n<answer>\n{}\n</answer>\n"
RIGHT = STRICT.format("48 / 2 = 24\n\n48 + 24 = 72", "72")


@every_row(("text", "label", "expected"), [
    (RIGHT, " 72\n", 2.0), (RIGHT, 72, 2.0), (RIGHT, "71", 0.0), (RIGHT, None, 0.0), ("<answer>72", "72", 0.0),
    ("", "", 0.0), ("<answer></answer>", "", 0.0), ("<answer>72</answer> and <answer>", "72", 2.0),
])
def test_correctness_pays_for_the_tagged_answer_only(text: str, label: Any, expected: float) -> None:
    assert pay(rewards.correctness_reward_func, text, answer=label) == expected


@every_row(("answer", "expected"), [
    ("72", 0.5), ("-72", 0.5), (" 72 ", 0.5), ("72.5", 0.0), ("seventy-two", 0.0), ("", 0.0), ("7 2", 0.0), ("²", 0.0),
])
def test_int_pays_for_integers_only(answer: str, expected: float) -> None:
    assert pay(rewards.int_reward_func, f"<answer>\n{answer}\n</answer>") == expected
    assert pay(rewards.int_reward_func, answer) == 0.0


@every_row(("text", "strict", "soft"), [
    (RIGHT, 0.5, 0.5), (STRICT.format("one line", "72"), 0.5, 0.5), (STRICT.format("r", "7\n2"), 0.5, 0.5),
    (RIGHT[:-1], 0.0, 0.5), (RIGHT + "\n", 0.0, 0.5), (RIGHT + "so", 0.0, 0.5), (RIGHT * 2, 0.0, 0.5),
    ("<reasoning>a\nb</reasoning>  <answer>1</answer>", 0.0, 0.5), ("Sure! " + RIGHT, 0.0, 0.0),
    ("<reasoning>a</reasoning> so <answer>1</answer>", 0.0, 0.0), ("<reasoning>a</reasoning><answer>1", 0.0, 0.0),
    ("<answer>1</answer><reasoning>a</reasoning>", 0.0, 0.0), ("72", 0.0, 0.0), ("", 0.0, 0.0),
])
def test_formats_pay_for_multi_line_blocks_and_not_for_broken_ones(text: str, strict: float, soft: float) -> None:
    paid = [pay(func, text) for func in (rewards.strict_format_reward_func, rewards.soft_format_reward_func)]
    assert paid == [strict, soft]


@every_row(("text", "expected"), [
    (RIGHT[:-1], 0.5), (RIGHT, 0.499), (RIGHT[:-1] + "x" * 100, 0.4), ("<reasoning>a</reasoning>", 0.25),
    ("<answer>1</answer><answer>", 0.125 - 0.008), ("</answer>" + "x" * 200, 0.125 - 0.2), ("72", 0.0), ("", 0.0),
    ("<answer>1</answer>" * 2, -0.018),
])
def test_xmlcount_pays_per_tag_and_charges_for_text_behind_the_answer(text: str, expected: float) -> None:
    assert pay(rewards.xmlcount_reward_func, text) == pytest.approx(expected)


def test_chat_completions_are_read_from_the_last_message_and_other_shapes_are_refused() -> None:
    turns = [{"role": "assistant", "content": None}, {"role": "tool", "content": "x"}]
    assert rewards.int_reward_func([[*turns, {"role": "assistant", "content": RIGHT}], turns[:1]]) == [0.5, 0.0]
    for broken in (3, [], [3], [{"content": ["part"]}]):
        with pytest.raises(TypeError, match="a string or a list of chat messages"):
            rewards.int_reward_func([broken])


def test_answers_are_extracted_as_text_and_labels_as_plain_numbers() -> None:
    assert (rewards.extract_xml_answer(RIGHT), rewards.extract_xml_answer("none")) == ("72", "")
    assert rewards.extract_hash_answer("5 * 2 = 10\n#### 1,234,567 ") == "1234567"
    assert rewards.extract_hash_answer("no label") is None
    form = rewards.SYSTEM_PROMPT.partition("<reasoning>")
    assert rewards.soft_format_reward_func([form[1] + form[2]]) == [0.5]


# The contract


def test_a_missing_column_is_named_with_those_there_are() -> None:
    reward = rewards.number_equal(column="solution")
    with pytest.raises(rewards.RewardError, match=r"number_equal requires solution, .*available are .*answer"):
        rewards.RewardScorer(reward).score(["p"], ["1"], [[1]], {"answer": ["1"]}, None)
    with pytest.raises(TypeError, match="number_equal reads the dataset column 'solution'; the columns are: answer"):
        reward(completions=["1"], answer=["1"])


def test_every_reward_can_be_pickled() -> None:
    for reward in [*rewards.email_rewards("Ada"), rewards.number_equal(), rewards.proximity(), rewards.tags_counted(),
                   rewards.length_near(2, 2), rewards.repetition_penalty(), rewards.json_match().reward()]:
        again = pickle.loads(pickle.dumps(reward))  # noqa: S301, our own
        assert pay(again, "10", **ROW) == pay(reward, "10", **ROW) and again.__name__ == reward.__name__


made: Any = rewards  # with arguments of other types


@every_row(("make", "message"), [
    (lambda: made.MeanOf(0.0, 0), "log nothing"),
    (lambda: made.number_match(tolerance=-1), "tolerance is -1; it must be 0 or above"),
    (lambda: made.number_match(tolerance=float("nan")), "tolerance is nan"),
    (lambda: made.number_match(tolerance="1%"), "tolerance is '1%'; it must be 0 or above; 0.01 is one per cent"),
    (lambda: made.proximity(exact=-2), "exact is -2; it must be a finite number above outlier .-1.5."),
    (lambda: made.proximity(reach=0), "reach is 0; it must be above 0"),
    (lambda: made.proximity(reach=math.inf), "reach is inf; it must be above 0"),
    (lambda: made.proximity(exact="3"), "exact is '3'; it must be a finite number"),
    (lambda: made.proximity(exact=10**400), "it must be a finite number"),
    (lambda: made.tags_counted(once="a"), "once is 'a'; it must be a finite number"),
    (lambda: made.tags_counted(otherwise=None), "otherwise is None; it must be a finite number"),
    (lambda: made.tags_counted(opened="no"), "opened is 'no'; it must be True or False"),
    (lambda: made.too_long(2, pay=math.nan), "pay is nan; it must be a finite number"),
    (lambda: made.too_long(2, pay=True), "pay is True; it must be a finite number"),
    (lambda: made.number_present(present=math.inf), "present is inf; it must be a finite number"),
    (lambda: made.keyword_present(absent="0"), "absent is '0'"),
    (lambda: made.recipient_named(unnamed=math.nan), "unnamed is nan"),
    (lambda: made.signed("Ada", present=[1]), r"present is \[1\]"),
    (lambda: made.signed(None), "signature is None"),
    (lambda: made.number_match().reward(right=math.nan), "right is nan; it must be a finite number"),
    (lambda: made.format_kept(wrong=-math.inf), "wrong is -inf; it must be a finite number"),
    (lambda: made.answer_match().reward(name=5), "name is 5; it must be a text"),
    (lambda: made.answer_match(ignore_case="yes"), "ignore_case is 'yes'; it must be True or False"),
    (lambda: made.answer_match(column=None), "column is None; it must be a text"),
    (lambda: made.keyword_present(column=["a", "b"]), r"column is \['a', 'b'\]; it must be a text"),
    (lambda: made.answer_match(where="boxed"), "where is 'boxed'; it must be a function .* such as rewards.boxed"),
    (lambda: made.number_match(where=made.in_tag), "where is <function in_tag.* or rewards.in_tag.'answer'"),
    (lambda: made.number_present(where=made.after), "where is <function after"),
    (lambda: made.format_match(None), "tags is None; give an even"),
    (lambda: made.format_match(2), "tags is 2; give an even number"),
    (lambda: made.regex_match("(a"), "is no regular expression"),
    (lambda: made.regex_match(None), "None, which is no regular"),
    (lambda: made.regex_match(b"a"), "b'a', which is no regular"),
    (lambda: made.json_match(dict), r"the class dict; give its schema"),
    (lambda: made.repetition_penalty(worst=None), "worst is None; it must be finite"),
    (lambda: made.repetition_penalty(worst=float("-inf")), "worst is -inf; it must be finite, and 0 or below"),
    (lambda: made.format_match(("<a>",)), "give an even number of strings"),
    (lambda: made.format_match(("<a>", "<a>")), "'<a>' is part of '<a>'"),
    (lambda: made.tags_counted(tags="<a></a>"), "give an even number"),
    (lambda: made.length_near(2, 0), "spread is 0; it must be a whole number, at least 1"),
    (lambda: made.too_long(2.5), "longest is 2.5; it must be a whole number"),
    (lambda: made.too_long(2, "lines"), "unit is 'lines'; it must be one of tokens, words, characters"),
    (lambda: made.repetition_penalty(0), "ngram is 0"), (lambda: made.repetition_penalty(worst=1), "worst is 1"),
    (lambda: made.soft_overlong_penalty(True, True), "max_completion_length is True"),
    (lambda: made.soft_overlong_penalty(10, 0), "cache_length is 0"),
    (lambda: made.soft_overlong_penalty(10, 11), r"it must be at most max_completion_length \(10\)"),
    (lambda: made.signed(" \n"), "signature is ' .n'; it must be a text that is not empty: give the lines"),
    (lambda: made.after(""), "the mark ''; give the characters"), (lambda: made.after(5), "the mark 5"),
    (lambda: made.in_tag(""), "a tag has at least one character"), (lambda: made.in_tag(5), "in_tag got 5"),
    (lambda: made.in_tag("<answer>"), "got '<answer>' and None; .* or both tags with their brackets"),
    (lambda: made.number_equal(column="completion_ids"), "cannot read a column named completion_ids"),
])
def test_an_argument_that_makes_no_sense_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


LIST = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}}}


@every_row(("schema", "message"), [
    ({"type": "strin"}, r"an invalid schema: .*'strin'"), ({"$ref": "#/nope"}, "'#/nope'} leads to nothing in it"),
    ({"properties": {"a": {"prefixItems": [{"$ref": "#/$defs/b"}]}}}, "leads to nothing"),
    ({"$dynamicRef": "#nope"}, "leads to nothing"), ({"$ref": "http://127.0.0.1:9/x"}, "http.*as nothing is fetched"),
    ({"$ref": "#"}, "'#'} .* or back to itself without end"), ({"items": {"$ref": "#/items"}}, "without end"),
    ({"$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "without end"),
])
def test_a_schema_that_is_none_or_refers_to_none_is_refused(schema: dict[str, Any], message: str) -> None:
    pytest.importorskip("jsonschema")
    with pytest.raises(ValueError, match=message):
        rewards.json_match(schema)


@every_row(("schema", "verdicts"), [
    (LIST, [True, False]), ({"properties": {"next": {"$ref": "#/$defs/a"}}, "$defs": {"a": LIST}}, [True, False]),
    ({"$ref": "http://json-schema.org/draft-07/schema#"}, [True, True]), ({"enum": [{"$ref": "#/nope"}]}, [False] * 2),
    ({"$ref": "urn:x", "$defs": {"a": {"$id": "urn:x", "$ref": "#/$defs/b", "$defs": {"b": LIST}}}}, [True, False]),
    ({"properties": {"$ref": {"type": "string"}}}, [True, True]), ({"example": {"$ref": "#/nope"}}, [True, True]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "definitions": {"a": {"id": "http://x/a", "properties": {
        "next": {"$ref": "#/definitions/b"}}, "definitions": {"b": LIST}}}}, [True, True]),
])
def test_a_schema_may_refer_to_what_is_in_it(schema: dict[str, Any], verdicts: list[bool]) -> None:
    pytest.importorskip("jsonschema")
    texts = ['{"n": 1, "next": {"n": 2, "next": {}}}', '{"n": 1, "next": 3}']
    assert rewards.json_match(schema).verdicts(texts) == verdicts


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("math_answer", "answers"):
        monkeypatch.setattr(f"lowmem_grpo.rewards.ready.{module}.find_spec", lambda name: None)
    for package, make in (("math-verify", rewards.math_match), ("jsonschema", lambda: rewards.json_match({}))):
        with pytest.raises(ImportError, match=f"needs the package {package}: pip install"):
            make()


# Mathematics through math-verify


def test_a_comparison_that_never_ends_is_ended_and_counts_as_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(math_answer, "SECONDS", 0.05)
    monkeypatch.setattr(math_answer, "MAX_KILLED", 1)
    worker = math_answer.MathWorker()
    monkeypatch.setattr(math_answer, "WORKER", worker)
    texts = [rf"\boxed{{9^{{9^{{9^{{{power}}}}}}}}}" for power in (7, 8)] + [r"\boxed{7}", r"\boxed{8}"]
    verdicts = rewards.math_match().verdicts([*texts, r"\boxed{x+1}"], answer=["7"] * 4 + ["1+x"])
    assert verdicts == [False, None, True, False, None]  # what needs no worker is still judged
    assert caplog.text.count("took more than 0.05 s") == 1
    monkeypatch.setattr(math_answer, "SECONDS", 60.0)
    assert rewards.math_match().verify(r"\boxed{x+1}", answer="1+x") is True
    worker.close()


def test_a_worker_that_cannot_start_is_an_error_and_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho >&2 'a line before'\necho >&2 'MemoryError: no room for sympy'\nexit 1\n")
    broken.chmod(0o755)
    worker = math_answer.MathWorker()
    monkeypatch.setattr(math_answer, "WORKER", worker)
    monkeypatch.setattr(math_answer, "SECONDS", 60.0)
    with monkeypatch.context() as patch:
        patch.setattr(math_answer.sys, "executable", str(broken))
        for _ in range(2):  # nothing is remembered of the first
            with pytest.raises(RuntimeError, match=r"does not start: MemoryError: no room for sympy$"):
                rewards.math_match().verify(r"\boxed{x+1}", answer="1+x")
    assert rewards.math_match().verify(r"\boxed{x+1}", answer="1+x") is True
    worker.close()


def test_rewards_and_the_trials_of_the_sandbox_do_not_load_heavy_libraries() -> None:
    script = ("import sys\nfrom lowmem_grpo.rewards import number_equal, RewardScorer\nnumber_equal()\n"
              "from lowmem_grpo.rewards.sandbox.trial import what_works\n"
              "what_works()\n"
              "print([name for name in ('torch', 'transformers', 'jsonschema', 'math_verify') if name in sys.modules])")
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=400, check=True)
    assert found.stdout.strip() == "[]"


@every_row(("verifier", "texts"), [
    (rewards.answer_match(), ("3", "x", "4")), (rewards.number_match(), ("so 3", "so 2", "so 4")),
    (rewards.boxed_match(), (r"\boxed{3}", r"\boxed{x}", r"\boxed{4}")),
    (rewards.math_match(), (r"\boxed{3}", r"\boxed{x}", r"\boxed{4}")),
])
def test_any_of_several_labels_is_right(verifier: Any, texts: tuple[str, ...]) -> None:
    labels = [["2", "3"]] * 3 if verifier.name == "number_match" else [["3", "x"]] * 3
    assert verifier.verdicts(list(texts), answer=labels) == [True, True, False]
    assert verifier.verify(texts[0], answer=[]) is None


@every_row(("cell", "right"), [
    (18.0, True), (np.array(["3", "18"]), True), ({"3", "18"}, True), (torch.tensor(18), True), ([3, 4], False),
    (np.float32(18), True), ([np.float32(18)], True),
    ([float("nan"), 18], True), (r"\boxed{18}", True), ("The answer is 18.", True), ("$18$", True), (18.5, False),
    (float("nan"), None), (pd.NA, None), (pd.NaT, None), ([None, float("nan")], None), ("", None), (None, None),
])
def test_every_reward_reads_labels_as_datasets_hold_them(cell: Any, right: bool | None) -> None:
    text = r"<answer>18</answer> \boxed{18}"
    for verifier in (rewards.answer_match(where=rewards.in_tag("answer")), rewards.number_match(),
                     rewards.boxed_match()):
        assert verifier.reward()(completions=[text], answer=[cell]) == [right if right is None else float(right)]
    (near,) = rewards.proximity()(completions=[text], answer=[cell])
    assert (None if near is None else near == 3.0) is right
    assert rewards.correctness_reward_func([], [text], [cell]) == [2.0 * bool(right)]


def test_an_empty_value_in_a_list_of_keywords_is_no_keyword() -> None:
    assert rewards.keyword_present()(completions=["No."] * 2, keyword=[[None, "no"], float("nan")]) == [1.0, None]
