"""The program inside the sandbox: it receives an order, gives up its rights, then loads the code and answers.

    {"role": "serve", "code": ...}    the code's functions answer calls, one {"call": name, ...} per line
    {"role": "program", "code": ...}  the code runs as a script with "stdin"; its output goes to the pipes
    {"role": "test"}                  runs one test {"source": ..., "names": [...]} per line: the names, and all imports
                                      from "modules", are stand-ins (`remote`) for objects of the code

Messages are one JSON object per line. The parent trusts only the role "test", whose process never runs model-written
code. This file imports only the standard library.
"""

import ast
import builtins
import importlib.machinery
import json
import math
import os
import resource
import runpy
import socket
import sys
from types import ModuleType
from typing import Any

from lowmem_grpo.rewards.sandbox import leetcode, like_pytest
from lowmem_grpo.rewards.sandbox.plain import decode, encode
from lowmem_grpo.rewards.sandbox.remote import Link, RemoteObject, Undecided, described, of_code, of_tests
from lowmem_grpo.rewards.sandbox.rights import give_up_rights, install_filter, restrict_files
from lowmem_grpo.rewards.sandbox.subject import Subject

SOURCE = "code.py"
NEVER_CALLED = "the test never called the code"
ONLY_OBJECTS = "the test got only objects of the code's own classes, and nothing to compare"


class Channel:
    """JSON lines over the inherited socket."""

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)
        self.lines = self.socket.makefile("rb")

    def receive(self) -> Any:
        """Return the next message. Raises SystemExit if the parent has closed the socket."""
        line = self.lines.readline()
        if not line:
            raise SystemExit(0)
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Receive an order over the socket whose descriptor is on the command line, and follow it."""
    channel = Channel(int(sys.argv[1]))
    order = channel.receive()
    place = os.open(order["scratch"], os.O_RDONLY | os.O_DIRECTORY)
    try:
        prepare(order)
    except OSError as error:
        channel.send({"refused": str(error)})
        return
    socket.send_fds(channel.socket, [b'{"ready": true}\n'], [place])
    os.close(place)
    {"serve": serve, "program": run_program, "test": run_asserts}[order["role"]](order, channel)


def prepare(order: dict[str, Any]) -> None:
    """Enter the scratch directory, write a program's code and input, then give up all rights. OSError on failure."""
    os.chdir(order["scratch"])
    if order["role"] == "program":
        for name, text in ((SOURCE, order["code"]), ("stdin", order["stdin"])):
            with open(name, "w", encoding="utf-8") as file:  # pathlib is slow to import
                file.write(text)
        os.dup2(descriptor := os.open("stdin", os.O_RDONLY), 0)
        os.close(descriptor)
        os.unlink("stdin")
    sys.path[:] = [entry for entry in sys.path if entry != order["package"]]
    sys.argv = [SOURCE]
    limit(order["limits"])
    give_up_rights()
    if order["readable"] is not None:
        restrict_files(order["readable"], [order["scratch"], "/dev/null"])
    install_filter()


def limit(limits: dict[str, float]) -> None:
    """Set this process's resource limits. SIGXCPU is sent when the CPU time is used up, SIGKILL a second later."""
    seconds = math.ceil(limits["total_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]), (resource.RLIMIT_FSIZE, limits["scratch_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(kind, (int(value), int(value)))


class TextLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from its source or syntax tree in memory. Untrusted code could change a file before it is read."""

    def __init__(self, path: str, source: Any) -> None:
        super().__init__("", path)
        self.source = source

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.source, self.path)


def load(name: str, loader: TextLoader, namespace: dict[str, Any]) -> ModuleType:
    """Run code as the module `name`, with `namespace` among its globals; return the module. Errors propagate."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(namespace)
    loader.exec_module(module)
    return module


def tree_of_test(source: str) -> ast.Module:
    """Return the syntax tree of test code without statements that start pytest or unittest; the body of an `if __name__
    == "__main__"` replaces the statement."""
    tree = ast.parse(source)
    kept = [statement for node in tree.body
            for statement in (node.body if isinstance(node, ast.If) and is_main_guard(node) else [node])]
    tree.body = [node for node in kept if not starts_tests(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            node.level = 0  # `from .solution import add`
    return tree


def is_main_guard(node: ast.If) -> bool:
    return "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test)


def starts_tests(node: ast.stmt) -> bool:
    return any(isinstance(child, ast.Call) and ast.unparse(child.func) in ("unittest.main", "pytest.main")
               for child in ast.walk(node)) and not isinstance(node, ast.FunctionDef | ast.ClassDef)


def run_program(order: dict[str, Any], channel: Channel) -> None:
    """Close the channel and run the code as a script, with `exit` and `quit`, which `site` (disabled) would define."""
    channel.lines.close()
    channel.socket.close()
    runpy.run_path(SOURCE, init_globals={"exit": sys.exit, "quit": sys.exit}, run_name="__main__")


def serve(order: dict[str, Any], channel: Channel) -> None:
    """Load the code, then answer calls until the parent closes the channel."""
    link = Link(channel, of_module, RemoteObject)
    asks = RemoteObject(link, -1, "", False)._ask
    known = {"exit": sys.exit, "quit": sys.exit, "input": lambda *text: asks("input", *text)}
    try:
        known |= leetcode.names() if "class Solution" in order["code"] or order.get("imports") else {}
        # As built-ins, the names are known to the code, but do not count as defined by it.
        loader = TextLoader("<string>", order["code"])
        link.module = load("solution", loader, {"__builtins__": {**vars(builtins), **known}})
        channel.send({"loaded": True})
    except BaseException as error:  # noqa: BLE001, also SystemExit: the code must not end this process
        channel.send(described(error))
        return
    while True:
        request = channel.receive()
        if "do" in request:
            link.serve(request)
            continue
        try:
            function = find(link.module, request["call"])
            channel.send({"value": encode(function(*decode(request["args"]), **decode(request["kwargs"])))})
        except BaseException as error:  # noqa: BLE001
            channel.send(described(error))


def of_module(link: Link, do: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Answer the tests: "get" finds an object of the tested module, "names" lists the module's public names, and
    `of_code` performs any other request."""
    if do == "names":
        return [name for name in vars(link.module) if not name.startswith("_")]
    return find(link.module, args[0]) if do == "get" else of_code(link, do, args, kwargs)


def find(module: ModuleType, name: str) -> Any:
    """Return the function `name`; "Solution.two_sum" is the method of a new object, and so is "two_sum" if there is no
    such function. NameError if there is neither."""
    target: Any = module
    if not hasattr(module, name) and "." not in name and hasattr(getattr(module, "Solution", None), name):
        name = f"Solution.{name}"
    for part in name.split("."):
        target = target() if isinstance(target, type) else target
        if not hasattr(target, part):
            raise NameError(f"the code defines no {name}")
        target = getattr(target, part)
    return target


def run_asserts(order: dict[str, Any], channel: Channel) -> None:
    """Run the tests of a row one after another, and send the outcome of each."""
    while True:
        test = channel.receive()
        link = Link(channel, of_tests, Subject)
        sys.modules.update({"pytest": like_pytest, **dict.fromkeys(test["modules"], Code(link))})
        outcome, reason = result_of(test, link)
        unused = not link.calls and not link.raised
        if outcome == "passed" and not link.answers and not link.raised:
            outcome, reason = "undecided", NEVER_CALLED if unused else ONLY_OBJECTS
        untestable = outcome == "undecided" or (unused and not link.holds_data)  # data may be in place of a function
        outcome = "error" if outcome == "undecided" else outcome
        channel.send({"outcome": outcome, "reason": reason, "untestable": untestable})


def result_of(test: dict[str, Any], link: Link) -> tuple[str, str]:
    try:
        helpers = leetcode.for_tests(set(test["names"]), test["source"])
        subjects = objects_of(link, [name for name in test["names"] if name not in helpers])
        like_pytest.run_all(load("tests", TextLoader("tests.py", tree_of_test(test["source"])), subjects | helpers))
        if link.broken is not None:
            raise link.broken
    except Undecided as why:
        return "undecided", str(why)
    except BaseException as error:  # noqa: BLE001, a test that ends in any other way has not passed
        if isinstance(error, NameError) and error.name in link.missing:
            link.raised.append((error, link.missing[error.name]))
        theirs = [text for other, text in link.raised if error is other]
        if isinstance(error, AssertionError) and not theirs:
            return "failed", failed_line(error, test["source"])
        return "error", theirs[0] if theirs else str(described(error)["text"])
    return "passed", ""


class Code(ModuleType):
    """A module that stands for the code under test: each import from it is a request to the code's process."""

    def __init__(self, link: Link) -> None:
        super().__init__("solution")
        vars(self).update(_link=link, __path__=[])

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return decode(self._link.ask("names")["value"])
        if name.startswith("__"):
            raise AttributeError(name)
        if objects := objects_of(self._link, [name]):
            return objects[name]
        text = self._link.missing[name]
        self._link.raised.append((error := AttributeError(text), text))
        raise error


def objects_of(link: Link, names: list[str]) -> dict[str, Any]:
    """Return the code's objects by name. Names that the code lacks go to `link.missing`; using one is an error."""
    objects: dict[str, Any] = {}
    for name in names:
        reply = link.ask("get", name)
        if "value" not in reply:
            link.missing[name] = str(reply.get("text"))
            continue
        value = objects[name] = decode(reply["value"], link.referred)
        link.holds_data |= not isinstance(value, Subject)
        link.named |= {name} if isinstance(value, Subject) and value._kind == "type" else set()
    return objects


def failed_line(error: BaseException, source: str) -> str:
    numbers, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "tests":
            numbers.append(trace.tb_lineno)
        trace = trace.tb_next
    line = source.splitlines()[numbers[-1] - 1].strip() if numbers else ""
    return f"{line}: {error}"[:500] if str(error) else line[:500]
