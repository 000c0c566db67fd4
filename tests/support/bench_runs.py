"""Benchmarks run as people run them, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def ran(module: str, *words: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """A module of bench/ in one thread, with tables as wide as their rows; it must end well."""
    command = [sys.executable, "-m", f"bench.{module}", *map(str, words)]
    settings = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False, env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def providers(*names: str) -> list[str]:
    """Options that name them."""
    return [word for name in names for word in ("--provider", name)]
