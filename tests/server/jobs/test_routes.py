"""The job queue, also over HTTP: jobs survive, mistakes are named, and nobody sees another user's jobs."""

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tables import every_row

pytest.importorskip("fastapi", reason="the routes need the extra [serve]")
from starlette.testclient import TestClient

from lowmem_grpo.cli.run import seconds_of
from lowmem_grpo.cli.serve import checked
from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.queue import DONE, RUNNING, STOPPED, WAITING, JobQueue, JobRequest
from lowmem_grpo.server.jobs.routes import PIECE, jobs_router
from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import make_server_app
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.users import JOBS, User, Users


def check(recipe: str, options: list[str]) -> None:
    if recipe == "nonsense":
        raise ValueError("no recipe 'nonsense'")
    if "max_stepz=1" in options:
        raise ValueError("no option 'max_stepz'; did you mean max_steps?")


def key(name: str) -> str:
    return f"tml-{name}-key-of-at-least-so-many"


def holding(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key(name)}"}


@pytest.fixture
def queue(tmp_path: Path) -> JobQueue:
    return JobQueue(Database(tmp_path / "server.sqlite"), tmp_path / "jobs")


@pytest.fixture
def client(queue: JobQueue) -> TestClient:
    rights: dict[str, tuple[str, ...]] = {"me": (JOBS,), "them": (JOBS,), "nobody": ()}
    users = [(User(name, may), key(name)) for name, may in rights.items()]
    app = make_server_app({"/jobs": jobs_router(queue, check)}, Users(key("root"), users), Limits())
    return TestClient(app, base_url="http://127.0.0.1", headers=holding("me"))


def message(found: Any) -> str:
    return str(found.json()["error"]["message"])


def test_a_job_is_submitted_listed_and_taken_back(client: TestClient) -> None:
    made = client.post("/jobs", json={"recipe": "arithmetic", "options": ["max_steps=3"], "priority": 2}).json()
    assert (made["state"], made["options"], made["owner"]) == (WAITING, ["max_steps=3"], "me")
    assert client.get("/jobs").json()["jobs"] == [made] == [client.get(f"/jobs/{made['id']}").json()]
    assert client.post(f"/jobs/{made['id']}/cancel").json()["state"] == "cancelled"
    assert client.post(f"/jobs/{made['id']}/resume", json={}).json()["state"] == WAITING


WRONG: dict[str, Any] = {  # words of the answer: what was submitted
    "no recipe 'nonsense'": {"recipe": "nonsense"},
    "did you mean max_steps": {"recipe": "a", "options": ["max_stepz=1"]},
    "recipe is '../x.py'; it must be the name of a recipe": {"recipe": "../x.py"},
    "recipe is 3": {"recipe": 3},
    "a job has recipe, and if you like options, priority, time_limit, share; sent was recipe, prio":
        {"recipe": "arithmetic", "prio": 3},
    "a job has recipe": {"options": []},
    "options is 'max_steps=3'; it must be a list": {"recipe": "arithmetic", "options": "max_steps=3"},
    "the queue sets output_dir itself": {"recipe": "arithmetic", "options": ["--output-dir=/tmp"]},
    "the queue sets resume itself": {"recipe": "arithmetic", "options": ["resume=true"]},
    "priority is 1.5": {"recipe": "arithmetic", "priority": 1.5},
    "priority is True": {"recipe": "arithmetic", "priority": True},
    "time_limit is 0; it must be seconds above 0, or None": {"recipe": "arithmetic", "time_limit": 0},
    "time_limit is 1000": {"recipe": "arithmetic", "time_limit": 10**30},
    "share is 1.5": {"recipe": "arithmetic", "share": 1.5},
    "share is NaN": {"recipe": "arithmetic", "share": float("nan")},
    "is a JSON list": [], "recipe has half of a surrogate pair": {"recipe": "\ud800"}, "is no JSON": "{",
    "nested": "[" * 100_000, "options[1] has the character NUL": {"recipe": "arithmetic", "options": ["a=1", "b=\0"]},
    "options[0] has half of a surrogate pair": {"recipe": "arithmetic", "options": ["a=\udfff"]},
    "options have 200,007 bytes; they may have 65,536": {
        "recipe": "arithmetic", "options": ["a=" + "x" * 200_000, "b=3"]},
}


@every_row("words", WRONG)
def test_a_wrong_job_is_told_what_is_wrong(words: str, client: TestClient) -> None:
    sent = WRONG[words]
    found = client.post("/jobs", content=sent if isinstance(sent, str) else json.dumps(sent))
    assert found.status_code == 400 and words in message(found)
    assert client.get("/jobs").json() == {"jobs": []}


def test_a_users_jobs_that_wait_are_bounded_and_others_may_submit(
    client: TestClient, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.server.jobs.queue.MOST_WAITING", 2)
    queue.submit(JobRequest("arithmetic"), "another")
    assert [client.post("/jobs", json={"recipe": "arithmetic"}).status_code for _ in range(3)] == [200, 200, 400]
    assert client.post("/jobs/2/cancel").status_code == client.post("/jobs", json={"recipe": "arithmetic"}).status_code
    assert "2 of your jobs wait already" in message(client.post("/jobs/2/resume", json={}))


def test_no_other_request_can_submit_between_a_jobs_check_and_its_row(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, free = queue.database.lock, list[bool]()

    def take() -> None:
        free.append(lock.acquire(blocking=False))
        if free[-1]:
            lock.release()

    def check(_: str) -> None:
        other = Thread(target=take)
        other.start()
        other.join()

    monkeypatch.setattr(queue, "check_waiting", check)
    queue.submit(JobRequest("arithmetic"), "me")
    assert free == [False]


def test_options_of_a_second_start_are_checked_too(client: TestClient, queue: JobQueue) -> None:
    client.post("/jobs", json={"recipe": "arithmetic"})
    queue.end_job(queue.start_job(queue.one(1)), DONE, "", 0)
    assert "did you mean" in message(client.post("/jobs/1/resume", json={"options": ["max_stepz=1"]}))
    assert "options is 'x'" in message(client.post("/jobs/1/resume", json={"options": "x"}))
    assert "sets output_dir" in message(client.post("/jobs/1/resume", json={"options": ["output_dir=x"]}))
    long = ["x=" + "y" * 40_000]
    queue.end_job(queue.start_job(queue.submit(JobRequest("arithmetic", long), "me")), DONE, "", 0)
    assert "options have 80,006 bytes" in message(client.post("/jobs/2/resume", json={"options": long}))
    assert queue.one(1).state == DONE


@pytest.mark.parametrize("path", ["", "/log", "/cancel", "/resume"])
def test_a_number_that_is_none_gets_an_error_as_others_do(path: str, client: TestClient) -> None:
    found = (client.post if path in ("/cancel", "/resume") else client.get)(f"/jobs/{'ten' * 99}{path}")
    assert found.status_code == 400 and found.json()["error"]["param"] == "number"
    assert message(found).startswith("number is 'tententen") and "...; it must be a valid integer" in message(found)


def test_of_jobs_that_are_over_those_that_ended_last_are_kept_for_each_user(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.server.jobs.queue.MOST_OVER", 2)
    for owner in ["me"] * 6 + ["them"]:
        queue.submit(JobRequest("arithmetic"), owner)
    queue.start_job(queue.one(2))
    for number in (7, 1, 3, 4):
        queue.cancel(number)
    assert [job.id for job in queue.all()] == [7, 6, 5, 4, 3, 2]  # 2 runs, 5 and 6 wait, 7 is another user's
    queue.cancel(queue.resume(3, []).id)
    queue.cancel(6)
    assert [job.id for job in queue.all("me")] == [6, 5, 3, 2]  # 4 ended before 3 did


@pytest.mark.parametrize("path", ["", "/log", "/cancel", "/resume"])
def test_anothers_job_is_as_one_that_is_not_there(path: str, client: TestClient) -> None:
    client.post("/jobs", json={"recipe": "arithmetic"}, headers=holding("them"))
    send = client.post if path in ("/cancel", "/resume") else client.get
    foreign, absent = send(f"/jobs/1{path}"), send(f"/jobs/2{path}")
    assert foreign.status_code == absent.status_code == send(f"/jobs/{10**30}{path}").status_code == 404
    assert message(foreign).replace("1", "2") == message(absent)
    assert client.get("/jobs").json() == {"jobs": []}


def test_who_owns_the_server_sees_all_and_a_key_without_the_right_nothing(client: TestClient) -> None:
    assert "may not use jobs" in message(client.get("/jobs", headers=holding("nobody")))
    client.post("/jobs", json={"recipe": "arithmetic"}, headers=holding("them"))
    assert len(client.get("/jobs", headers=holding("root")).json()["jobs"]) == 1


def test_a_log_comes_in_pieces_from_a_byte_on(client: TestClient, queue: JobQueue) -> None:
    client.post("/jobs", json={"recipe": "arithmetic"})
    assert client.get("/jobs/1/log").content == b""
    folder = queue.folder_of(queue.one(1))
    folder.mkdir(parents=True)
    (folder / keeper.LOG).write_bytes(b"a" * PIECE + "ü and the rest\n".encode())
    assert client.get("/jobs/1/log").content == b"a" * PIECE
    assert client.get(f"/jobs/1/log?from={PIECE}").content.decode() == "ü and the rest\n"
    assert client.get(f"/jobs/1/log?from={10 * PIECE}").content == b""
    for offset in ("x", "-1"):
        found = client.get(f"/jobs/1/log?from={offset}")
        assert found.status_code == 400 and f"from is '{offset}'" in message(found)


def submit(queue: JobQueue, owner: str = "me", **fields: object) -> int:
    return queue.submit(JobRequest.from_json({"recipe": "arithmetic", **fields}), owner).id


def test_higher_priorities_are_first_then_the_older(queue: JobQueue) -> None:
    first, second, urgent = submit(queue), submit(queue), submit(queue, priority=5)
    assert [job.id for job in queue.waiting()] == [urgent, first, second]


def test_users_take_turns_whatever_the_numbers_and_priorities_of_their_jobs(queue: JobQueue) -> None:
    anns = [submit(queue, "ann", priority=1000) for _ in range(3)]
    bobs = [submit(queue, "bob"), submit(queue, "bob", priority=1)]
    began = []
    while waiting := queue.waiting():
        queue.change(waiting[0], state=DONE, began=float(1 + len(began)))
        began.append(waiting[0].id)
    assert began == [anns[0], bobs[1], anns[1], bobs[0], anns[2]]
    carols, anns = [submit(queue, "carol") for _ in range(2)], [submit(queue, "ann") for _ in range(2)]
    assert [job.id for job in queue.waiting()] == [carols[0], anns[0], carols[1], anns[1]], "several start at a time"


def test_another_server_finds_everything(queue: JobQueue, tmp_path: Path) -> None:
    number = submit(queue, options=["max_steps=3"], time_limit=60.0, share=0.25)
    queue.start_job(queue.one(number))
    queue.database.close()
    again = JobQueue(Database(tmp_path / "server.sqlite"), tmp_path / "jobs")
    job = again.one(number)
    assert (job.options, job.time_limit, job.share, job.state, job.goes) == (["max_steps=3"], 60.0, 0.25, RUNNING, 1)


def test_only_a_job_that_ran_is_resumed_from_its_checkpoint(queue: JobQueue) -> None:
    ran, never = submit(queue), submit(queue)
    queue.change(queue.start_job(queue.one(ran)), state=WAITING, resume=True)
    assert queue.cancel(ran).state == STOPPED and queue.resume(ran, []).resume
    queue.cancel(never)
    with pytest.raises(ValueError, match="is cancelled already"):
        queue.cancel(never)
    assert not queue.resume(never, []).resume


def test_only_a_job_that_is_over_is_resumed_and_with_further_options(queue: JobQueue) -> None:
    number = submit(queue, options=["max_steps=3"])
    with pytest.raises(ValueError, match="is waiting; only one that is done"):
        queue.resume(number, [])
    queue.end_job(queue.start_job(queue.one(number)), DONE, "", 0)
    job = queue.resume(number, ["max_steps=6"])
    assert (job.state, job.resume, job.options) == (WAITING, True, ["max_steps=3", "max_steps=6"])


def test_times_are_read_and_other_texts_refused() -> None:
    assert [seconds_of(text) for text in ("90", "90s", "45m", "2h", "1h30m")] == [90, 90, 2700, 7200, 5400]
    for text in ("", "0", "soon", "-3", "1.5h", "h"):
        with pytest.raises(ValueError, match="the time"):
            seconds_of(text)


def test_an_answer_does_not_say_where_the_servers_files_are(queue: JobQueue, client: TestClient, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(f"{queue.database.path} was not written: database or disk is full")

    monkeypatch.setattr(queue, "submit", full)
    found = client.post("/jobs", json={"recipe": "arithmetic"})
    assert found.status_code == 500 and str(tmp_path) not in found.text and "its log says more" in message(found)


def test_a_refused_recipe_file_is_named_without_its_place_and_does_not_end_the_server(tmp_path: Path) -> None:
    for name, content in {"cut.py": b"OPTIONS = (", "latin.py": b"OPTIONS = \"\xe9\"", "nul.py": b"\0"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name) as refused:
            checked(tmp_path, name, [])
        assert str(tmp_path) not in str(refused.value)


def test_a_refused_option_does_not_tell_the_servers_home() -> None:
    with pytest.raises(ValueError, match="~/none/at/all") as refused:
        checked(None, "arithmetic", ["model=~/none/at/all"])
    assert str(Path.home()) not in str(refused.value)
