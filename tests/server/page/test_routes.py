"""The page over HTTP: only who signed in sees it, and buttons are pressed on the page only."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the routes need the extra [serve]")
from starlette.testclient import TestClient

from lowmem_grpo.server.page.page import FILES, HEADERS, Page, page_app
from lowmem_grpo.server.users import OWNER, User
from tests.support.page_server import GUEST_KEY, KEY, page_of
from tests.support.programs import owner_of
from tests.support.run_pages import append, completion, metric, write_hostile, write_run

HERE = "http://127.0.0.1"
OURS = {"origin": HERE}
PATHS = ("/page/data?run=first", "/page/data?with=first&with=second")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs/first", 30, {"status": "finished", "recipe": "arithmetic"})
    write_run(tmp_path / "runs/second", 40, {"status": "failed", "error": "boom"})
    return tmp_path / "runs"


@pytest.fixture
def page(folder: Path) -> Page:
    return page_of(folder)


@pytest.fixture
def stranger(page: Page) -> TestClient:
    return TestClient(page_app(page), base_url=HERE, follow_redirects=False)


@pytest.fixture
def owner(page: Page) -> TestClient:
    return signed_in(page, KEY)


def signed_in(page: Page, key: str) -> TestClient:
    client = TestClient(page_app(page), base_url=HERE, follow_redirects=False)
    assert client.post("/page/enter", data={"key": key}, headers=OURS).status_code == 303
    return client


def test_nothing_is_shown_to_who_is_not_signed_in_or_has_a_wrong_cookie_or_key(
    page: Page, stranger: TestClient
) -> None:
    for cookie in (None, "", "wrong", "x" * 43):
        if cookie is not None:
            stranger.cookies.set(page.sign_in.name, cookie)
            answer = stranger.post("/page/enter", data={"key": cookie}, headers=OURS)
            assert answer.status_code == 401 and "set-cookie" not in answer.headers
        for path in ("/", "/?run=first", *PATHS):
            answer = stranger.get(path, headers={"authorization": f"Bearer {KEY}"})
            assert answer.status_code == 401
            assert "first" not in answer.text and "arithmetic" not in answer.text
        assert stranger.post("/page/do/stop", data={"run": "first"}, headers=OURS).status_code == 401
    assert stranger.get("/health").json() == {"status": "ok"}


def test_the_link_works_once_and_its_cookie_is_for_this_page_only(page: Page, stranger: TestClient) -> None:
    path = page.sign_in.link(User(OWNER))
    answer = stranger.get(path)
    cookie = answer.headers["set-cookie"]
    assert answer.status_code == 200 and "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
    assert "Secure" not in cookie  # which a browser would not send to a loopback address
    assert stranger.get("/").status_code == 200
    for used in (path, path.replace("=", "=x"), "/page/enter"):
        assert TestClient(page_app(page), base_url=HERE).get(used).status_code == 401
    secure = TestClient(page_app(page), base_url="https://127.0.0.1").get(page.sign_in.link(User(OWNER)))
    assert "Secure" in secure.headers["set-cookie"]


def test_signing_out_ends_it(owner: TestClient) -> None:
    assert owner.get("/").status_code == 200
    held = dict(owner.cookies)
    assert owner.post("/page/leave", headers=OURS).status_code == 303
    owner.cookies.update(held)
    assert owner.get("/").status_code == 401


def test_every_answer_forbids_a_browser_what_the_page_does_not_need(owner: TestClient, stranger: TestClient) -> None:
    for answer in (owner.get("/"), stranger.get("/"), owner.get("/page/none"), owner.get("/page/files/page.js")):
        assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy


def test_the_page_needs_nothing_but_its_own_files(owner: TestClient) -> None:
    html = owner.get("/?run=first").text
    for name in FILES:
        assert f"/page/files/{name}" in html
        answer = owner.get(f"/page/files/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/javascript" if name.endswith("js") else "text/css")
        assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
                    if word in answer.text]
    assert " style=" not in html and "onclick" not in html and "http://" not in html and "https://" not in html
    assert owner.get("/page/files/report.py").status_code == owner.get("/page/files/..%2fcli.py").status_code == 404


def test_buttons_that_another_page_presses_and_requests_for_another_host_do_nothing(owner: TestClient) -> None:
    for origin in ({}, {"origin": "null"}, {"origin": "http://evil.example"}, {"origin": "http://127.0.0.1:1"},
                   {"origin": "https://127.0.0.1.evil.example"}, {"origin": "file://127.0.0.1"}, {"origin": "http://["},
                   {"origin": "http://[::1]x"}, {"origin": "http://127.0.0.1/page"}):
        for path in ("/page/do/stop", "/page/do/export", "/page/leave", "/page/enter"):
            answer = owner.post(path, data={"run": "first", "key": KEY}, headers=origin)
            assert answer.status_code == 403 and "set-cookie" not in answer.headers
    assert owner.get("/").status_code == 200
    assert owner.get("/page/do/stop").status_code == 405
    assert owner.get("/", headers={"host": "evil.example"}).status_code == 421


def test_the_page_shows_the_run_that_was_asked_for_or_the_newest(owner: TestClient, folder: Path) -> None:
    os.utime(folder / "first/summary.json", (2e9, 2e9))
    assert "<title>first</title>" in owner.get("/?run=first").text
    assert "<title>first</title>" in owner.get("/").text and '"query":"?run=first"' in owner.get("/").text
    second = owner.get("/page/data?run=second").json()
    assert second["top"]["ending"]["error"] == "boom" and second["actions"] == []
    for name in ("none", "../runs/first", "a%00b"):
        assert "There is no such run" in owner.get(f"/?run={name}").text


def reward_steps(data: dict[str, Any]) -> dict[str, int]:
    """The lines of the reward by their names, each by its last step."""
    charts = [chart for chart in data["charts"] if chart["title"] == "Reward"]
    return {line["name"]: line["steps"][-1] for chart in charts for line in chart["lines"]}


def test_what_a_page_shows_comes_as_data_with_what_the_run_appends(owner: TestClient, folder: Path) -> None:
    assert reward_steps(owner.get("/page/data?run=first").json()) == {"train": 30}
    append(folder / "first/metrics.jsonl", [metric(31)])
    append(folder / "first/completions.jsonl", [completion(31, "the newest")])
    data = owner.get("/page/data?run=first").json()
    assert reward_steps(data) == {"train": 31} and data["list"]["names"] == ["first"]
    assert data["samples"]["rows"][-1]["completion"] == "the newest" and data["top"]["tiles"][0] == ["steps", "31"]
    assert "charts" not in owner.get("/page/data?run=none").json()


def test_runs_are_compared_on_the_same_charts(owner: TestClient) -> None:
    html = owner.get("/?with=first&with=second&with=none").text
    assert "<title>3 runs</title>" in html and '"query":"?with=first&with=second&with=none"' in html
    assert reward_steps(owner.get("/page/data?with=first&with=second").json()) == {"first": 30, "second": 40}


def test_a_hostile_run_changes_nothing_of_the_page(tmp_path: Path, folder: Path, owner: TestClient) -> None:
    (tmp_path / "secret").write_text("the secret")
    write_hostile(folder / "hostile", tmp_path / "secret")
    write_run(folder / "<img src=x onerror=alert(1)>\"'&", 3)
    for path in ("/?run=hostile", "/page/data?run=hostile", "/?with=hostile&with=first"):
        answer = owner.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json" or "<img" not in answer.text
        assert "the secret" not in answer.text
    assert "7 damaged lines left out" in owner.get("/page/data?run=hostile").json()["note"]
    json.loads(owner.get("/page/data?run=hostile").text, parse_constant=pytest.fail)


def test_data_come_when_a_run_writes_or_the_list_changes_and_else_a_short_answer(
    page: Page, owner: TestClient, folder: Path
) -> None:
    def asked(version: str) -> Any:
        return owner.get("/page/data?run=first", headers={"if-none-match": version})

    version = owner.get("/page/data?run=first").json()["version"]
    assert f'"version":"{version}"' in owner.get("/?run=first").text, "the page itself has it too"
    assert (asked(version).status_code, asked(version).content) == (304, b"")
    append(folder / "first/completions.jsonl", [completion(31)])
    newer = asked(version).json()["version"]
    assert newer != version and asked(newer).status_code == 304
    write_run(folder / "third", 3)
    page.source.until = 0.0  # type: ignore[attr-defined]  # as after a while
    assert "third" in asked(newer).text
    owner.cookies.clear()
    assert asked(newer).status_code == 401


def test_a_long_run_is_read_on_for_a_moment_before_its_page_is_told(
    page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_grpo.server.page.run_follower.PIECE", 1000)
    monkeypatch.setattr("lowmem_grpo.server.page.page.READS", 600.0)
    page.version(User(OWNER), ["first"])
    assert not page.follow(page.runs(User(OWNER), ["first"])["first"]).reading


def test_the_stop_button_ends_a_run_of_this_machine_and_is_the_owners(
    page: Page, owner: TestClient, folder: Path
) -> None:
    with owner_of(folder / "first") as process:
        guest = signed_in(page, GUEST_KEY)
        assert owner.get("/page/data?run=first").json()["actions"] == [["first", "stop"]]
        assert guest.get("/page/data?run=first").json()["actions"] == []
        assert guest.post("/page/do/stop", data={"run": "first"}, headers=OURS).status_code == 409
        assert process.poll() is None
        answer = owner.post("/page/do/stop", data={"run": "first"}, headers=OURS)
        assert (answer.status_code, answer.headers["location"]) == (303, "/?run=first")
        assert process.wait(60) != 0
    answer = owner.post("/page/do/stop", data={"run": "second"}, headers=OURS)
    assert answer.status_code == 409 and "second is failed; what you can do with it here: nothing" in answer.text
    assert owner.post("/page/do/stop", data={"run": "none"}, headers=OURS).status_code == 404
    assert owner.post("/page/do/erase", data={"run": "first"}, headers=OURS).status_code == 409


def test_the_adapter_is_downloaded_and_links_in_it_are_not_followed(
    tmp_path: Path, folder: Path, owner: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowmem_grpo.runs import saved_adapter

    adapter = folder / "first/adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"):
        (adapter / name).write_text(name)
    monkeypatch.setattr(saved_adapter, "check_adapter_folder", lambda folder: None)
    assert owner.get("/page/data?run=first").json()["actions"] == [["first", "export"]]
    answer = owner.post("/page/do/export", data={"run": "first"}, headers=OURS)
    assert answer.headers["content-disposition"] == 'attachment; filename="first-adapter.zip"'
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.namelist() == ["first/adapter_config.json", "first/adapter_model.safetensors"]
        assert archive.read("first/adapter_config.json") == b"adapter_config.json"
    (tmp_path / "secret").write_text("the secret")
    (adapter / "README.md").symlink_to(tmp_path / "secret")
    answer = owner.post("/page/do/export", data={"run": "first"}, headers=OURS)
    assert answer.status_code == 409 and b"the secret" not in answer.content
    (adapter / "README.md").unlink()
    os.rename(adapter, tmp_path / "elsewhere")
    adapter.symlink_to(tmp_path / "elsewhere")
    answer = owner.post("/page/do/export", data={"run": "first"}, headers=OURS)
    assert answer.status_code == 409 and "outside of its folder" in answer.text and str(tmp_path) not in answer.text
    assert owner.post("/page/do/export", data={"run": "second"}, headers=OURS).status_code == 409
