"""The jobs of a server on its page: each user sees their own, and buttons do what the commands do."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("fastapi", reason="the page needs the extra [serve]")
from starlette.testclient import TestClient

from lowmem_grpo.server.jobs import keeper
from lowmem_grpo.server.jobs.queue import CANCELLED, RUNNING, STOPPING, WAITING, JobQueue, JobRequest
from lowmem_grpo.server.jobs.routes import JobsSource, jobs_router
from lowmem_grpo.server.page.page import Page, page_app
from lowmem_grpo.server.requests import Limits
from lowmem_grpo.server.server import make_server_app
from lowmem_grpo.server.server_dir import Database
from lowmem_grpo.server.users import JOBS, OWNER, SignIn, User, Users
from tests.support.page_server import browsing, needs_chromium, page_of, served
from tests.support.run_pages import write_run

ANN, BOB, ROOT, NOBODY = User("ann", (JOBS,)), User("bob", (JOBS,)), User(OWNER), User("eve")
KEYS = {"ann": "tml-ann-ann-ann-ann-ann-ann", "eve": "tml-eve-eve-eve-eve-eve-eve"}
HERE = "http://127.0.0.1"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[JobQueue]:
    database = Database(tmp_path / "server.sqlite")
    yield JobQueue(database, tmp_path / "jobs")
    database.close()


@pytest.fixture
def source(queue: JobQueue) -> JobsSource:
    return JobsSource(queue, "here")


def submit(queue: JobQueue, owner: str = "ann") -> str:
    return str(queue.submit(JobRequest("arithmetic", ["max_steps=3"]), owner).id)


def test_a_user_sees_their_own_jobs_and_the_owner_all(queue: JobQueue, source: JobsSource) -> None:
    anns, bobs = submit(queue), submit(queue, "bob")
    assert [each.name for each in source.all(ANN)] == [anns]
    assert [each.name for each in source.all(ROOT)] == [bobs, anns]
    assert "ann" in source.all(ROOT)[1].why and "ann" not in source.all(ANN)[0].why
    assert source.all(NOBODY) == []


def test_buttons_fit_the_state_and_do_what_the_commands_do(queue: JobQueue, source: JobsSource) -> None:
    number = int(submit(queue))

    def shown() -> tuple[str, tuple[str, ...]]:
        [listed] = source.all(ANN)
        return listed.state, listed.actions

    def press(action: str) -> None:
        source.act(source.all(ANN)[0], action)

    assert shown() == (WAITING, ("stop",))
    press("stop")
    assert shown() == (CANCELLED, ("resume",))
    press("resume")
    assert shown() == (WAITING, ("stop",))
    queue.start_job(queue.one(number))
    assert shown() == (RUNNING, ("stop",))
    press("stop")
    assert shown() == (STOPPING, ())
    job = queue.end_job(queue.one(number), "stopped", "stopped as asked", 0)
    (queue.folder_of(job) / "run" / "checkpoint-3").mkdir(parents=True)
    assert shown() == ("stopped", ("resume", "export"))


def test_the_page_of_a_job_shows_its_run_and_its_log_and_before_it_begins_why_it_waits(
    queue: JobQueue, source: JobsSource
) -> None:
    name = submit(queue)
    page = page_of(source)
    data = page.page_data(ANN, [name])
    assert "charts" not in data and "waits for its turn" in data["top"]["ending"]["said"]
    job = queue.start_job(queue.one(int(name)))
    write_run(queue.folder_of(job) / "run", 5, {"status": "running"})
    (queue.folder_of(job) / keeper.LOG).write_text("step 5\n")
    data = page.page_data(ANN, [name])
    assert data["charts"] and data["log"] == "step 5\n" and data["top"]["status"] == "running"
    queue.end_job(job, "failed", "killed", -9)
    data = page.page_data(ANN, [name])
    assert data["charts"] and "This run was killed" in data["top"]["ending"]["said"]


def test_page_and_interface_are_at_one_address_and_neither_opens_the_other(
    queue: JobQueue, source: JobsSource
) -> None:
    users = Users("tml-root-root-root-root-root", [(ANN, KEYS["ann"]), (NOBODY, KEYS["eve"])])
    page = Page(source, SignIn(users))
    routers = {"/jobs": jobs_router(queue, lambda recipe, options: None)}
    app = page_app(page, other=make_server_app(routers, users, Limits()))
    anns, roots = submit(queue), submit(queue, OWNER)
    api, browser = (TestClient(app, base_url=HERE, follow_redirects=False) for _ in range(2))
    key = {"authorization": f"Bearer {KEYS['ann']}"}
    assert [job["id"] for job in api.get("/jobs", headers=key).json()["jobs"]] == [int(anns)]
    assert api.get("/", headers=key).status_code == 401
    browser.post("/page/enter", data={"key": KEYS["ann"]}, headers={"origin": HERE})
    assert f"{anns} arithmetic" in browser.get("/").text and f"{roots} arithmetic" not in browser.get("/").text
    assert "There is no such run" in browser.get(f"/?run={roots}").text
    assert browser.get("/jobs").status_code == 401  # the cookie is for the page, and no key
    assert browser.get("/health").json() == {"status": "ok"}
    for action in ("stop", "resume", "export"):
        assert browser.post(f"/page/do/{action}", data={"run": roots}, headers={"origin": HERE}).status_code == 404
    assert queue.one(int(roots)).state == WAITING
    assert browser.post("/page/do/stop", data={"run": anns}, headers={"origin": HERE}).status_code == 303
    assert queue.one(int(anns)).state == CANCELLED
    browser.post("/page/enter", data={"key": KEYS["eve"]}, headers={"origin": HERE})
    assert "arithmetic" not in browser.get("/").text


@pytest.mark.parametrize(("user", "key"), [(ANN, KEYS["ann"]), (ROOT, "tml-root-root-root-root-root")])
def test_only_the_owner_reads_which_file_the_server_cannot_write(
    user: User, key: str, queue: JobQueue, source: JobsSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = Users("tml-root-root-root-root-root", [(ANN, KEYS["ann"])])
    browser = TestClient(page_app(Page(source, SignIn(users))), base_url=HERE)
    name = submit(queue)
    browser.post("/page/enter", data={"key": key}, headers={"origin": HERE})
    path = queue.database.path
    monkeypatch.setattr(queue, "cancel", Mock(side_effect=OSError(f"{path} was not written: the disk is full")))
    answer = browser.post("/page/do/stop", data={"run": name}, headers={"origin": HERE})
    assert answer.status_code == 409 and (str(path) in answer.text) is user.is_owner
    assert user.is_owner or "its log says more" in answer.text
    place = source.all(user)[0].paths[0]
    monkeypatch.setattr(queue, "cancel", Mock(side_effect=ValueError(f"{place} is damaged")))
    answer = browser.post("/page/do/stop", data={"run": name}, headers={"origin": HERE})
    assert str(place) not in answer.text and f"{name} arithmetic is damaged" in answer.text


@needs_chromium
@pytest.mark.slow
def test_a_job_is_watched_stopped_and_resumed_by_its_buttons_in_a_browser(queue: JobQueue, source: JobsSource) -> None:
    state, press = "return document.querySelector('#list .status').textContent", "#actions button"
    job, page = queue.start_job(queue.one(int(submit(queue, OWNER)))), page_of(source)
    write_run(queue.folder_of(job) / "run", 5, {"status": "interrupted"})
    with served(page_app(page)) as url, browsing(url, page) as browser:
        browser.open("/")
        browser.until(state, lambda found: found == RUNNING)
        browser.run(f"document.querySelector('{press}').click()")
        browser.until(state, lambda found: found == STOPPING)
        queue.end_job(queue.one(job.id), "stopped", "stopped as asked", 143)
        browser.until(f"return document.querySelector('{press}')?.textContent", lambda words: words == "Resume")
        assert "This run was stopped" in browser.until("return document.querySelector('.ending')?.textContent")
        browser.run(f"document.querySelector('{press}').click()")
        browser.until(state, lambda found: found == WAITING)
    assert queue.one(job.id).resume
