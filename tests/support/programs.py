"""Programs that a test starts and gives signals, and for which it never waits without an end; benchmarks among them."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

LONGEST = 400.0  # seconds until a program that hangs is killed, so that its test fails


@contextmanager
def usual_signals() -> Iterator[None]:
    """Inside, signals end this process and those that it starts, as usual: nohup and a shell's background jobs ignore
    some of them, and programs inherit that."""
    ending = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


OWNS = """
import sys
from pathlib import Path
from lowmem_grpo.runs.lock import owned
with owned(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


@contextmanager
def owner_of(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process, which owns the folder of a run."""
    with program(sys.executable, "-c", OWNS, folder, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == "mine\n"
        yield process


@contextmanager
def program(*command: Any, **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """A program whose output is read, and that is killed at the end of the block at the latest."""
    with usual_signals():
        started = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, **options)
    with started:
        hangs = threading.Timer(LONGEST, started.kill)
        hangs.start()
        try:
            yield started
        finally:
            hangs.cancel()
            started.kill()


def until(looks: Callable[[], Any]) -> Any:
    """What is found, as soon as it is true."""
    end = time.monotonic() + LONGEST
    while not (found := looks()):
        assert time.monotonic() < end, f"it is not so after {LONGEST:g} s"
        time.sleep(0.01)
    return found


JOB = '''
import json, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from lowmem_grpo.recipes.options import RecipeOptions

@dataclass
class Options(RecipeOptions):
    what: str = "end"

OPTIONS = Options

def run(options):
    """End, fail, or wait until there is a file `enough` beside the run."""
    folder = Path(options.config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"began, resume={options.resume}, share={options.card_share:g}", flush=True)
    if options.what == "fail":
        raise ValueError("the data are gone")
    ends = time.monotonic() + 600
    while options.what == "wait" and not (folder.parent / "enough").exists() and time.monotonic() < ends:
        time.sleep(0.02)
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
'''  # a recipe
ROOT = Path(__file__).parents[2]


def ran(module: str, *words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """A module of bench/ in one thread, with tables as wide as their rows; it must end well."""
    command = [sys.executable, "-m", f"bench.{module}", *map(str, words)]
    settings = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False, env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def providers(*names: str) -> list[str]:
    """Options that name them."""
    return [word for name in names for word in ("--provider", name)]


@contextmanager
def kept_open(url: str) -> Iterator[None]:
    """A connection to a server that a browser keeps for its next request."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    try:
        yield
    finally:
        connection.close()
