"""A tool that runs a policy's Python code in the sandbox; see `rewards/sandbox` for what that prevents."""

import logging
import time
from collections.abc import Callable

from lowmem_grpo.environments.tools.results import ToolError, ToolOutage
from lowmem_grpo.rewards.sandbox.limits import Limits
from lowmem_grpo.rewards.sandbox.trial import Sandbox, open_sandbox, too_large, why_refused
from lowmem_grpo.rewards.sandbox.worker import CannotStart, Worker, WorkerEnded

OWN_FRAME = '  File "code.py"'  # first traceback frame of the program; those above are the sandbox's
NOTHING = "(it printed nothing; print what you want to see)"
logger = logging.getLogger(__name__)


def python_tool(isolation: str | None = None, limits: Limits | None = None) -> Callable[[str], str]:
    """Return a tool `python(code)` that returns what the program prints. Each call runs in a new process and an empty
    folder, within `limits`. `isolation` None uses bubblewrap, and "process" is an opt-in to less protection. Raises
    SandboxError, with advice, if no sandbox works, and ValueError for an unknown isolation."""
    sandbox = open_sandbox(isolation, limits)

    def python(code: str) -> str:
        """Run a Python program and read what it prints. It has the standard library, and neither network nor files.

        Args:
            code: The program.
        """
        return printed_by(code, sandbox)

    return python


def printed_by(code: str, sandbox: Sandbox) -> str:
    """Run a program; return what it prints. ToolError if it fails or exceeds a limit, ToolOutage if it cannot run."""
    limits = sandbox.limits
    if fault := why_refused(code, limits.code_bytes) or too_large(code, "", limits.scratch_bytes):
        raise ToolError(f"the code was not run: {fault}")
    with started(code, sandbox) as worker:
        try:
            status = worker.run_to_end(time.monotonic() + min(limits.seconds, limits.total_seconds))
            end = worker.ended() if status else None
        except WorkerEnded as reason:
            end = reason
        printed = bytes(worker.stdout).decode("utf-8", "replace")
        if end is None:
            return printed or NOTHING
        trace = bytes(worker.stderr).decode("utf-8", "replace")
    at = max(trace.find(OWN_FRAME), 0)
    words = trace[at:].strip() if end.outcome == "ended" else f"{end.outcome}: {end.reason}"
    raise ToolError("\n".join(filter(None, (words or end.reason, printed and f"It had printed:\n{printed}"))))


def started(code: str, sandbox: Sandbox) -> Worker:
    """Return a process for the program; ToolOutage if two tries fail."""
    try:
        try:
            return sandbox.start("program", code, stdin="")
        except CannotStart as error:
            logger.warning("the sandbox did not start (%s); trying once more", error)
            return sandbox.start("program", code, stdin="")
    except CannotStart as error:
        raise ToolOutage(f"{sandbox.isolation} worked before and no longer does: {error}") from error
