"""Jobs start in their order, one after the other or together, and what became of them is known after a restart."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tables import every_row

from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.dispatcher import Dispatcher, JobPlan, obstacle, too_large
from lowmem_grpo.server.jobs.queue import DONE, FAILED, RUNNING, STOPPED, WAITING, Job, JobQueue, JobRequest
from lowmem_grpo.server.page.run_follower import json_file
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.utils import GIB

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux and macOS")
RECIPE = '''
import json, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from lowmem_grpo.recipes.options import RecipeOptions

@dataclass
class Options(RecipeOptions):
    what: str = "end"

OPTIONS = Options

def run(options):
    folder = Path(options.config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / f"go{options.resume}-{options.card_share}").touch()
    print("ready", flush=True)
    if options.what == "fail":
        raise ValueError("the data are gone")
    ends = time.monotonic() + 600
    while options.what == "wait" and not (folder.parent / "enough").exists() and time.monotonic() < ends:
        time.sleep(0.02)
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
'''


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.py").write_text(RECIPE)
    return folder


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    made = JobQueue(Database(tmp_path / "server.sqlite"), tmp_path / "jobs")
    yield made
    for job in made.live():
        keeper.ask_to_stop(made.folder_of(job))


@pytest.fixture
def dispatcher(queue: JobQueue, recipes: Path) -> Dispatcher:
    return Dispatcher(queue, recipes)


def submit(queue: JobQueue, what: str = "end", **fields: object) -> int:
    return queue.submit(JobRequest.from_json({"recipe": "small.py", "options": [f"what={what}"], **fields}), "me").id


def until(dispatcher: Dispatcher, holds: Callable[[], object]) -> None:
    end = time.monotonic() + 400
    while not holds():
        assert time.monotonic() < end, [(job.state, job.why) for job in dispatcher.queue.all()]
        dispatcher.poll()
        time.sleep(0.05)


def is_ready(queue: JobQueue, number: int) -> bool:
    log = queue.folder_of(queue.one(number)) / keeper.LOG
    return log.exists() and "ready" in log.read_text()


def enough(queue: JobQueue, number: int) -> None:
    (queue.folder_of(queue.one(number)) / "enough").touch()


@pytest.mark.slow
def test_one_after_the_other_and_each_says_what_it_waits_for(queue: JobQueue, dispatcher: Dispatcher) -> None:
    first, second, third = submit(queue, "wait"), submit(queue), submit(queue, priority=1)
    dispatcher.start_run(queue.one(first))
    until(dispatcher, lambda: is_ready(queue, first))
    assert queue.one(third).why == f"waits for job {first}, which has 100% of the card; it asks for 100%"
    assert queue.one(second).why == "one job is before it in the queue"
    enough(queue, first)
    until(dispatcher, lambda: queue.one(second).state == DONE)
    assert queue.one(first).state == DONE == queue.one(third).state
    assert queue.one(third).began < queue.one(second).began  # type: ignore[operator]


def test_an_error_is_told_in_the_runs_own_words(queue: JobQueue, dispatcher: Dispatcher) -> None:
    number = submit(queue, "fail")
    until(dispatcher, lambda: queue.one(number).is_over)
    assert queue.one(number).state == FAILED
    assert queue.one(number).why.startswith("ValueError: the data are gone (exit status 1)")


@pytest.mark.slow
def test_a_job_is_stopped_as_asked_and_goes_on_where_it_was(queue: JobQueue, dispatcher: Dispatcher) -> None:
    number = submit(queue, "wait")
    until(dispatcher, lambda: is_ready(queue, number))
    queue.cancel(number)
    until(dispatcher, lambda: queue.one(number).is_over)
    assert (queue.one(number).state, queue.one(number).exit_code) == (STOPPED, 143)
    queue.resume(number, ["what=end"])
    until(dispatcher, lambda: queue.one(number).is_over)
    assert queue.one(number).state == DONE
    assert (queue.folder_of(queue.one(number)) / "run" / "goTrue-1.0").exists()


@pytest.mark.slow
def test_shares_run_together_and_the_next_server_finds_one_that_runs_and_one_that_ended_meanwhile(
    queue: JobQueue, dispatcher: Dispatcher, recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, ends = submit(queue, "wait", share=0.5), submit(queue, "wait", share=0.5)
    until(dispatcher, lambda: is_ready(queue, runs) and is_ready(queue, ends))
    assert [one.state for one in queue.live()] == [RUNNING, RUNNING]
    told = [queue.folder_of(queue.one(number)) / "run" / "goFalse-0.5" for number in (runs, ends)]
    assert all(one.exists() for one in told), "each run is told its share"
    enough(queue, ends)
    monkeypatch.setattr(dispatcher, "poll", lambda: None)  # this server is gone
    until(dispatcher, lambda: json_file(queue.folder_of(queue.one(ends)) / keeper.ENDED))
    following = Dispatcher(queue, recipes)
    following.poll()
    assert (queue.one(runs).state, queue.one(ends).state) == (RUNNING, DONE)
    enough(queue, runs)
    until(following, lambda: queue.one(runs).state == DONE)


def test_a_job_whose_processes_vanished_goes_on_from_its_checkpoint(
    queue: JobQueue, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = submit(queue, "wait")
    until(dispatcher, lambda: is_ready(queue, number))
    folder = queue.folder_of(queue.one(number))
    pid = next(int(entry.name) for entry in Path("/proc").glob("[0-9]*")
               if str(folder).encode() in (entry / "cmdline").read_bytes() and b"server.jobs.keeper" in
               (entry / "cmdline").read_bytes()) if Path("/proc").exists() else 0
    if not pid:
        pytest.skip("needs /proc to find the keeper")
    run = int((folder / keeper.RUN).read_text())
    os.kill(pid, signal.SIGKILL)
    os.kill(run, signal.SIGKILL)
    monkeypatch.setattr("lowmem_grpo.server.jobs.dispatcher.COMES_UP", 0.0)
    until(dispatcher, lambda: queue.one(number).state == WAITING or queue.one(number).goes == 2)
    monkeypatch.undo()
    enough(queue, number)
    until(dispatcher, lambda: queue.one(number).is_over)
    assert (queue.one(number).state, queue.one(number).goes) == (DONE, 2)
    assert (folder / "run" / "goTrue-1.0").exists() and (folder / keeper.KEEPER).exists()


def test_a_plan_that_fits_no_card_ends_a_job_with_advice_before_it_begins(queue: JobQueue, recipes: Path) -> None:
    dispatcher, plan = Dispatcher(queue, recipes, has_card=True), JobPlan(30 * GIB, 20 * GIB, 22 * GIB, "lower it")
    number = submit(queue)
    dispatcher.poll()
    assert dispatcher.planning is not None
    dispatcher.planning.plan = plan
    dispatcher.poll()
    dispatcher.drop_plan()
    assert (queue.one(number).state, queue.one(number).why) == (
        FAILED, "the plan says that it needs 30.00 GiB, and it may fill 20.00 GiB of this card. lower it")
    assert "(40% of it)" in too_large(plan, asking(1, 0.4))
    assert too_large(FITS, asking(1)) == "" == too_large(JobPlan(), asking(1))


def test_on_a_card_a_job_waits_until_its_plan_is_made(queue: JobQueue, recipes: Path) -> None:
    dispatcher = Dispatcher(queue, recipes, has_card=True)
    number = submit(queue)
    dispatcher.poll()
    assert queue.one(number).why == "its memory is being planned"
    until(dispatcher, lambda: queue.one(number).state != WAITING)  # no card to plan for here: nothing is known
    assert queue.one(number).state == RUNNING and queue.one(number).peak_bytes is None


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


def asking(number: int, share: float = 1.0) -> Job:
    return Job(number, "arithmetic", [], "me", share=share)


FITS = JobPlan(10 * GIB, 20 * GIB, 22 * GIB)
SHARED = [asking(1, 0.3), asking(2, 0.3)]


@every_row(("asked", "plan", "live", "words"), [
    (asking(1), FITS, [], "$"), (asking(1), JobPlan(), [], "$"),
    (asking(2), JobPlan(), [asking(1)], "waits for job 1, which has 100% of the card; it asks for 100%$"),
    (asking(3, 0.4), JobPlan(), SHARED, "$"), (asking(3, 0.5), JobPlan(), SHARED, "waits for job 1 and job 2, which "),
    (asking(1), None, [], "its memory is being planned$"),
    (asking(1), JobPlan(10 * GIB, 20 * GIB, 4 * GIB), [],
     "needs 10.00 GiB, and 4.00 GiB of the card are free: another program has the rest$"),
])
def test_a_job_starts_where_it_has_room_and_else_says_what_it_waits_for(
    asked: Job, plan: JobPlan | None, live: list[Job], words: str
) -> None:
    assert re.match(words, obstacle(asked, plan, live))
