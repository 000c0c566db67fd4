"""Jobs start in their order, one after the other or together, and what became of them is known after a restart."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import JOB, until
from tables import every_row

from lowmem_grpo.server.jobs import dispatcher as dispatcher_module
from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.dispatcher import COMMAND, TOO_LARGE, Dispatcher, wait_for_room
from lowmem_grpo.server.jobs.queue import CANCELLED, DONE, FAILED, OVER, RUNNING, WAITING, Job, JobQueue, JobRequest
from lowmem_grpo.server.page.run_follower import json_file
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.utils import GIB, size_text

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux and macOS")
@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    made = JobQueue(Database(tmp_path / "server.sqlite"), tmp_path / "jobs")
    yield made
    for job in made.live():
        keeper.ask_to_stop(made.folder_of(job))


@pytest.fixture
def dispatcher(queue: JobQueue, tmp_path: Path) -> Dispatcher:
    (tmp_path / "small.py").write_text(JOB)
    return Dispatcher(queue, tmp_path)


def submit(queue: JobQueue, what: str = "end", **fields: object) -> int:
    return queue.submit(JobRequest.from_json({"recipe": "small.py", "options": [f"what={what}"], **fields}), "me").id


def polled(dispatcher: Dispatcher, holds: Callable[[], object]) -> None:
    until(lambda: dispatcher.poll() or holds())  # type: ignore[func-returns-value]


def log(queue: JobQueue, number: int) -> list[str]:
    """Return the lines of a job's log that say how it began."""
    path = queue.folder_of(queue.one(number)) / keeper.LOG
    return [line for line in path.read_text().splitlines() if line.startswith("began")] if path.exists() else []


def enough(queue: JobQueue, number: int) -> None:
    (queue.folder_of(queue.one(number)) / "enough").touch()


@pytest.mark.slow
def test_one_after_the_other_and_each_says_what_it_waits_for(queue: JobQueue, dispatcher: Dispatcher) -> None:
    first, second, third = submit(queue, "wait"), submit(queue), submit(queue, priority=1)
    dispatcher.start_run(queue.one(first))
    polled(dispatcher, lambda: log(queue, first))
    assert queue.one(third).why == f"waits for job {first}, which has 100% of the card; it asks for 100%"
    assert queue.one(second).why == "waits for the jobs before it in the queue"
    enough(queue, first)
    polled(dispatcher, lambda: queue.one(second).state == DONE)
    assert queue.one(first).state == DONE == queue.one(third).state
    assert queue.one(third).began < queue.one(second).began  # type: ignore[operator]


def test_an_error_is_told_in_the_runs_own_words(queue: JobQueue, dispatcher: Dispatcher) -> None:
    number = submit(queue, "fail")
    polled(dispatcher, lambda: queue.one(number).state in OVER)
    assert queue.one(number).state == FAILED
    assert queue.one(number).why.startswith("ValueError: the data are gone (exit status 1)")


@pytest.mark.slow
def test_shares_run_together_and_the_next_server_finds_one_that_runs_and_one_that_ended_meanwhile(
    queue: JobQueue, dispatcher: Dispatcher, tmp_path: Path
) -> None:
    runs, ends = submit(queue, "wait", share=0.5), submit(queue, "wait", share=0.5)
    polled(dispatcher, lambda: log(queue, runs) and log(queue, ends))
    assert [one.state for one in queue.live()] == [RUNNING, RUNNING]
    assert log(queue, runs) == log(queue, ends) == ["began, resume=False, share=0.5"]
    enough(queue, ends)
    until(lambda: json_file(queue.folder_of(queue.one(ends)) / keeper.ENDED))  # while there is no server
    following = Dispatcher(queue, tmp_path)
    following.poll()
    assert (queue.one(runs).state, queue.one(ends).state) == (RUNNING, DONE)
    enough(queue, runs)
    polled(following, lambda: queue.one(runs).state == DONE)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the keeper in /proc")
def test_a_job_whose_processes_vanished_goes_on_from_its_checkpoint(
    queue: JobQueue, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = submit(queue, "wait")
    polled(dispatcher, lambda: log(queue, number))
    folder = queue.folder_of(queue.one(number))
    run = int((folder / keeper.RUN).read_text())
    os.kill(int(Path(f"/proc/{run}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)  # its keeper
    os.kill(run, signal.SIGKILL)
    monkeypatch.setattr("lowmem_grpo.server.jobs.dispatcher.COMES_UP", 0.0)
    polled(dispatcher, lambda: queue.one(number).state == WAITING or queue.one(number).goes == 2)
    monkeypatch.undo()
    enough(queue, number)
    polled(dispatcher, lambda: queue.one(number).state in OVER)
    assert (queue.one(number).state, queue.one(number).goes) == (DONE, 2)
    assert log(queue, number) == ["began, resume=False, share=1", "began, resume=True, share=1"]


def a_card(monkeypatch: pytest.MonkeyPatch, total: int, *free: int) -> None:
    """Let torch report a card with `total` bytes, of which the next number of `free` is free at each look."""
    monkeypatch.setattr(dispatcher_module, "driver_version", lambda: "580")
    looks = iter(free)
    for name, value in {"is_available": lambda: True, "get_device_name": lambda device: "a card",
                        "get_device_properties": lambda index: SimpleNamespace(total_memory=total),
                        "get_per_process_memory_fraction": lambda device: 1.0, "set_per_process_memory_fraction": float,
                        "mem_get_info": lambda: (next(looks), total)}.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_a_job_waits_until_the_card_has_room_for_its_plan_and_says_so(
    tmp_path: Path, queue: JobQueue, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue.start_job(queue.one(submit(queue)))
    folder = queue.folder_of(job)
    folder.mkdir(parents=True)
    a_card(monkeypatch, 24 * GIB, GIB, 22 * GIB)
    said = []

    def look(seconds: float) -> None:
        dispatcher.check_run(job)
        said.append(queue.one(job.id).why)

    monkeypatch.setattr(dispatcher_module, "time", SimpleNamespace(sleep=look, time=time.time))
    wait_for_room("gsm8k", ["engine=transformers", f"output_dir={folder / 'run'}"])
    dispatcher.check_run(queue.one(job.id))
    peak = queue.one(job.id).peak_bytes
    assert peak is not None and GIB < peak < 22 * GIB and queue.one(job.id).why == ""
    assert said == [f"needs {size_text(peak)}, and 1.00 GiB of the card are free: another program has the rest"]


def test_a_wait_for_room_ends_with_the_shell_that_began_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_card(monkeypatch, 24 * GIB, GIB)  # a second look would raise StopIteration
    parents = iter((7, 7, 1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(dispatcher_module, "time", SimpleNamespace(sleep=lambda seconds: None, time=time.time))
    wait_for_room("gsm8k", ["engine=transformers", f"output_dir={tmp_path / 'run'}"])
    assert next(parents, None) is None


def test_a_plan_that_fits_no_card_ends_a_job_with_its_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_card(monkeypatch, 2 * GIB)
    with pytest.raises(SystemExit) as ended:
        wait_for_room("gsm8k", ["gpu=16", "engine=transformers", "card_share=0.5", "output_dir=x"])
    assert ended.value.code == TOO_LARGE
    assert re.match(r"the plan says that it needs [\d.]+ GiB, and it may fill [\d.]+ GiB of this card \(50% of it\)"
                    r"\. \w+", capsys.readouterr().out)


def test_a_job_runs_with_its_own_words_unless_its_plan_says_that_it_cannot(tmp_path: Path) -> None:
    python = tmp_path / "python"
    for status, ran in ((0, True), (1, True), (TOO_LARGE, False)):
        python.write_text(f'#!/bin/sh\n[ "$2" = lowmem_grpo ] || exit {status}\necho "$@"\n')
        python.chmod(0o755)
        done = subprocess.run(["sh", "-c", COMMAND, python, "a b.py", "x='1' $2"], stdout=subprocess.PIPE, text=True)
        assert done.stdout == ("-m lowmem_grpo run a b.py x='1' $2\n" if ran else "")
        assert done.returncode == (0 if ran else TOO_LARGE)


def test_the_thread_survives_a_full_disk_and_ends_when_asked(
    queue: JobQueue, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lowmem_grpo.server.jobs.dispatcher.EVERY", 0.01)
    looks = threading.Semaphore(0)

    def live() -> list[Job]:
        looks.release()
        raise OSError("no room")

    monkeypatch.setattr(queue, "live", live)
    dispatcher.start()
    assert all(looks.acquire(timeout=60) for _ in range(2)), "after the first error it looks again"
    assert "no room" in caplog.text
    dispatcher.close()
    assert not dispatcher.thread.is_alive()


@every_row(("shares", "share", "words"), [
    ([], 1.0, "$"), ([1.0], 1.0, "waits for job 1, which has 100% of the card; it asks for 100%$"),
    ([0.3, 0.3], 0.4, "$"),
    ([0.3, 0.3], 0.5, "waits for job 1 and job 2, which have 60% of the card; it asks for 50%$"),
])
def test_a_job_starts_where_it_has_room_and_else_says_what_it_waits_for(
    shares: list[float], share: float, words: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("queue")
    queue = JobQueue(Database(folder / "server.sqlite"), folder / "jobs")
    for other in shares:
        queue.start_job(queue.one(submit(queue, share=other)))
    assert re.match(words, Dispatcher(queue).why_not(queue.one(submit(queue, share=share))))


def test_a_job_that_is_taken_back_while_the_dispatcher_looks_is_not_started(
    queue: JobQueue, dispatcher: Dispatcher
) -> None:
    seen = queue.one(submit(queue))
    queue.cancel(seen.id)
    dispatcher.start_run(seen)
    assert queue.one(seen.id).state == CANCELLED and not (queue.folder_of(seen) / keeper.LOG).exists()


def test_a_job_whose_server_is_killed_as_it_starts_again_is_not_ended_as_it_was_before(
    queue: JobQueue, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = queue.one(submit(queue))
    folder = queue.folder_of(job)
    folder.mkdir(parents=True)
    (folder / keeper.ENDED).write_text('{"code": 143, "why": "stopped as asked"}')
    monkeypatch.setattr(keeper, "start_keeper", lambda *order: None)
    dispatcher.start_run(job)
    dispatcher.poll()
    assert queue.one(job.id).state == RUNNING


@pytest.mark.parametrize(("option", "words"), [
    ("x=\0", "NUL|character '.x00'"), ("x=\ud800", "character"), ("x=" + "y" * 200_000, "200,003 bytes"),
])
def test_a_job_of_an_older_version_that_cannot_start_fails_and_those_behind_it_run(
    option: str, words: str, queue: JobQueue, dispatcher: Dispatcher, tmp_path: Path
) -> None:
    """As stored before options were checked: subprocess refuses NUL and surrogates, Linux words of 128 KiB."""
    first = queue.submit(JobRequest("small.py", [option]), "me").id
    second = submit(queue)
    assert len(queue.all()) == 2 and json.dumps([vars(job) for job in queue.all()], ensure_ascii=False).encode()
    dispatcher.poll()
    assert queue.one(first).state == FAILED and re.search(words, queue.one(first).why)
    polled(Dispatcher(queue, tmp_path), lambda: queue.one(second).state == DONE)


def test_any_error_at_a_start_fails_that_job_with_its_reason(queue: JobQueue, dispatcher: Dispatcher) -> None:
    first, second = submit(queue), submit(queue)
    queue.folder.mkdir(parents=True)
    queue.folder_of(queue.one(first)).write_text("a file in the place of the job's folder")
    polled(dispatcher, lambda: queue.one(second).state == DONE)
    assert queue.one(first).state == FAILED and "could not be started" in queue.one(first).why


@pytest.mark.parametrize("error", [
    RuntimeError("odd"), SystemExit("odd"), UnicodeEncodeError("utf-8", "x", 0, 1, "odd")])
def test_no_error_ends_the_thread_and_each_is_said_once(
    error: BaseException, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher_module, "EVERY", 0.001)
    looks = threading.Semaphore(0)

    def poll() -> None:
        looks.release()
        raise error

    monkeypatch.setattr(dispatcher, "poll", poll)
    dispatcher.start()
    assert all(looks.acquire(timeout=60) for _ in range(5))
    dispatcher.close()
    assert caplog.text.count("trying again") == 1 and "odd" in caplog.text


def test_what_a_job_wrote_into_its_own_files_fails_the_job_alone(queue: JobQueue, dispatcher: Dispatcher) -> None:
    first, second = submit(queue, share=0.5), submit(queue, share=0.5)
    for number, text in ((first, '{"code": 0}'), (second, '{"code": 0, "why": null}')):
        folder = queue.folder_of(queue.start_job(queue.one(number)))
        folder.mkdir(parents=True)
        (folder / keeper.ENDED).write_text(text)
    dispatcher.poll()
    assert (queue.one(first).state, queue.one(second).state) == (FAILED, DONE)
