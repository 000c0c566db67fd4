"""What a judge is asked, how its replies are read, what is kept: no server and no model."""

import json
import logging
import pickle
from typing import Any

import pytest
from scripted import Scripted
from tables import every_row

from lowmem_grpo import rewards
from lowmem_grpo.rewards.judge.judge import QUIET_SECONDS, Meter, Round
from lowmem_grpo.rewards.judge.question import GROUP_RUBRIC, Question
from lowmem_grpo.rewards.judge.reply import BadReplyError, read_group


def group(*answers: str) -> Question:
    return Question("Say it.", answers, GROUP_RUBRIC, grouped=True)


def scores(*values: Any, ids: Any = None) -> str:
    numbers = range(1, len(values) + 1) if ids is None else ids
    return json.dumps({"scores": [{"id": number, "reason": "so", "score": value}
                                  for number, value in zip(numbers, values, strict=True)]})


# replies


@every_row("reply", [
    scores(0.25, 1), f"```json\n{scores(0.25, 1)}\n```", f"\n```\n{scores(0.25, 1)}```\n",
    f"<think>Is it {{1}}?</think>\n{scores(0.25, 1)}", f"It wants {scores(1, 1)}\n</think>\n{scores(0.25, 1)}",
    f"{scores(1, 1)}</think>```JSON {scores(0.25, 1)}```", scores(1, 0.25, ids=[2, 1]), scores(0.25, 1, ids=["1", "2"]),
])
def test_a_reply_with_scores_is_read(reply: str) -> None:
    assert read_group(reply, 2, 0, 1) == [(0.25, "so"), (1.0, "so")]


@every_row(("reply", "fault"), [
    ("They are both fine.", "not just one JSON object: 'They are both fine.'"), ("", "it is empty"),
    ("{" * 100_000, "not just one"), (f"<think>It wants {scores(1, 1)}", "its thinking has no end"),
    (f"<think>a</think><think>{scores(1, 1)}", "has no end"), (f"</think>{scores(1, 1)} No: 0", "not just one"),
    (f"It wants {scores(1, 1)}, so 0.", "not just one"), (f"Scores:\n{scores(1, 1)}", "not just one"),
    (f"```json\n{scores(1, 1)}\n``` That is what it wants. ```0```", "not just one"), ("```", "not just one"),
    ('{"scores":' + "[" * 100_000 + "}", "not just one"), ("[0.2, 0.4]", "not just one"),
    ('{"scores": [0.2, 0.4]}', "no list of objects"), ('{"scores": 1}', "no list"),
    (scores(0.2), "no score for answer 2"), (scores(0.2, 0.4, 0.6), "none of 1 to 2: 3"),
    (scores(0.2, 0.4, ids=[1, 1]), "answer 1 twice"), (scores(0.2, 0.4, ids=[0, 1]), "none of 1 to 2: 0"),
    (scores(0.2, 0.4, ids=[1, True]), "of 1 to 2: True"), (scores(0.2, 0.4, ids=[1, None]), "of 1 to 2: None"),
    (scores(0.2, 1.1), "1.1 is not within 0 to 1"), (scores(0.2, -0.1), "-0.1 is not within"),
    (scores(0.2, True), '"score" is not a number: True'), (scores(0.2, "0.4"), "not a number: '0.4'"),
    (scores(0.2, None), "not a number: None"), (scores(0.2, float("nan")), "it has NaN"),
    (scores(0.2, float("inf")), "it has Infinity"), (scores(0.2, 10**400), "not a number"),
    (scores(0.2, 0.4).replace("0.4", "1e999"), "not a number"),
    (scores(0.2, 0.4).replace("0.4", "9" * 5000), "no usable JSON"), (scores(0.2, 0.4) + scores(1, 1), "not just one"),
    (scores(0.2, 0.4)[:-3], "not just one"), ('{"scores": [{"id": 1, "score": 0, "score": 1}]}', "the same key twice"),
])
def test_a_reply_without_scores_is_refused(reply: str, fault: str) -> None:
    with pytest.raises(BadReplyError) as error:
        read_group(reply, 2, 0, 1)
    assert fault in str(error.value) and len(str(error.value)) < 200


@every_row("reply", [
    "GIVE IT 1.0", "<think>GIVE IT", scores("GIVE IT", 1), scores(1, 1, ids=["GIVE IT", 2]), '{"GIVE IT',
])
def test_a_judge_is_not_told_what_it_was_made_to_say(reply: str) -> None:
    with pytest.raises(BadReplyError) as error:
        read_group(reply, 2, 0, 1)
    assert "GIVE IT" in str(error.value) and "GIVE IT" not in error.value.fault


def test_a_single_score_is_read_on_its_own_scale_and_every_reason_can_be_written_down() -> None:
    read = Question("p", ("a",), "r", high=10.0).read
    assert read('{"reason": "nice \\ud83d <think>", "score": 7}') == [(7.0, "nice ? <think>")]
    assert read('{"score": 7}') == [(7.0, "")]
    for reply in ('{"score": 11}', '{"reason": "good"}', scores(1)):
        with pytest.raises(BadReplyError):
            read(reply)


# questions


def test_plain_text_stays_as_it_is() -> None:
    text = "if a < b | c: <b>x</b> <|> <| [1] [INSTALL] <story> </script> a[|x|y] cin >>a<< b; x[e] ]b] /thinking " \
           "/usr/think <role_x> <masked> <unused> List<int> <image src=1> |> <||> [prefixes]"
    assert text in Question("p", (text,), "r").user


@pytest.mark.parametrize("order", ["/no_think", "/think", "/nothink"])
def test_an_answer_cannot_switch_the_judges_thinking(order: str) -> None:
    assert f"fine {order}" not in Question("p", (f"fine {order}",), "r").user


def test_the_prompt_is_given_once() -> None:
    question = group("a", "b", "c")
    text = "".join(message["content"] for message in question.messages())
    assert text.count("Say it.") == 1 and "every id from 1 to 3" in text and GROUP_RUBRIC in text


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


@pytest.mark.parametrize(("texts", "score"), [(["a"], 0.5), (["a", "a"], 0.5), (["", ""], 0.0), ([" \n"], 0.0)])
def test_a_judge_is_not_asked_if_there_is_nothing_to_compare(texts: list[str], score: float) -> None:
    judge = Scripted()
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


def test_a_share_is_of_completions() -> None:
    logged: dict[str, float] = {}
    reward = rewards.judged(Scripted(fails=True))
    call(reward, ["p"] * 3 + ["q"], ["a", "a", "a", "b"], log_metric=logged.__setitem__)
    assert logged["judge/judged/failed"] == 1 and logged["judge/judged/tokens"] == 5.0
    logged.clear()
    ruler = rewards.ruler(Scripted(fails=True))
    call(ruler, ["p"] * 2 + ["q"] * 4, ["a", "a", *"abcd"], log_metric=logged.__setitem__)
    assert logged["judge/ruler/failed"] == pytest.approx(4 / 6)


def test_missing_prompts_are_an_error() -> None:
    with pytest.raises(TypeError, match="shows the judge each prompt and got no prompts"):
        rewards.ruler(Scripted())(completions=["a"])


@every_row(("make", "kind", "message"), [
    (lambda: rewards.ruler("http://127.0.0.1"), TypeError, r"got a str: give rewards.UrlJudge\(base_url"),
    (lambda: rewards.judged(Scripted(), " "), ValueError, "rubric is ' '; it must be a text"),
    (lambda: rewards.judged(Scripted(), score_range=(5, 5)), ValueError, r"score_range is \(5, 5\)"),
    (lambda: rewards.judged(Scripted(), score_range=(0, float("inf"))), ValueError, "score_range"),
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


def test_a_kind_of_trouble_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    judge = Scripted()
    for kind in ("down", "down", "slow", "down"):
        (now := Round([])).report(kind, f"it is {kind}", "Wait")
        judge.end(now)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    judge.warned["down"] -= QUIET_SECONDS  # a while ago
    judge.end(now)
    assert "scripted: it is down; those completions have no reward. What to do: Wait" in caplog.records[2].message


def test_the_summary_tells_what_the_meter_counted() -> None:
    judge = Scripted()
    judge.meter = Meter(calls=3, cached=1, prompt_tokens=2_000_000, completion_tokens=500_000)
    assert judge.summary() == (
        "judge scripted: 3 calls (1 more from the cache), 0 retried, 0 failed; "
        "2,000,000 prompt and 500,000 completion tokens")


def test_a_judge_reward_can_be_pickled() -> None:
    reward = rewards.ruler(Scripted())
    call(reward, ["p", "p"], ["a", ""])
    again = pickle.loads(pickle.dumps(reward))  # noqa: S301, our own
    assert call(again, ["p", "p"], ["a", ""]) == [1.0, 0.0] and again.meter.cached == 1
