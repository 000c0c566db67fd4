"""A part of a benchmark in a fresh process, which prints its result last, as one JSON object.

What a process measures of its own memory and time then depends on nothing that ran before it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# vLLM in the process that is measured, quiet, and sending nothing; nothing is asked of the hub
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")  # begins the last line of a traceback
LOG = 3000  # characters that are kept of what a process said


def words(**options: Any) -> list[str]:
    """Return options as a command takes them; those that are None are left out."""
    return [str(word) for name, value in options.items() if value is not None
            for word in (f"--{name.replace('_', '-')}", value)]


def run(
    module: str, *arguments: str, python: str = sys.executable, seconds: float | None = None,
    settings: dict[str, str] | None = None,
) -> dict[str, Any]:
    """What `python -m module` printed last. Where it failed, or took longer than `seconds`: why (`missing`), the end
    of what it said (`log`), and `failed`. `settings` are environment variables beside `SETTINGS`."""
    try:
        done = subprocess.run([python, "-m", module, *arguments], env=os.environ | SETTINGS | (settings or {}),
                              capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")  # bytes, also where text was asked for
        return failure(f"it took more than {seconds:g} s", said)
    except OSError as error:
        return failure(f"{python} does not start: {error.strerror}", "")
    return outcome(done)


def outcome(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """The result of a process that has ended."""
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return failure(f"it ended with {done.returncode}: {last_words(done.stderr)}", done.stderr)


def made_once(folder: Path, *commands: Sequence[str | Path]) -> Path:
    """Return a folder that these commands have filled, now or earlier. Standard output is for rows: they print none."""
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        for command in commands:
            subprocess.run(command, check=True, stdout=sys.stderr)
        (folder / "installed").touch()
    return folder


def failure(why: str, said: str) -> dict[str, Any]:
    return {"missing": why[:400], "failed": True, "log": said[-LOG:]}


def last_words(said: str) -> str:
    """The error that ended a process; what it said last where it names none."""
    lines = said.strip().splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])[:300]
