"""Run a part of a benchmark in a fresh process, whose last line is its result as one JSON object.

The memory and time that it measures then do not depend on anything that ran before it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.common.rows import versions

# vLLM runs inside the measured process, quietly and without usage reports; nothing is requested from the hub
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")  # begins the last line of a traceback
LOG = 3000  # characters that are kept of a process's stderr, or of a traceback
PACKAGES = ("lowmem-grpo", "trl", "unsloth", "unsloth-zoo", "vllm", "vllm-cpu", "torch", "transformers", "peft",
            "bitsandbytes")  # whose versions a result names; a peer's environment has others than ours


def run(
    module: str, *arguments: str, python: str | None = None, seconds: float | None = None,
    settings: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run `python -m module`; return the JSON object that it printed last. If it failed or took longer than `seconds`:
    `failed`, the reason (`missing`) and the end of its stderr (`log`). `settings` are environment variables, too."""
    try:
        done = subprocess.run([python or sys.executable, "-m", module, *arguments], capture_output=True, text=True,
                              check=False, timeout=seconds, env=os.environ | SETTINGS | (settings or {}))
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")  # bytes, even with text=True
        return failure(f"it took more than {seconds:g} s", said)
    except OSError as error:
        return failure(f"{python} does not start: {error.strerror}", "")
    return outcome(done)


def call(name: str, given: dict[str, Any], peer: bool = False, **options: Any) -> dict[str, Any]:
    """Call a function, `module:function`, with `given` in a fresh process; return its result, or `missing` with the
    reason, and where it was raised (`log`), if it needs an engine that is not installed. Any error of a peer is such a
    reason. `options` are `run`'s."""
    return run("bench.common.child", name, json.dumps(given, default=str), "peer" if peer else "", **options)


def main(name: str, given: str, peer: str) -> None:
    """Print the result of a function that another process asked for."""
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)(**json.loads(given))
    except Exception as error:
        if not peer and type(error).__name__ != "EngineUnavailableError":
            raise
        found = {"missing": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400],
                 "log": traceback.format_exc()[-LOG:]}
    print("\n" + json.dumps(found | {"versions": versions(PACKAGES)}), flush=True)
    sys.stderr.flush()
    os._exit(0)  # what a peer leaves running must not delay the next one


def outcome(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Return the result of a process that has ended."""
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return failure(f"it ended with {done.returncode}: {last_words(done.stderr)}", done.stderr)


def made_once(folder: Path, *commands: Sequence[str | Path]) -> Path:
    """Return the folder, filled by these commands the first time. They print to stderr, because stdout is for rows."""
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        for command in commands:
            subprocess.run(command, check=True, stdout=sys.stderr)
        (folder / "installed").touch()
    return folder


def failure(why: str, said: str) -> dict[str, Any]:
    return {"missing": why[:400], "failed": True, "log": said[-LOG:]}


def last_words(said: str) -> str:
    """Return the error that ended a process, or the last line of its stderr if that names none."""
    lines = said.strip().splitlines() or ["it said nothing"]
    return next((line for line in reversed(lines) if ERROR.match(line)), lines[-1])[:300]


if __name__ == "__main__":
    main(*sys.argv[1:])
