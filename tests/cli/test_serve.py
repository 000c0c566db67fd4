"""`lowmem-grpo serve`: the link that it prints opens the page of its queue."""

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

import lowmem_grpo
from lowmem_grpo.cli.serve import client_name, serve

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")


@pytest.mark.skipif(sys.platform == "win32", reason="jobs need the locks of Linux and macOS")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.every(3)
def test_the_printed_link_opens_the_page_of_the_queue_and_a_signal_closes_both(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "lowmem_grpo", "serve", "--port", "0", "--folder", tmp_path]
    with program(*command, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        said = ""
        while not (link := re.search(r"page (\S+)", said)) and (line := process.stdout.readline()):
            said += line
        assert link, said
        browser = build_opener(HTTPCookieProcessor(CookieJar()))
        browser.open(link[1], timeout=60)
        assert "No runs yet" in browser.open(link[1].partition("page/")[0], timeout=60).read().decode()
        with kept_open(link[1]):
            for _ in range(2 if number == signal.SIGTERM else 1):  # as `timeout` does
                process.send_signal(number)
            rest = process.stdout.read()
            process.wait(60)
    assert "Traceback" not in rest, rest
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert not list(tmp_path.glob("*-wal")), "the database was closed"


def test_a_server_in_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    found = CliRunner().invoke(serve, ["--folder", str(tmp_path / "home")])
    assert found.exit_code == 1 and "the server needs one process, and this is rank 1 of 2" in found.output
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(("words", "told"), [
    (("--engine", "vllm"), "tested with our own engine only: leave --engine out"),
    (("--fp8", "--16bit"), "--fp8 and --16bit contradict each other"),
    (("--4bit", "--fp8"), "--fp8 and --4bit contradict each other"),
])
def test_a_model_that_cannot_be_served_so_is_refused_before_anything_is_made(
    tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    asked = ["--model", "no/such", "--folder", str(tmp_path / "home"), *words]
    found = CliRunner().invoke(serve, asked, terminal_width=400)
    assert found.exit_code == 1 and told in found.output and not (tmp_path / "home").exists()


def test_clients_are_told_a_name_with_which_they_find_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for model, folder in (("tiny", Path(lowmem_grpo.__file__).parent / "assets" / "tiny"), (str(tmp_path), tmp_path)):
        assert client_name(model).startswith(f"model {folder} (its name for clients of the Tinker protocol")
        assert "need renderer_name=role_colon" in client_name(model)
    assert client_name("Qwen/Qwen3-4B") == "model Qwen/Qwen3-4B"


def test_an_adapter_is_no_model_to_serve_and_the_message_says_how_to_make_one(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    asked = ["--model", str(adapter), "--folder", str(tmp_path / "home")]
    found = CliRunner().invoke(serve, asked, terminal_width=400)
    assert found.exit_code == 1 and f"lowmem-grpo export {adapter} --out FOLDER" in found.output
    assert not (tmp_path / "home").exists()
