"""A test that is skipped for something that could be installed is counted, and fails a run that forbids it."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import skips
from tables import every_row

SUPPORT = Path(__file__).parent / "support"
PACKAGES = Path(__file__).parents[1] / ".ci" / "packages"
TESTS = """import pytest
@pytest.mark.parametrize("n", range(3))
@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_card(n): pass
def test_runs(): pass
"""
INSTALLABLE = 'def test_sandbox(): pytest.skip("bubblewrap: No such file: bwrap")\n'
FILE = 'import pytest\npytest.importorskip("no_such_library", reason="needs the extra [serve]")\n'


def outcome(folder: Path, *options: str) -> tuple[int, str]:
    """The exit code and the output of a run of pytest in `folder`, with this plugin and workers alone."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "skips", "-p", "xdist", "--rootdir", folder, "-c", os.devnull,
             "-p", "no:cacheprovider", folder, *options]
    done = subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True, check=False, timeout=600,
                          env=os.environ | {"PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    return done.returncode, done.stdout


def test_a_run_fails_if_a_test_is_skipped_for_what_could_be_installed(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    code, said = outcome(tmp_path, "--no-skips")
    assert code == 0 and "skipped 3 x needs a CUDA device" in said
    (tmp_path / "test_more.py").write_text("import pytest\n" + INSTALLABLE)
    (tmp_path / "test_file.py").write_text(FILE)
    code, said = outcome(tmp_path)
    assert code == 0 and "skipped 1 x bubblewrap" in said and "must not" not in said
    code, said = outcome(tmp_path, "--no-skips", "--numprocesses=2")
    assert code == 1 and "skipped 1 x bubblewrap: No such file: bwrap" in said
    assert "skipped 1 x needs the extra [serve]" in said and "2 tests must not be skipped" in said


@every_row(("reason", "is_allowed"), [
    ("needs a CUDA device", True), ("a card of compute capability 7.5 does not compute in bfloat16", True),
    ("paged memory is a card's", True), ("this machine has a card", True), ("pip reaches no package index", True),
    ("bubblewrap: No such file: bwrap", False), ("could not import 'trackio': No module named 'trackio'", False),
    ("the page is driven in Debian's chromium, with its chromium-driver", False),
    ("needs vLLM, which is not installed", False), ("the package is not discarded", False),
])
def test_only_what_nobody_can_install_is_a_reason(reason: str, is_allowed: bool) -> None:
    assert (skips.refused(Counter([reason])) == []) is is_allowed


def packages(folder: Path, there: list[str], **stand_ins: str) -> tuple[int, str, str]:
    """The exit code, the errors and the calls of apt-get of `.ci/packages` on a machine with the commands `there`."""
    log = folder / "log"
    scripts = {"id": "echo 0", "apt-get": f"echo $@ >> {log}"} | dict.fromkeys(there, "exit 1") | stand_ins
    for name in filter(scripts.get, scripts):
        (folder / name).write_text(f"#!/bin/sh\n{scripts[name]}\n")
        (folder / name).chmod(0o755)
    done = subprocess.run([shutil.which("bash") or "bash", PACKAGES], env={"PATH": str(folder)}, capture_output=True,
                          text=True, check=False, timeout=600)
    return done.returncode, done.stderr, log.read_text() if log.exists() else ""


@pytest.mark.parametrize(("there", "stand_ins", "code", "said", "asked"), [
    (["bwrap", "chromium", "chromedriver", "npm"], {"apt-get": "exit 1"}, 0, "", ""),  # and no network
    (["chromium", "chromedriver", "npm"], {}, 0, "", "update install --yes --no-install-recommends bubblewrap"),
    (["bwrap", "npm"], {}, 0, "", "update install --yes --no-install-recommends chromium chromium-driver"),
    ([], {"apt-get": ""}, 1, "need bubblewrap chromium chromium-driver npm (Debian's names), and apt-get is not there",
     ""),
    (["bwrap", "npm"], {"id": "echo 1000"}, 1, "needs root: sudo apt-get install chromium chromium-driver", ""),
    (["chromium"], {"apt-get": "exit 1"}, 1, "apt-get update failed", ""),
])
def test_ci_installs_only_what_is_missing_and_says_what_it_cannot(
    there: list[str], stand_ins: dict[str, str], code: int, said: str, asked: str, tmp_path: Path
) -> None:
    found, errors, calls = packages(tmp_path, there, **stand_ins)
    assert (found, " ".join(calls.split())) == (code, asked) and said in errors, errors
