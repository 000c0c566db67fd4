"""`lowmem-grpo serve` and `watch`: the link that they print opens their page, and a signal ends them meanwhile."""

import re
import signal
import subprocess
import sys
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from click.testing import CliRunner
from programs import kept_open, program
from run_pages import write_run

import lowmem_grpo
from lowmem_grpo.cli.serve import client_name, serve

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")


@pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux and macOS")
@pytest.mark.parametrize(("command", "number"), [
    ("serve", signal.SIGINT), ("serve", signal.SIGTERM), ("serve", signal.SIGHUP), ("watch", signal.SIGINT),
    ("watch", signal.SIGTERM),
])
@pytest.mark.every(3)
def test_the_printed_link_opens_the_page_and_a_signal_ends_it_while_a_page_is_open(
    command: str, number: int, tmp_path: Path
) -> None:
    write_run(tmp_path / "the-run", 5)
    where, shown = ((tmp_path,), "the-run") if command == "watch" else (("--folder", tmp_path / "home"), "No runs yet")
    words = [sys.executable, "-m", "lowmem_grpo", command, "--port", "0", *where]
    with program(*words, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        said = ""
        while not (link := re.search(r"(?:open|page) (\S+)", said)) and (line := process.stdout.readline()):
            said += line
        assert link, said
        browser, base = build_opener(HTTPCookieProcessor(CookieJar())), link[1].partition("/page/")[0]
        browser.open(link[1], timeout=60)
        assert shown in browser.open(f"{base}/", timeout=60).read().decode()
        with kept_open(base):
            for _ in range(2 if number == signal.SIGTERM else 1):  # as `timeout` does
                process.send_signal(number)
            rest = process.stdout.read()
            process.wait(60)
    assert "Traceback" not in rest, rest
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert not list(tmp_path.glob("home/*-wal")), "the database was closed"


def test_a_server_in_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    found = CliRunner().invoke(serve, ["--folder", str(tmp_path / "home")])
    assert found.exit_code == 1 and "the server needs one process, and this is rank 1 of 2" in found.output
    assert not (tmp_path / "home").exists()


def test_clients_are_told_a_name_with_which_they_find_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model, folder in (("tiny", Path(lowmem_grpo.__file__).parent / "assets" / "tiny"), (str(tmp_path), tmp_path)):
        assert client_name(model).startswith(f"model {folder} (its name for clients of the Tinker protocol")
        assert "need renderer_name=role_colon" in client_name(model)
    assert client_name("Qwen/Qwen3-4B") == "model Qwen/Qwen3-4B"
