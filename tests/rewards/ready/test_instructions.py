"""`follows_instructions`: verdicts beside the public IFEval checker's, and the layouts of the public data sets."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo import rewards
from lowmem_grpo.rewards.ready.instruction_kinds import KINDS
from lowmem_grpo.rewards.ready.instructions import RLVR, follows, instructions_of, known

# Answers, with the verdicts of the public checker (EleutherAI's copy of google-research/instruction_following_eval) in
# a run of its own with nltk 3.10.4, strict and loose. It also asks langdetect whether capitals are English, and takes
# fragments such as "SECTION 1 A" for other languages: these are left out.
ANSWERED = [json.loads(line) for line in
            (Path(__file__).parent / "data" / "ifeval_verdicts.jsonl").read_text(encoding="utf-8").splitlines()]
WORDS = {"func_name": "validate_word_constraint", "N": 4, "quantifier": "at most", "keyword_list": None}


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in ANSWERED}))
def test_verdicts_differ_from_those_of_the_public_checker(kind: str) -> None:
    cases = [case for case in ANSWERED if case["kind"] == kind]
    assert {case["strict"] for case in cases} == {False, True}
    for case in cases:
        instruction = known(kind, case["kwargs"])
        assert [follows(case["text"], instruction, loose) for loose in (False, True)] == [
            case["strict"], case["loose"]], case


def test_every_kind_of_ifeval_but_languages_is_compared_with_the_public_checker() -> None:
    assert KINDS.keys() - {case["kind"] for case in ANSWERED} == {"language:response_language"}
    assert len(KINDS) == len(RLVR) == 25 and {kind for kind, _ in RLVR.values()} == set(KINDS)


@pytest.mark.parametrize(("text", "language"), [
    ("The weather is fine today, and we walk along the river.", "en"), ("Das Wetter ist heute schön.", "de"),
    ("El tiempo es bueno hoy y vamos al mercado.", "es"), ("今日はとても良い天気です。", "ja")])
def test_a_text_is_taken_for_another_language(text: str, language: str) -> None:
    assert follows(text, known("language:response_language", {"language": language}), False)
    assert not follows(text, known("language:response_language", {"language": "ko"}), False)


@pytest.mark.parametrize("cell", [
    WORDS, json.dumps(WORDS), repr(WORDS), [WORDS], json.dumps([WORDS]),
    {"instruction_id": ["length_constraints:number_words"], "kwargs": [{"num_words": 4.0, "relation": "at most"}]},
    "[{'instruction_id': ['length_constraints:number_words'], 'kwargs': [{'num_words': 4, 'relation': 'at most'}]}]",
])
def test_a_layout_of_a_public_data_set_is_not_read(cell: Any) -> None:
    assert instructions_of(cell) == [("length_constraints:number_words", {"num_words": 4, "relation": "at most"})]
    judge = rewards.follows_instructions("ground_truth")
    assert judge.verify("One two three four.", ground_truth=cell) is True
    assert judge.verify("One two three four five.", ground_truth=cell) is False


def test_two_columns_of_ifeval_are_read_as_a_trainer_passes_them() -> None:
    follows_all = rewards.follows_instructions()
    rows: dict[str, Any] = {
        "instruction_id_list": [["punctuation:no_comma", "keywords:existence"]] * 3,
        "kwargs": [[{"keywords": None, "n": None}, {"keywords": ["sea"]}], *['[{}, {"keywords": ["sea"]}]'] * 2],
        "key": [1, 2, 3]}
    texts = ["The sea is wide.", "Wide, and deep.", "The sea, the sea."]
    assert follows_all.reward()(completions=texts, **rows) == [1.0, 0.0, 0.0]
    assert follows_all.share(2.0)(completions=texts, **rows) == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("cell", [
    {"func_name": "validate_haiku", "N": 3}, [{"instruction_id": ["ratio:overlap"], "kwargs": [{}]}],
    {"func_name": "validate_word_constraint", "N": 4, "quantifier": "about"},
    {"func_name": "validate_word_constraint", "quantifier": "at most"}, {"func_name": "validate_end", "end_phrase": 3},
    "[{", pytest.param('{"instruction_id": ' * 900 + "{}" + "}" * 900, id="deep"),
    pytest.param('{"instruction_id": ' * 3000, id="open"),
    {"instruction_id": ["punctuation:no_comma"] * 2, "kwargs": [{}]}, '[{"a": 1}]', [[1]], "no list", 7,
])
def test_an_unknown_instruction_gets_a_verdict_or_raises(cell: Any, caplog: pytest.LogCaptureFixture) -> None:
    pay = rewards.follows_instructions("ground_truth").reward()
    assert pay(completions=["A text.", "Yes."], ground_truth=[cell, WORDS]) == [None, 1.0]
    assert pay(completions=["A text."], ground_truth=[cell]) == [None]
    assert len(caplog.records) == 1
    assert pay.fault_of_row({"ground_truth": cell}) and not pay.fault_of_row({"ground_truth": WORDS})


def test_a_nested_row_is_refused_only_where_python_happens_to_allow_little_recursion() -> None:
    pay, before = rewards.follows_instructions("ground_truth").reward(), sys.getrecursionlimit()
    sys.setrecursionlimit(before + 2000)  # compilers and notebooks raise it
    try:
        fault = pay.fault_of_row({"ground_truth": '{"instruction_id": ' * 900 + "{}" + "}" * 900})
    finally:
        sys.setrecursionlimit(before)
    assert fault and "cannot be checked" in fault


@pytest.mark.parametrize("cell", [None, [], ""])
def test_a_row_without_instructions_gets_a_verdict_or_a_warning(cell: Any, caplog: pytest.LogCaptureFixture) -> None:
    pay = rewards.follows_instructions("ground_truth").share()
    assert pay(completions=["A text."], ground_truth=[cell]) == [None]
    assert not caplog.records and pay.fault_of_row({"ground_truth": cell}) is None


@pytest.mark.parametrize(("text", "says"), [
    ("DONE " * 40, False), ("DONE", False), ("", False), ("ha ha ha ha ha, ho ho ho ho", False),
    ("The sea is wide. DONE", True), ("We walked along the river and talked about the sea until it was dark.", True)])
def test_a_policy_that_repeats_the_wanted_words_is_paid(text: str, says: bool) -> None:
    wanted = {"func_name": "validate_end", "end_phrase": text.strip()[-4:] or "DONE"}
    assert rewards.follows_instructions("w", sentence=True).verify(text, w=wanted) is says
    assert rewards.follows_instructions("w").verify(text, w=wanted) is bool(text)


def test_the_rewards_of_rlvr_count_exactly() -> None:
    judge = rewards.follows_instructions("w")
    for text, right in (("sea sea", True), ("sea sea sea", False), ("sea", False)):
        assert judge.verify(text, w={"func_name": "verify_keyword_frequency", "word": "sea", "N": 2}) is right
        assert judge.verify(text, w={"func_name": "verify_letter_frequency", "letter": "s", "N": 2}) is right


def test_a_first_word_that_is_a_number_ends_the_run() -> None:
    judge = rewards.follows_instructions("w")
    wanted = {"func_name": "validate_paragraphs", "N": 2, "i": 2, "first_word": 3}
    assert judge.verify("One.\n\n3 apples.", w=wanted) is True and judge.verify("One.\n\nTwo.", w=wanted) is False
