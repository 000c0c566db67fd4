"""Attacks on the judge: `python -m tests.attacks.judge`.

A server on this machine, the replies of a judge, the answers that it reads and a user's settings each do their worst.
What must hold is seen from outside: the scores, or a group that is not judged and the reason; no error that ends the
run; bounds on seconds, requests and bytes; no key and no terminal's escapes in what is logged or kept.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

from lowmem_grpo import rewards
from tests.attacks.attack import Verdict, attack_and_exit, attempted
from tests.attacks.judge_answers import answer_verdicts
from tests.attacks.judge_cases import ANY, GOOD, KEY, SCORES, TEXTS, UNJUDGED, Case, cases
from tests.attacks.judge_server import JudgeServer, chat, in_turn, serving

AT_ONCE = 8  # cases; most of them wait
MARGIN = 6.0  # seconds that a busy machine may need besides
MOST_BYTES = 64 << 20  # of a server without an end: what is read, and what lies in sockets (36 MiB on Linux)
MOST_SHOWN = 1000  # characters of a message
SETTINGS: dict[str, Any] = {"timeout": 5.0, "deadline": 15.0, "retries": 1, "options": {"max_tokens": 5000}}
Job = Callable[[], Verdict]


class Said(logging.Handler):
    """What each thread has logged, as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[int | None, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.setdefault(record.thread, []).append(record.getMessage())

    def of_this_thread(self) -> list[str]:
        return self.lines.pop(threading.get_ident(), [])


SAID = Said()


def judge_of(url: str, **settings: Any) -> Any:
    return rewards.UrlJudge(url, "m", KEY, **(SETTINGS | settings))


def score(judge: Any, texts: tuple[str, ...] = TEXTS) -> tuple[list[float | None], list[str], Any]:
    """The scores, all that is told or kept, and the reward."""
    reward: Any = rewards.ruler(judge)
    kept: dict[str, Any] = {}
    SAID.of_this_thread()
    found = asyncio.run(reward(prompts=["p"] * len(texts), completions=list(texts), log_extra=kept.__setitem__,
                               log_metric=kept.__setitem__))
    told = [*SAID.of_this_thread(), str(reward.trouble or ""), judge.summary(), repr(judge), repr(reward)]
    return found, told, (reward, kept)


def play(case: Case) -> Verdict:
    """A case of a server."""
    answer: Any = case.answer if callable(case.answer) else in_turn(case.answer)
    with serving(answer) as server:
        return attempted(case.kind, case.name, lambda: "; ".join(filter(None, damages(case, server))))


def damages(case: Case, server: JudgeServer) -> Iterator[str]:
    """All that is wrong after a case, seen from outside."""
    judge, began = judge_of(server.url, **case.settings), time.monotonic()
    found, told, (reward, kept) = score(judge, case.texts)
    took, known = time.monotonic() - began, SETTINGS | case.settings
    limit = min(known["deadline"], (1 + known["timeout"]) * (1 + known["retries"])) + MARGIN
    yield f"it took {took:.1f} s" if took > limit else ""
    yield wrong_scores(found, case.expected)
    yield "" if found != UNJUDGED or reward.trouble else "nobody is told why"
    yield f"{len(server.asked)} requests" if len(server.asked) > case.requests else ""
    yield f"{server.sent} bytes were taken" if server.sent > MOST_BYTES else ""
    yield from shown_wrongly(told)
    reasons = kept["ruler_reason"]
    yield from ("a reason has the key" if KEY in text else "" for text in reasons)
    yield "a reason is long" if max(map(len, reasons)) > 2 * MOST_SHOWN else ""


def wrong_scores(found: list[float | None], expected: list[float] | None) -> str:
    if expected == ANY:
        return "" if found in (SCORES, UNJUDGED) else f"the scores are {found}"
    return "" if found == (expected or UNJUDGED) else f"the scores are {found}, not {expected}"


def shown_wrongly(told: list[str]) -> Iterator[str]:
    for text in told:
        yield "a message has the key" if KEY in text or KEY[:12] in text else ""
        yield f"a message has {len(text)} characters" if len(text) > MOST_SHOWN else ""
        yield f"a message can move a terminal: {text[:99]!r}" if not text.isprintable() else ""


# What needs more than a server


def elsewhere(status: int) -> Verdict:
    """A redirect to another server: it may get the question, but not the key."""
    with serving(in_turn(chat(GOOD))) as other:
        place = {"Location": f"{other.url}/chat/completions"}
        verdict = play(Case("keys", f"a redirect by {status} to another server", (status, b"", place), ANY))
        told = any(KEY in text for headers in other.told for text in headers.values())
    return Verdict(verdict.kind, verdict.name, verdict.damage or ("the other server has the key" if told else ""))


SECRET = {"extra_headers": {"x-api-key": KEY}}
NO_NUMBERS: tuple[Any, ...] = (float("nan"), float("inf"), -1.0, "1", True, [])
REFUSED: dict[str, dict[str, Any]] = {
    **{f"a key with {name}": {"api_key": text}
        for name, text in {"a line break": f"{KEY}\n", "another header": f"{KEY}\r\nx: y", "a space": f" {KEY}",
        "NUL": f"{KEY}\0", "an accent": f"{KEY}\u00e9", "a wide letter": f"\uff53{KEY}"}.items()},
    "a key in bytes": {"api_key": KEY.encode()}, "a key in a list": {"api_key": [KEY]},
    "a URL that is a number": {"base_url": 5},
    **{f"the URL {url!r}": {"base_url": url}
        for url in ("", "http://", "http://[", "http://a:b:c", "http://h:99999999", "file:///etc/passwd", f"{KEY}@host",
        "http://\0", "http://" + "a" * 70_000)},
    "an unknown option beside a secret": {"options": SECRET | {"temprature": 0}},
    "an option of ours beside a secret": {"options": SECRET | {"stream": True}},
    "an option of an odd name": {"options": {5: 1}},
    **{f"{name}={value!r}": {name: value} for name in ("timeout", "deadline")
       for value in NO_NUMBERS},
}


def refused(settings: dict[str, Any]) -> str:
    """Settings that are refused before the run, without showing a secret."""
    try:
        rewards.UrlJudge(**({"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key": KEY} | settings))
    except ValueError as error:
        return "; ".join(filter(None, shown_wrongly([str(error)])))
    return "it is taken"


def with_password() -> str:
    """A password in the URL is sent to the server, and shown nowhere."""
    with serving(in_turn((500, {"error": {"message": "no"}}))) as server:
        told = score(judge_of(server.url.replace("//", f"//user:{KEY}@") + f"?key={KEY}"))[1]
    return "; ".join(filter(None, shown_wrongly(told)))


def jobs() -> Iterator[Job]:
    """Every attack, ready to be played."""
    yield from (partial(play, case) for case in cases())
    yield from (partial(elsewhere, status) for status in (301, 302, 303, 307, 308))
    yield from (partial(attempted, "settings", name[:60], partial(refused, settings))
                for name, settings in REFUSED.items())
    yield partial(attempted, "keys", "a password in the URL", with_password)
    yield from answer_verdicts(score, judge_of)


@contextmanager
def listening() -> Iterator[None]:
    """Notes what is logged in place of showing it."""
    root = logging.getLogger()
    before = root.handlers
    root.handlers = [SAID]
    try:
        yield
    finally:
        root.handlers = before


def verdicts() -> Iterator[Verdict]:
    """The verdict of every attack."""
    with listening(), ThreadPoolExecutor(AT_ONCE) as pool:
        for playing in [pool.submit(job) for job in jobs()]:
            yield playing.result()


@click.command(help=__doc__)
def main() -> None:
    attack_and_exit(lambda _: verdicts(), "all that a server, its replies, answers and settings did")


if __name__ == "__main__":
    main()
