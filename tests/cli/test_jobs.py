"""`serve`, `submit`, `jobs`, `logs`, `cancel`, `resume` as a user types them, and over a killed server."""

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import JOB, until
from terminal import Terminal

from lowmem_grpo.__main__ import main
from lowmem_grpo.server.jobs.keeper import LOG

pytest.importorskip("uvicorn", reason="a server needs the extra [serve]")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a server needs the locks of Linux and macOS")
COMMAND = [sys.executable, "-m", "lowmem_grpo"]
LONGEST = 400  # seconds that a command may take
class Served:
    """A server in a process of its own, and the commands that ask it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.recipes, self.home = folder, folder / "recipes", folder / "home"
        self.recipes.mkdir()
        (self.recipes / "small.py").write_text(JOB)
        self.keys = folder / "keys"
        self.keys.write_text(f"ann {'a' * 30} jobs\nbob {'b' * 30}\n")
        self.keys.chmod(0o600)
        self.start()

    def start(self) -> None:
        (self.home / "server.json").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--folder", str(self.home), "--recipes", str(self.recipes),
             "--key-file", str(self.keys)], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = [self.process.stdout.readline() for _ in range(3)]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return ran(*words, "--server", str(self.home))

    def job(self, number: int) -> dict[str, object]:
        found: dict[str, object] = json.loads(self("jobs", str(number), "--json").stdout)
        return found

    def until(self, number: int, *states: str) -> str:
        """The first of these states that a job has."""
        return str(until(lambda: next((state for state in [str(self.job(number)["state"])] if state in states), "")))

    def enough(self, number: int) -> None:
        (self.home / "jobs" / str(number) / "enough").touch()

    def ask(self, path: str, key: str) -> tuple[int, str]:
        request = urllib.request.Request(json.loads((self.home / "server.json").read_text())["url"] + path,
                                         headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def ran(*words: str) -> "subprocess.CompletedProcess[str]":
    """A command of its own."""
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=LONGEST, check=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"))
    try:
        yield made
        for job in json.loads(made("jobs", "--json").stdout)["jobs"]:
            made.enough(job["id"])
    finally:
        made.process.kill()
        made.process.wait(60)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what a process has loaded is read from /proc")
def test_a_server_without_a_model_does_not_load_torch(served: Served) -> None:
    loaded = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "python" in loaded and "libtorch" not in loaded


def test_a_job_runs_and_its_log_is_followed_to_its_end_and_does_not_steer_the_terminal(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.said[0].startswith("serving at http://127.0.0.1:") and served.said[1].startswith("key tml-")
    number = served("submit", "small.py").stdout.split()[1].rstrip(":")
    followed = served("logs", "-f", number)
    assert (followed.returncode, followed.stdout.splitlines()[1:]) == (0, ["began, resume=False, share=1"])
    assert f"job {number} is done" in followed.stderr
    assert "small.py" in served("jobs").stdout
    (served.home / "jobs" / number / LOG).write_bytes(b"\x1b]0;owned\x07good\rbad")
    for tty in (True, False):
        monkeypatch.setattr(sys, "stdout", shown := Terminal(tty=tty))
        main(["logs", number, "--server", str(served.home)], standalone_mode=False)
        assert shown.shown == ("\ufffd]0;owned\ufffdgood\nbad" if tty else "\x1b]0;owned\x07good\rbad")


@pytest.mark.parametrize(("words", "said"), [
    ("submit arithmetic max_stepz=3", "no option 'max_stepz'; did you mean max_steps"),
    ("submit other.py", "there is no recipe file 'other.py' on the server, which has small.py"),
    ("submit arithmetic --time-limit soon", "the time 'soon' cannot be read"), ("cancel 999", "there is no job 999"),
])
def test_what_is_wrong_is_refused_in_words(words: str, said: str, served: Served) -> None:
    found = served(*words.split())
    assert found.returncode == 1 and said in found.stderr and "Traceback" not in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_job_outlives_a_server_that_ends_and_the_next_one_goes_on(served: Served, sent: signal.Signals) -> None:
    runs = int(served("submit", "small.py", "what=wait").stdout.split()[1].rstrip(":"))
    waits = int(served("submit", "small.py").stdout.split()[1].rstrip(":"))
    served.until(runs, "running")
    served.process.send_signal(sent)
    assert served.process.wait(60) == (-signal.SIGKILL if sent == signal.SIGKILL else 143)
    served.start()
    assert served.job(runs)["state"] == "running"
    served.enough(runs)
    assert served.until(runs, "done", "failed") == "done"
    assert served.until(waits, "done", "failed") == "done"
    assert served.job(runs)["goes"] == 1


@pytest.mark.slow
def test_a_stopped_job_is_resumed(served: Served) -> None:
    number = int(served("submit", "small.py", "what=wait").stdout.split()[1].rstrip(":"))
    served.until(number, "running")
    until(lambda: "began" in served("logs", str(number)).stdout)
    assert "asked to stop" in served("cancel", str(number)).stdout
    assert served.until(number, "stopped", "failed") == "stopped"
    served("resume", str(number), "what=end")
    assert served.until(number, "done", "failed") == "done"
    log = [line for line in served("logs", str(number)).stdout.splitlines() if "loading torch" not in line]
    assert log == ["began, resume=False, share=1", "began, resume=True, share=1"]


def test_only_a_key_with_the_right_reaches_jobs_and_only_its_own(served: Served) -> None:
    assert served.ask("/jobs", "b" * 30)[0] == 403 and served.ask("/jobs", "a" * 30) == (200, '{"jobs":[]}')


def test_a_server_that_is_gone_is_told_from_a_wrong_request(tmp_path: Path) -> None:
    with socket.socket() as nobody:  # it has a port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        (tmp_path / "server.json").write_text(json.dumps({"url": url, "key": "tml-x"}))
        found = ran("jobs", "--server", str(tmp_path))
    assert found.returncode == 1 and "is not reached" in found.stderr
