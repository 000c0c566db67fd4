"""The program inside the sandbox: it takes an order, gives up its rights, then loads the code and answers.

    {"role": "serve", "code": ...}    the code's functions answer calls, one {"call": name, ...} a line
    {"role": "program", "code": ...}  the code runs as a script with "stdin"; its output goes to the pipes
    {"role": "test"}                  asserts run as they come, {"source": ..., "names": [...]} a line: the names are
                                      stubs whose calls go out on the channel

Messages are one JSON object a line, both ways. Nothing here is secret. The other side trusts nothing that this program
says, except in the role "test", in whose process no code of a model ever runs. Imports only the standard library.
"""

import array
import builtins
import importlib.abc
import importlib.util
import json
import math
import os
import resource
import runpy
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from lowmem_grpo.sandbox.file_access import restrict
from lowmem_grpo.sandbox.plain import decode, encode
from lowmem_grpo.sandbox.system_calls import give_up_rights, install_filter

SOURCE = "code.py"
NOT_RAISED = (StopIteration, StopAsyncIteration, UnicodeError)  # loops swallow two; the last needs more than a text


class Channel:
    """JSON lines over the socket that was handed in."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.lines = self.socket.makefile("rb")

    def receive(self) -> Any:
        """The next message. Raises SystemExit if the other side is gone."""
        line = self.lines.readline()
        if not line:
            raise SystemExit(0)
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Take an order from the descriptor named on the command line, and follow it."""
    channel = Channel(int(sys.argv[1]))
    order = channel.receive()
    place = os.open(order["scratch"], os.O_RDONLY | os.O_DIRECTORY)
    try:
        prepare(order)
    except OSError as error:
        channel.send({"refused": str(error)})
        return
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [place]))]
    channel.socket.sendmsg([b'{"ready": true}\n'], rights)
    os.close(place)
    {"serve": serve, "program": run_program, "test": run_asserts}[order["role"]](order, channel)


def prepare(order: dict[str, Any]) -> None:
    """Enter the scratch directory with the code in it, then give up what the code must not have. OSError on failure."""
    os.chdir(order["scratch"])
    if order["role"] == "program":
        Path(SOURCE).write_text(order["code"], encoding="utf-8")
        open_as_stdin(order["stdin"])
    sys.path[:] = [entry for entry in sys.path if entry != order["package"]]
    sys.argv = [SOURCE]
    limit(order["limits"])
    give_up_rights()
    if order["readable"] is not None:
        restrict(order["readable"], [order["scratch"], "/dev/null"])
    install_filter()


def open_as_stdin(text: str) -> None:
    """Make descriptor 0 read `text`."""
    Path("stdin").write_text(text, encoding="utf-8")
    descriptor = os.open("stdin", os.O_RDONLY)
    os.unlink("stdin")
    os.dup2(descriptor, 0)
    os.close(descriptor)


def limit(limits: dict[str, float]) -> None:
    """Set this process's resource limits. SIGXCPU comes when the CPU time is over, SIGKILL a second later."""
    seconds = math.ceil(limits["total_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]), (resource.RLIMIT_FSIZE, limits["scratch_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (int(value), int(value)))


class Source(importlib.abc.InspectLoader):
    """Loads a module from text, so that no file can be changed before it is read."""

    def __init__(self, text: str) -> None:
        self.text = text

    def get_source(self, fullname: str) -> str:
        return self.text


def load(name: str, text: str, given: dict[str, Any]) -> ModuleType:
    """Run the text as a module `name`, with `given` among its globals. Raises whatever the text raises."""
    spec = importlib.util.spec_from_loader(name, Source(text), origin=f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(given)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_program(order: dict[str, Any], channel: Channel) -> None:
    """Close the channel and run the code as a script."""
    channel.lines.close()
    channel.socket.close()
    runpy.run_path(SOURCE, run_name="__main__")


def serve(order: dict[str, Any], channel: Channel) -> None:
    """Load the code, then answer calls until the other side hangs up."""
    try:
        module = load("solution", order["code"], {})
        channel.send({"loaded": True})
    except BaseException as error:  # noqa: BLE001, also SystemExit: the code does not decide when this ends
        channel.send(described(error))
        return
    while True:
        request = channel.receive()
        try:
            line = json.dumps({"value": answer(module, request)}).encode()
        except BaseException as error:  # noqa: BLE001
            line = json.dumps(described(error)).encode()
        channel.socket.sendall(line + b"\n")


def answer(module: ModuleType, request: dict[str, Any]) -> Any:
    """The encoded result of one call."""
    function = find(module, request["call"])
    return encode(function(*decode(request["args"]), **decode(request["kwargs"])))


def find(module: ModuleType, name: str) -> Any:
    """A function, or as in "Solution.two_sum" a method of a new object. NameError if there is none."""
    found: Any = module
    for part in name.split("."):
        found = found() if isinstance(found, type) else found
        if not hasattr(found, part):
            raise NameError(f"the code defines no {name}")
        found = getattr(found, part)
    return found


def described(error: BaseException) -> dict[str, Any]:
    """An exception as a message: its built-in type and one line of text."""
    kinds = [kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind]
    try:
        text = str(error)
    except Exception:  # noqa: BLE001, it may be a class of the code's
        text = ""
    return {"error": kinds[0], "text": f"{type(error).__name__}: {text}"[:500]}


def run_asserts(order: dict[str, Any], channel: Channel) -> None:
    """Run the tests of a row one after another, and report how each went."""
    while True:
        test = channel.receive()
        stubs = Stubs(channel)
        try:
            load("tests", test["source"], {name: stubs.make(name) for name in test["names"]})
            channel.send({"outcome": "passed", "reason": ""})
        except BaseException as error:  # noqa: BLE001, a test that ends in any other way has not passed
            theirs = any(error is other for other in stubs.raised)
            own = isinstance(error, AssertionError) and not theirs
            reason = failed_line(error, test["source"]) if own else described(error)["text"]
            channel.send({"outcome": "failed" if own else "error", "reason": error.args[0] if theirs else reason})


class Stubs:
    """Functions that ask the code's process, and the errors that they raised for it."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.raised = channel, list[BaseException]()

    def make(self, name: str) -> Any:
        def stub(*args: Any, **kwargs: Any) -> Any:
            self.channel.send({"call": name, "args": encode(args), "kwargs": encode(kwargs)})
            reply = self.channel.receive()
            if "value" in reply:
                return decode(reply["value"])
            self.raised.append(as_exception(reply))
            raise self.raised[-1]

        stub.__name__ = name
        return stub


def as_exception(reply: dict[str, Any]) -> Exception:
    """The code's exception as a built-in one of its kind, so that a test can expect it.

    Those that Python takes for the end of an iteration become RuntimeError: `all(map(check, inputs))` would hide them.
    """
    kind = getattr(builtins, str(reply.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, NOT_RAISED):
        return kind(str(reply.get("text", "")))
    return RuntimeError(str(reply.get("text", "")))


def failed_line(error: BaseException, source: str) -> str:
    """The line of the test that failed, and what its assert says."""
    numbers, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "tests":
            numbers.append(trace.tb_lineno)
        trace = trace.tb_next
    line = source.splitlines()[numbers[-1] - 1].strip() if numbers else ""
    return f"{line}: {error}"[:500] if str(error) else line[:500]
