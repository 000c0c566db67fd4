"""Which isolation is chosen, what its command line shuts, and which limits are refused."""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sandboxed import LIMITS
from tables import every_row

from lowmem_grpo.rewards.sandbox import rights, trial, worker
from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.trial import SandboxError, open_sandbox, why_not


@pytest.fixture(autouse=True)
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without bubblewrap; nothing is remembered of any other machine."""
    monkeypatch.setattr(worker, "BWRAP", "no-such-bwrap")
    for name in ("why_not", "warn_of_process"):
        monkeypatch.setattr(trial, name, cache(getattr(trial, name).__wrapped__))


def test_without_a_sandbox_the_error_names_every_way_out() -> None:
    for asked in (None, "bubblewrap"):
        with pytest.raises(SandboxError, match=r"no-such-bwrap.*apt install bubblewrap.*isolation=\"process\""):
            open_sandbox(asked)


def test_the_plain_process_is_an_opt_in_that_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    if fault := why_not("process"):
        pytest.skip(fault)
    with caplog.at_level(logging.WARNING, "lowmem_grpo"):
        assert open_sandbox("process").isolation == "process"
        open_sandbox("process")
    assert [record.getMessage() for record in caplog.records] == [trial.PROCESS_WARNING]
    assert f"Landlock {rights.COMPLETE} " in trial.PROCESS_WARNING


def test_a_sandbox_that_is_installed_but_does_not_work_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(worker, "BWRAP", str(broken))
    with pytest.raises(SandboxError, match=r"No permissions to create new namespace"):
        open_sandbox()


def test_an_unknown_isolation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="isolation is 'docker'; allowed are bubblewrap, process"):
        open_sandbox("docker")


@every_row(("name", "value"), [
    ("seconds", 0), ("seconds", float("inf")), ("memory_bytes", 1000), ("files", True), ("output_bytes", "many"),
    ("scratch_bytes", -1), ("total_seconds", float("nan")),
])
def test_a_limit_that_limits_nothing_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; it must be"):
        Limits(**{name: value})


def test_command_lines_shut_everything_that_they_should() -> None:
    words, _ = worker.command("bubblewrap", LIMITS, 7, "")
    assert {"--unshare-all", "--die-with-parent", "--new-session", "--clearenv"} <= set(words)
    assert words[words.index("--size"):][:4] == ["--size", str(MIB), "--tmpfs", "/scratch"]
    assert words[words.index("--") - 2:][:2] == ["--remount-ro", "/"] and words[-1] == "7"
    bound = [words[at + 1] for at, word in enumerate(words) if word in ("--ro-bind", "--bind", "--dev-bind")]
    assert "--bind" not in words and not {"/", "/home", "/root", "/tmp", "/proc", "/etc"} & set(bound)
    assert not any(one.startswith(f"{other}/") for one in bound for other in bound if other != "/package")
    words, _ = worker.command("process", LIMITS, 7, "/tmp/x")
    assert words[1:6] == ["-I", "-S", "-B", "-X", "utf8"]


@every_row(("bubblewrap", "process", "line"), [
    (None, "not\nfound", "bubblewrap (process: not found)"), ("a", "b", "none (bubblewrap: a; process: b)"),
    ("a", None, "none by default, process if asked for (bubblewrap: a; process: works)"),
])
def test_the_line_of_doctor_names_the_sandbox_that_the_rewards_take(
    bubblewrap: str | None, process: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "why_not", {"bubblewrap": bubblewrap, "process": process}.get)
    assert trial.what_works() == line


def test_doctor_says_what_to_install_and_what_a_container_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, fix = trial.what_is_missing() or ("", "")
    assert "cannot run in bubblewrap" in problem and "no-such-bwrap" in problem
    assert fix.startswith("apt install bubblewrap") and "dnf install" in fix and "docker" not in fix
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setattr(worker, "BWRAP", str(tmp_path / "bwrap"))
    trial.why_not.cache_clear()
    problem, fix = trial.what_is_missing() or ("", "")
    assert "No permissions" in problem and "docker run" in fix and "apt install" not in fix
    monkeypatch.setattr(trial, "why_not", lambda isolation: None)
    assert trial.what_is_missing() is None
    monkeypatch.setattr(trial, "why_not", lambda isolation: "needs Linux")
    monkeypatch.setattr(trial.sys, "platform", "darwin")
    assert trial.what_is_missing() is None, "nothing can be installed there"
