"""The tool `python` runs a program in the sandbox: what it prints, how it fails, and what it may not."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from sandboxed import descendants
from scripted import run_tool
from tables import every_row
from template_tokenizers import tiny_with

from lowmem_grpo.environments.tools.python import NOTHING, python_tool
from lowmem_grpo.environments.tools.results import ToolError, ToolOutage
from lowmem_grpo.environments.tools.toolbox import Toolbox
from lowmem_grpo.rewards.sandbox.limits import MIB, Limits
from lowmem_grpo.rewards.sandbox.trial import ISOLATIONS, Sandbox, why_not
from lowmem_grpo.rewards.sandbox.worker import CannotStart

LIMITS = Limits(seconds=60, total_seconds=60, memory_bytes=128 * MIB, scratch_bytes=MIB, output_bytes=50_000)


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> str:
    """Each isolation that works on this machine."""
    if fault := why_not(request.param):
        pytest.skip(f"{request.param}: {fault}")
    return str(request.param)


@pytest.fixture
def python(isolation: str) -> Callable[[str], str]:
    return python_tool(isolation, LIMITS)


def test_a_program_answers_with_what_it_prints(python: Callable[[str], str]) -> None:
    box = Toolbox([python], tiny_with("qwen3"), 64)
    assert box.schemas[0]["function"]["parameters"]["required"] == ["code"]
    assert run_tool(box, "python", code="import math\nprint(math.factorial(6), 'é')") == "720 é\n"
    assert python("x = 3") == NOTHING
    assert python("import sys\nprint(sys.stdin.read() == '', sys.argv)") == "True ['code.py']\n"


@every_row(("code", "said"), [
    ("print('so far')\nspam()", 'File "code.py", line 2, in <module>'),
    ("print('so far')\nspam()", "NameError: name 'spam' is not defined\nIt had printed:\nso far"),
    ("def (", "SyntaxError: invalid syntax"), ("raise SystemExit(3)", "exit status 3"),
    ("print('x' * 10**6)", "output: printed more than"), ("x = bytearray(10**9)", "MemoryError"),
    ("import socket; socket.socket()", "PermissionError"), ("import os; os.fork()", "Error"), ("", "no code"),
    ("x = '\ud800'", "not valid Unicode"), ("#" * 200_000, "200000 bytes, allowed are 100000"),
])
def test_a_program_that_fails_or_asks_for_too_much_is_told_why(
    python: Callable[[str], str], code: str, said: str,
) -> None:
    with pytest.raises(ToolError) as caught:
        python(code)
    assert said in str(caught.value) and "inside.py" not in str(caught.value)
    assert not descendants()


def test_a_program_that_takes_too_long_is_told_so(isolation: str) -> None:
    with pytest.raises(ToolError, match=r"timeout: not done within 0\.1 s"):
        python_tool(isolation, replace(LIMITS, seconds=0.1))("while True: pass")
    assert not descendants()


def test_a_sandbox_that_no_longer_starts_is_an_outage(
    python: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:
    def start(*_: object, **__: object) -> None:
        raise CannotStart("no more processes")

    monkeypatch.setattr(Sandbox, "start", start)
    with pytest.raises(ToolOutage, match="worked before and no longer does: no more processes"):
        run_tool(Toolbox([python], tiny_with("qwen3"), 64), "python", code="print(1)")
    assert "trying once more" in caplog.text


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(ValueError, match="isolation is 'docker'; allowed are bubblewrap"):
        python_tool("docker")
