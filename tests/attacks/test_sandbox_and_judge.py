"""Attacks on the sandbox and the judge: each fails, and the command would see it if one did not."""

import os
import signal
from collections.abc import Callable

import pytest

from lowmem_grpo.rewards.sandbox import rights
from lowmem_grpo.rewards.sandbox.trial import ISOLATIONS, why_not
from tests.attacks import floods, judge, judge_answers
from tests.attacks.attack import Verdict, report
from tests.attacks.outside import LIBC, Outside, outside
from tests.attacks.sandbox import PARTS, attack

pytestmark = [pytest.mark.slow, pytest.mark.attack]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_no_attack_on_the_sandbox_succeeds(
    isolation: str, part: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floods, "PATIENCE", 100.0)  # seconds: only what hangs takes so long
    if fault := why_not(isolation):
        pytest.skip(f"{isolation}: {fault}")
    if isolation == "process" and rights.landlock_version() < rights.COMPLETE:
        pytest.skip("process: this kernel lacks Landlock 3, and the opt-in says that files are open then")
    status = report(attack(isolation, [part]))
    said = capsys.readouterr().out
    assert status == 0, said


def test_no_attack_on_the_judge_succeeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "MARGIN", 100.0)  # as above
    monkeypatch.setattr(judge_answers, "SECONDS", 100.0)
    status = report(judge.verdicts())
    said = capsys.readouterr().out
    assert status == 0 and int(said.splitlines()[-1].split()[0]) > 250, said


@pytest.mark.parametrize(("name", "case", "damage"), [
    ("a wrong score", judge.Case("k", "n", judge.chat(judge.GOOD), [0.5, 0.5]), "the scores are [0.25, 0.75]"),
    ("too many requests", judge.Case("k", "n", (500, {}), requests=1), "2 requests"),
    ("an error", judge.Case("k", "n", judge.chat(judge.GOOD), settings={"timeout": 0}), "it raised ValueError"),
])
def test_an_attack_on_the_judge_that_succeeds_is_seen(name: str, case: judge.Case, damage: str) -> None:
    with judge.listening():
        assert damage in judge.play(case).damage, name
    told = [f"x{judge.KEY}", "y\x1b[2J", "z" * 2000]
    assert len([*filter(None, judge.shown_wrongly(told))]) == 3


CHANGES: dict[str, Callable[[Outside], object]] = {
    "signals to the trainer": lambda world: os.kill(os.getpid(), signal.SIGUSR1),
    "the victim's end": lambda world: (world.victim.kill(), world.victim.wait()),
    "the victim": lambda world: os.sched_setaffinity(world.victim.pid, {0}),
    "the file": lambda world: os.utime(world.file, (0, 0)),
    "the folder": lambda world: (world.folder / "new").mkdir(),
    "new files": lambda world: os.mkdir(f"/tmp/{world.mark}"),
    "the udp socket": lambda world: world.sockets["udp"].sendto(b"x", world.sockets["udp"].getsockname()),
    "the shared memory": lambda world: LIBC.shmctl(world.memory, 0, None),
    "the semaphore": lambda world: LIBC.semctl(world.lock, 0, 16, 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_outside_is_seen_and_named(name: str) -> None:
    with outside() as world:
        assert world.damage() == ""
        CHANGES[name](world)
        assert any(part.startswith(f"{name}: ") for part in world.damage().split("; "))
        assert world.damage() == "", "it is seen once"
    if name == "new files":
        os.rmdir(f"/tmp/{world.mark}")


def test_the_report_counts_by_kind_and_fails_for_one_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([Verdict("a", "x"), Verdict("b", "y", "it got out"), Verdict("a", "z")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "SUCCEEDED  b: y: it got out", "a     2 attacks     0 succeeded", "b     1 attacks     1 succeeded",
        "3 attacks, 1 successes",
    ]
    assert report([Verdict("a", "x")]) == 0
    assert report([]) == 1, "nothing was shown"
