"""The queue over HTTP: what is wrong is said, what is another's is not seen, logs come in pieces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tables import every_row

pytest.importorskip("fastapi", reason="the routes need the extra [serve]")
from starlette.testclient import TestClient

from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.queue import DONE, WAITING, JobQueue
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


WRONG: dict[str, Callable[[TestClient], Any]] = {
    "no recipe 'nonsense'": lambda client: client.post("/jobs", json={"recipe": "nonsense"}),
    "did you mean max_steps": lambda client: client.post("/jobs", json={"recipe": "a", "options": ["max_stepz=1"]}),
    "is no JSON": lambda client: client.post("/jobs", content=b"{"),
    "nested": lambda client: client.post("/jobs", content=b"[" * 100_000),
    "from is 'x'": lambda client: client.get("/jobs/1/log?from=x"),
    "from is '-1'": lambda client: client.get("/jobs/1/log?from=-1"),
}


@every_row("words", WRONG)
def test_a_wrong_request_is_told_what_is_wrong(words: str, client: TestClient) -> None:
    client.post("/jobs", json={"recipe": "arithmetic"})
    found = WRONG[words](client)
    assert found.status_code == 400
    assert words in message(found) or words == "nested"


def test_options_of_a_second_go_are_checked_too(client: TestClient, queue: JobQueue) -> None:
    client.post("/jobs", json={"recipe": "arithmetic"})
    queue.end_job(queue.start_job(queue.one(1)), DONE, "", 0)
    assert "did you mean" in message(client.post("/jobs/1/resume", json={"options": ["max_stepz=1"]}))
    assert "options is 'x'" in message(client.post("/jobs/1/resume", json={"options": "x"}))
    assert "sets output_dir" in message(client.post("/jobs/1/resume", json={"options": ["output_dir=x"]}))
    assert queue.one(1).state == DONE


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
