"""A judge behind a URL: a real server on this machine that answers well, badly, slowly or not at all."""

import asyncio
import gzip
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest
from tables import every_row

from lowmem_grpo import rewards
from lowmem_grpo.rewards.judge.judge import Meter
from tests.attacks.judge_server import JudgeServer, Reply, by_length, chat, in_turn, serving

TEXTS = ["a" * 3, "", "a" * 3, "a"]
GOOD = [0.25, 1.0, 0.25, 0.5]  # 1 / (1 + length)
ERROR = {"error": {"message": "no such luck", "type": "x"}}


def judge_of(server: JudgeServer | str, **settings: Any) -> Any:
    url = server if isinstance(server, str) else server.url
    return rewards.UrlJudge(url, "m", "key", **({"retries": 1} | settings))


def together(count: int) -> Callable[[dict[str, Any]], Reply]:
    """A judge that answers so many requests at once."""
    all_of_them = threading.Barrier(count)

    def answer(body: dict[str, Any]) -> Reply:
        all_of_them.wait(60)
        time.sleep(0.1)  # where more may be open, one more comes now
        return by_length(body)

    return answer


@pytest.fixture
def never() -> Iterator[Callable[[dict[str, Any]], Reply]]:
    """A judge that does not answer before the end of the test."""
    end = threading.Event()

    def answer(body: dict[str, Any]) -> Reply:
        end.wait(60)
        return by_length(body)

    yield answer
    end.set()


def score(reward: Any, prompts: list[Any], texts: list[str], **columns: Any) -> list[float | None]:
    found: list[float | None] = asyncio.run(reward(prompts=prompts, completions=texts, **columns))
    return found


def unjudged(judge: Any) -> Any:
    """A reward of this judge, after a call that no reply gave a score for."""
    reward = rewards.ruler(judge)
    assert score(reward, ["p"] * 4, TEXTS) == [None] * 4
    return reward


def ruled(judge: Any, groups: int = 1) -> list[float | None]:
    prompts = [f"p{number}" for number in range(groups) for _ in TEXTS]
    return score(rewards.ruler(judge), prompts, TEXTS * groups)


def test_good_scores_arrive() -> None:
    with serving(by_length) as server:
        judge = judge_of(server, options={"temperature": 0, "max_tokens": 99,
                                          "response_format": {"type": "json_object"}})
        assert ruled(judge) == GOOD
        assert score(rewards.judged(judge), ["p"] * 4, TEXTS) == pytest.approx(GOOD)
        assert ruled(judge) == GOOD, "in a new event loop, from the cache"
    group, *single = server.asked
    assert (group["model"], group["temperature"], group["max_tokens"]) == ("m", 0, 99) and len(single) == 3
    assert group["response_format"] == {"type": "json_object"}
    assert judge.meter == Meter(calls=4, cached=1, prompt_tokens=400, completion_tokens=80)
    assert "m: 4 calls (1 more from the cache), 0 retried, 0 failed" in judge.summary()


def test_each_event_loop_has_a_client_of_its_own() -> None:
    with serving(by_length) as server:
        judge = judge_of(server, cache_size=0)
        assert ruled(judge) == ruled(judge) == GOOD and len(server.asked) == 2
        again = pickle.loads(pickle.dumps(judge))  # noqa: S301, our own
        assert ruled(again) == GOOD


def test_no_more_requests_are_open_than_allowed() -> None:
    with serving(together(3)) as server:
        assert ruled(judge_of(server, concurrency=3), groups=6) == GOOD * 6
        assert server.most_open == 3


@pytest.mark.parametrize(("answer", "kind", "said"), [
    (chat("Both are lovely."), "babble", "not just one JSON object with each key once: 'Both are lovely.'"),
    (chat(None), "babble", "it is empty"), (chat('{"scores": [', "length"), "cut", "was cut off"),
])
def test_text_in_place_of_scores_is_not_paid(
    answer: Any, kind: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(in_turn(answer)) as server:
        judge = judge_of(server, retries=2)
        reward = unjudged(judge)
        assert len(server.asked) == 3 and (judge.meter.retried, judge.meter.failed) == (2, 1)
        again = server.asked[1]["messages"][1]["content"]
        assert "Your reply before this one could not be used" in again and "lovely" not in again
    assert reward.trouble.kind == kind and said in reward.trouble.problem
    assert [record.message for record in caplog.records if said in record.message]


PACKED = {"Content-Encoding": "gzip"}


@pytest.mark.parametrize("answer", [
    lambda body: (500, repeat(b" " * 65536)), lambda body: (200, gzip.compress(bytes(10**7)), PACKED),
    lambda body: (200, "<html>Welcome</html>"),
], ids=["an endless error", "packed", "a page"])
def test_what_is_too_large_or_no_chat_completion_is_not_read_and_not_asked_for_again(answer: Any) -> None:
    with serving(answer) as server:
        reward = unjudged(judge_of(server, retries=2))
        assert reward.trouble.kind == "answer" and "gives no chat completion" in reward.trouble.problem
        assert len(server.asked) == 1


@pytest.mark.parametrize(("first", "replies"), [((429, ERROR), 1), ((500, ERROR), 1), (chat("Well, well."), 3)])
def test_an_error_that_passes_and_a_reply_without_scores_do_not_cost_the_group(first: Any, replies: int) -> None:
    with serving(in_turn(first, first, by_length)) as server:
        judge = judge_of(server, retries=2)
        assert ruled(judge) == GOOD and len(server.asked) == 3
        assert (judge.meter.calls, judge.meter.retried, judge.meter.failed) == (1, replies - 1, 0)
        assert judge.meter.prompt_tokens == 100 * replies, "each reply is paid for"


@pytest.mark.parametrize(("status", "kind", "requests"), [
    (500, "request", 3), (429, "limit", 3), (401, "key", 1), (403, "key", 1), (404, "model", 1),
    (400, "request", 1),
])
def test_an_error_that_stays_does_not_end_the_run(
    status: int, kind: str, requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(in_turn((status, ERROR))) as server:
        judge = judge_of(server, retries=2)
        reward = unjudged(judge)
        assert len(server.asked) == requests
        assert reward.trouble.kind == kind and "no such luck" in reward.trouble.problem
        score(reward, ["q"] * 4, TEXTS)
        assert judge.meter.failed == 2
    assert len([record for record in caplog.records if "have no reward" in record.message]) == 1, "said once"


def test_a_server_that_is_down_does_not_end_the_run() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/v1"
        judge = judge_of(url)
        reward = unjudged(judge)
    assert reward.trouble.kind == "down" and url in reward.trouble.problem and "base_url" in reward.trouble.fix
    assert (judge.meter.calls, judge.meter.failed) == (1, 1)


def test_a_slow_server_is_not_waited_for(never: Any) -> None:
    with serving(never) as server:
        reward = unjudged(judge_of(server, timeout=0.1, retries=0))
        assert reward.trouble.kind == "slow" and "did not answer within 0.1 s" in reward.trouble.problem


def test_answers_before_the_deadline_are_kept_without_the_late_ones(never: Any) -> None:
    """The clock of this event loop leaps beyond the deadline as soon as two questions are answered."""
    def answer(body: dict[str, Any]) -> Any:
        return (never if "p1" in body["messages"][1]["content"] else by_length)(body)

    class Leaping(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return super().time() + 1000.0 * (len(judge.cache) == 2)

    with serving(answer) as server:
        judge = judge_of(server, deadline=600.0, timeout=600.0, retries=3)
        reward = rewards.ruler(judge)
        with asyncio.Runner(loop_factory=Leaping) as runner:
            found = runner.run(reward(prompts=["p0"] * 4 + ["p1"] * 4 + ["p2"] * 4, completions=TEXTS * 3))
        assert found == GOOD + [None] * 4 + GOOD and reward.time_limit == 605.0
        assert reward.trouble.kind in ("late", "slow") and judge.meter.failed == 1


@every_row(("settings", "message"), [
    ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'; it must be an address"),
    ({"model": ""}, "model is"), ({"timeout": 0}, "timeout is 0"), ({"deadline": float("inf")}, "deadline is inf"),
    ({"retries": -1}, "retries is"), ({"concurrency": 0}, "concurrency is 0"),
    ({"cache_size": -1}, "cache_size is -1"), ({"options": {"temprature": 0}}, "options has .'temprature'"),
    ({"options": 5}, "options is 5; it must be a dict"),
    ({"options": {"n": 2}}, "options has .'n'.; it must be .* without model, messages"),
])
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rewards.UrlJudge(**({"base_url": "http://127.0.0.1/v1", "model": "m", "api_key": "k"} | settings))


@pytest.mark.parametrize(("option", "advice"), [
    ("cache_file", "leave it out"), ("price_prompt", "judge.meter"), ("temprature", "docs/judge.md")])
def test_an_option_that_is_gone_or_unknown_is_refused_with_advice(option: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"no option '{option}': .*{advice}"):
        rewards.UrlJudge("http://127.0.0.1/v1", "m", "k", **{option: 1})


def test_a_judge_without_a_key_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match=r"the judge has no API key .* api_key=\"local\""):
        rewards.UrlJudge("http://127.0.0.1:1/v1", "m")
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    rewards.UrlJudge("http://127.0.0.1:1/v1", "m")
    assert "k" not in repr(rewards.ruler(rewards.UrlJudge(None, "gpt", "sec")))


def test_the_scorer_knows_that_it_waits() -> None:
    """The requests of two rewards are open side by side, in the scorer's loop."""
    with serving(together(3)) as server:
        judge = judge_of(server)
        scorer = rewards.RewardScorer([rewards.ruler(judge), rewards.judged(judge)], timeout=0.01)
        scores = scorer.score(["p"] * 2, ["a", ""], [[1], []], {}, None)
        assert scores.rewards == {"ruler": [0.5, 1.0], "judged": [0.5, 1.0]} and server.most_open == 3
        assert scores.metrics["judge/ruler/failed"] == 0 and scores.extras["ruler_reason"] == ["r1", "r2"]
