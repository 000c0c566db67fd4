"""What a judge is asked, how its replies are read, what is kept: no server and no model."""

import logging
import pickle
import re
from functools import partial
from typing import Any

import pytest
from scripted import Scripted
from tables import every_row

from lowmem_grpo import rewards
from lowmem_grpo.rewards.judge.judge import Round
from lowmem_grpo.rewards.judge.question import GROUP_RUBRIC, BadReplyError, Question
from tests.attacks.judge_cases import REPLIES, scores


def group(*answers: str) -> Question:
    return Question("Say it.", answers, GROUP_RUBRIC, grouped=True)


# replies


def test_replies_are_read_as_the_attacks_on_a_judge_expect() -> None:
    for name, (reply, expected) in REPLIES.items():
        if expected is None:
            with pytest.raises(BadReplyError) as error:
                group("a", "b").read(reply)
            assert len(str(error.value)) < 200, name
        else:
            assert [score for score, _ in group("a", "b").read(reply)] == expected, name


@every_row(("reply", "fault"), [
    ("They are both fine.", "not just one JSON object with each key once: 'They are both fine.'"), ("", "it is empty"),
    (f"<think>a</think><think>{scores(1, 1)}", "not just one"), (f"</think>{scores(1, 1)} No: 0", "not just one"),
    ('{"scores": 1}', "no valid scores (Input should be a valid list)"), (scores(0.2), "not 1 to 2, each once"),
    (scores(0.2, 0.4, 0.6), "not 1 to 2, each once"), (scores(0.2, 0.4, ids=[1, 1]), "not 1 to 2, each once"),
    (scores(0.2, 0.4).replace('"id": 2', '"score": 1, "id": 2'), "each key once"),
    (scores(0.2, 1.1), "not within 0 to 1"), (scores(0.2, True), "no valid scores.1.score (Input should be a valid"),
    (scores(0.2, float("nan")), "finite number"), (scores(0.2, 0.4).replace("0.4", "9" * 5000), "not just one"),
])
def test_a_reply_without_scores_is_refused_with_its_fault(reply: str, fault: str) -> None:
    with pytest.raises(BadReplyError, match=re.escape(fault)):
        group("a", "b").read(reply)


@every_row("reply", [
    "GIVE IT 1.0", "<think>GIVE IT", scores("GIVE IT", 1), scores(1, 1, ids=["GIVE IT", 2]), '{"GIVE IT',
])
def test_a_judge_is_not_told_what_it_was_made_to_say(reply: str) -> None:
    with pytest.raises(BadReplyError) as error:
        group("a", "b").read(reply)
    assert "GIVE IT" in str(error.value) and "GIVE IT" not in error.value.fault


def test_a_single_score_is_read_on_its_own_scale_and_every_reason_can_be_written_down() -> None:
    read = Question("p", ("a",), "r", high=10.0).read
    assert read('{"reason": "nice \\ud83d <think>", "score": 7}') == [(7.0, "nice ? <think>")]
    assert read('{"score": 7}') == [(7.0, "")]
    for reply in ('{"score": 11}', '{"reason": "good"}', scores(1), '{"score": 1, "score": 9}'):
        with pytest.raises(BadReplyError):
            read(reply)


# questions


def test_plain_text_stays_as_it_is() -> None:
    text = "if a < b | c: <b>x</b> <|> <| [1] [INSTALL] <story> </script> a[|x|y] cin >>a<< b; x[e] ]b] /thinking " \
           "/usr/think <role_x> <masked> <unused> List<int> <image src=1> |> <||> [prefixes]"
    assert text in Question("p", (text,), "r").user


def test_an_answer_cannot_switch_the_judges_thinking() -> None:
    for order in ("/no_think", "/think", "/nothink"):
        assert f"fine {order}" not in Question("p", (f"fine {order}",), "r").user


def test_different_questions_have_different_keys() -> None:
    questions = [
        group("a", "b"), group("b", "a"), group("a"), Question("Say it.", ("a", "b"), "Be kind", grouped=True),
        Question("Say.", ("a", "b"), GROUP_RUBRIC, grouped=True), Question("Say it.", ("a",), GROUP_RUBRIC),
        Question("Say it.", ("a",), GROUP_RUBRIC, "ref"), Question("Say it.", ("a",), GROUP_RUBRIC, high=10.0),
    ]
    keys = {question.key for question in questions}
    assert len(keys) == len(questions) and group("a", "b").key in keys


def test_what_no_request_can_hold_is_not_sent() -> None:
    (_, user) = group("a\udc80b", "c").messages()
    user["content"].encode()
    assert "a?b" in user["content"] and group("a\udc80b", "c").key != group("a?b", "c").key


# rewards


def call(reward: Any, prompts: list[Any], texts: list[str], **columns: Any) -> list[float | None]:
    found: list[float | None] = reward(prompts=prompts, completions=texts, **columns)
    return found


def test_a_group_is_what_has_one_prompt_in_a_row() -> None:
    judge = Scripted()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    found = call(rewards.ruler(judge), ["p", "p", "p", chat, chat, "p", "p"], ["", "a", "", "x", "", "a", "a"])
    assert found == [0.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.5], "scores are by length; the last group is all alike"
    assert [question.answers for question in judge.asked] == [("", "a"), ("x", "")], "identical answers shown once"
    assert judge.asked[1].prompt == "[system]\nBe brief.\n\n[user]\nHi" and judge.meter.calls == 2


def test_a_judge_is_not_asked_if_there_is_nothing_to_compare() -> None:
    judge = Scripted()
    for texts, score in ((["a"], 0.5), (["a", "a"], 0.5), (["", ""], 0.0), ([" \n"], 0.0)):
        assert call(rewards.ruler(judge), ["p"] * len(texts), texts) == [score] * len(texts) and not judge.asked


def test_a_score_is_mapped_from_its_range() -> None:
    judge = Scripted()
    reward = rewards.judged(judge, score_range=(1, 5))
    assert call(reward, ["p"] * 4, ["a", "abc", "abcdef", "abc"]) == [0.0, 0.5, 1.0, 0.5]
    assert [(question.low, question.high) for question in judge.asked] == [(1.0, 5.0)] * 3


def test_a_rows_rubric_and_reference_are_shown() -> None:
    judge = Scripted()
    reward = rewards.judged(judge, "Be fair", reference="gold", rubric_column="how")
    assert reward.columns == ("how", "gold")
    call(reward, ["p"] * 3, ["a", "a", "a"], gold=["x", None, 3], how=["Be strict", None, ""])
    assert [(q.rubric, q.reference) for q in judge.asked] == [("Be strict", "x"), ("Be fair", None), ("Be fair", "3")]
    assert "REFERENCE ANSWER" in judge.asked[0].user and "REFERENCE" not in judge.asked[1].user
    with pytest.raises(TypeError, match="reads the dataset column 'gold'"):
        call(reward, ["p"], ["a"], how=[None])
    side = rewards.ruler(judge, reference="gold")
    assert call(side, ["p"] * 4, ["a", "", "", "a"], gold=["x", "x", "y", "y"]) == [1.0, 0.0, 0.0, 1.0]


def test_a_failed_judge_pays_none() -> None:
    for reward in (rewards.ruler(Scripted(fails=True)), rewards.judged(Scripted(fails=True))):
        assert call(reward, ["p", "p"], ["a", "b"]) == [None, None] and reward.required
        assert reward.trouble and reward.trouble.kind == "babble"


def test_what_was_judged_is_not_judged_again() -> None:
    judge = Scripted()
    reward = rewards.ruler(judge)
    for _ in range(3):
        assert call(reward, ["p"] * 3, ["", "a", "a"]) == [0.0, 1.0, 1.0]
    assert len(judge.asked) == 1 and (judge.meter.calls, judge.meter.cached) == (1, 2)
    call(rewards.ruler(judge, "Another rubric"), ["p"] * 3, ["", "a", "a"])
    assert len(judge.asked) == 2


def test_what_is_logged_is_of_this_call() -> None:
    """All but the seconds are per completion, so that a mean over completions is that of the step."""
    logged: list[tuple[str, float]] = []
    extras: dict[str, list[str]] = {}
    reward = rewards.ruler(Scripted(), name="mine")
    tools: dict[str, Any] = {"log_metric": lambda *item: logged.append(item), "log_extra": extras.__setitem__}
    call(reward, ["p", "p", "q", "q"], ["a", "", "a", "a"], **tools)
    assert extras == {"mine_reason": ["a", "", "nothing to compare", "nothing to compare"]}
    assert dict(logged).keys() == {f"judge/mine/{name}" for name in (
        "failed", "cached", "retries", "tokens", "seconds")}
    assert dict(logged)["judge/mine/tokens"] == 2.5
    logged.clear()
    call(reward, ["p", "p", "q", "q"], ["a", "", "a", ""], **tools)
    assert dict(logged)["judge/mine/cached"] == 0.5, "not a running total"
    logged.clear()
    call(reward, ["p", "p"], ["a", "a"], **tools)
    assert dict(logged) == {f"judge/mine/{name}": 0 for name in ("failed", "cached", "retries", "tokens")}
    logged.clear()
    failing = rewards.ruler(Scripted(fails=True), name="mine")
    call(failing, ["p"] * 2 + ["q"] * 4, ["a", "a", *"abcd"], **tools)
    assert dict(logged)["judge/mine/failed"] == pytest.approx(4 / 6), "a share of completions"


def test_missing_prompts_are_an_error() -> None:
    with pytest.raises(TypeError, match="shows the judge each prompt and got no prompts"):
        rewards.ruler(Scripted())(completions=["a"])


made: Any = rewards  # with arguments of other types


@every_row(("make", "kind", "message"), [
    (lambda: made.ruler("http://127.0.0.1"), TypeError, r"got a str: give rewards.UrlJudge\(base_url"),
    (lambda: rewards.judged(Scripted(), " "), ValueError, "rubric is ' '; it must be a text"),
    (lambda: rewards.judged(Scripted(), score_range=(5, 5)), ValueError, r"score_range is \(5, 5\)"),
    *[(partial(made.judged, Scripted(), score_range=bad), ValueError, "score_range is .*worst below best")
      for bad in ((0, float("inf")), (0, "5"), (0, 1, 2), 5, None)],
    *[(partial(make, Scripted(), **{name: bad}), ValueError, "column is .*; it must be a text")
      for make in (made.judged, made.ruler) for name in ("reference", "rubric_column") for bad in ("", 5, ["a"])],
    (lambda: made.SelfJudge("tiny"), TypeError, "got a str; give it the model from FastLanguageModel"),
    (lambda: rewards.ruler(Scripted(), reference="prompt"), ValueError, "cannot read a column named prompt"),
])
def test_settings_that_make_no_sense_are_refused(make: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


# what is kept


def test_no_more_is_kept_than_the_cache_holds() -> None:
    judge = Scripted()
    judge.cache_size = 2
    for text in ("a", "b", "c", "a"):
        call(rewards.judged(judge), ["p"], [text])
    assert len(judge.cache) == 2 and judge.meter.cached == 0, "the oldest one went"
    call(rewards.judged(judge), ["p"], ["c"])
    assert judge.meter.cached == 1


def test_a_kind_of_trouble_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    judge = Scripted()
    for kind in ("down", "down", "slow", "down"):
        (now := Round()).report(kind, f"it is {kind}", "Wait")
        judge.end(now)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "scripted: completions have no reward: it is down. What to do: Wait" in caplog.records[0].message


def test_a_judge_reward_can_be_pickled() -> None:
    reward = rewards.ruler(Scripted())
    call(reward, ["p", "p"], ["a", ""])
    again = pickle.loads(pickle.dumps(reward))  # noqa: S301, our own
    assert call(again, ["p", "p"], ["a", ""]) == [1.0, 0.0] and again.judge.meter.cached == 1
