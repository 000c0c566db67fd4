"""Remote objects, by which test code and the code under test use each other's objects across their two processes.

Plain data crosses as a copy. For other objects, the other process gets a stand-in: `subject.Subject` for an object of
the code, `RemoteObject` for one of the tests. Operations on a stand-in are requests to the other process: {"do":
"getattr", "args": [...]}. The answer also holds printed text and in-place changes of arguments.

No object of the code decides a comparison with data: the test gets the object's data, once, and compares it. If only
the code could compare (its own objects with data, or two objects with different contents), the test is `Undecided`.
"""

import builtins
import contextlib
import io
import itertools
import json
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any

from lowmem_grpo.rewards.sandbox import leetcode
from lowmem_grpo.rewards.sandbox.plain import decode, encode

NOT_RAISED = (StopIteration, StopAsyncIteration, UnicodeError)  # loops swallow two; UnicodeDecodeError needs 5 values
CHANGEABLE = (list, dict, set, deque, bytearray)
OPERATIONS = vars(builtins) | vars(operator)
PLAIN = (str, int, float, list, dict, set, frozenset, tuple, bytes, bytearray, deque)


class Undecided(BaseException):
    """Raised if only the code under test could decide a comparison; the test then has no verdict."""


class Link:
    """One end of the connection between the two processes. `perform` executes requests; `stand_in` is the class that
    represents objects of the other process."""

    def __init__(self, channel: Any, perform: Callable[..., Any], stand_in: type) -> None:
        self.channel, self.perform, self.stand_in = channel, perform, stand_in
        self.own: list[Any] = []
        self.module: Any = None  # the code, in its own process
        self.numbers: dict[int, int] = {}  # own objects' numbers, by id
        self.theirs: dict[int, Any] = {}
        self.errors: dict[str, type] = {}  # classes of exceptions, by name
        self.broken: AssertionError | None = None  # from an assert in a callback
        self.named: set[str] = set()  # classes of the code that the test uses by name
        self.missing: dict[str, str] = {}  # names that the test uses and the code lacks, with the error texts
        self.holds_data = False  # the test uses a name that is data in the code
        self.calls = 0  # requests to the code, of any operation
        self.answers = 0  # answers with data, which a test can compare
        self.raised: list[tuple[BaseException, str]] = []  # errors of the code, with their texts

    def refer(self, value: Any) -> Any:
        """Return a JSON tree that stands for a value that is not plain data."""
        if isinstance(value, RemoteObject):
            return {"yours": value._number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error": names_of(value)}
        if isinstance(value, type) and value in vars(builtins).values():
            return {"type": value.__name__}
        if self.stand_in is not RemoteObject and isinstance(value, Iterator):
            return {"iterator": [encode(item, self.refer) for item in value]}
        number = self.numbers.setdefault(id(value), len(self.own))
        self.own += [value] if number == len(self.own) else []
        return {"ref": [number, type(value).__name__, isinstance(value, PLAIN)]}

    def referred(self, tree: dict[str, Any]) -> Any:
        """Return the value for a JSON tree that the other process's `refer` made."""
        ((kind, content),) = tree.items()
        if kind == "yours":
            return self.own[content]
        if kind == "error":
            return self.error_class(content)
        if kind == "type" and isinstance(builtin := getattr(builtins, content), type):
            return builtin
        if kind != "ref":
            raise ValueError(f"{kind!r} is not a type of encoded data")
        return self.theirs.setdefault(content[0], self.stand_in(self, *content))

    def error_class(self, names: list[str]) -> Any:
        """Return the exception class for these class names: a built-in one, or a new subclass with the first name."""
        cls: Any = getattr(builtins, str(names[-1]), None)
        if not isinstance(cls, type) or not issubclass(cls, Exception | SystemExit):
            cls = RuntimeError
        for name in reversed(names[:-1]):
            cls = self.errors.setdefault(name, type(name, (cls,), {}))
        return cls

    def ask(self, do: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Send a request and return the answer; requests from the other process in the meantime are served first."""
        trees = {name: encode(value, self.refer) for name, value in kwargs.items()}
        self.channel.send({"do": do, "args": [encode(value, self.refer) for value in args], "kwargs": trees})
        while "do" in (answer := self.channel.receive()):
            self.serve(answer)
        for place, tree in answer.get("changed", ()):
            renew([*args, *kwargs.values()][place], decode(tree, self.referred))
        return dict(answer)

    def serve(self, request: dict[str, Any]) -> None:
        """Perform a request of the other process, and send the result or the exception."""
        printed = Tee()
        try:
            args = [decode(tree, self.referred) for tree in request["args"]]
            kwargs = {name: decode(tree, self.referred) for name, tree in request["kwargs"].items()}
            before = self.changeable([*args, *kwargs.values()])
            with contextlib.redirect_stdout(printed) if self.stand_in is RemoteObject else contextlib.nullcontext():
                value = self.perform(self, request["do"], args, kwargs)
                awaited = isinstance(value, CoroutineType)
                value = run_coroutine(value) if awaited else value
            answer: dict[str, Any] = {"value": encode(value, self.refer), "awaited": awaited}
            after = self.changeable([*args, *kwargs.values()])
            answer["changed"] = [[place, after[place]] for place in after if after[place] != before[place]]
        except (Undecided, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001, also SystemExit
            self.broken = error if isinstance(error, AssertionError) else self.broken
            answer = described(error)
        self.channel.send(answer | {"printed": printed.getvalue()})

    def changeable(self, values: list[Any]) -> dict[int, Any]:
        """Return, by position, the JSON trees of those values that a call may change in place."""
        return {place: encode(value, self.refer) for place, value in enumerate(values) if type(value) in CHANGEABLE}


def run_coroutine(coroutine: Any) -> Any:
    import asyncio  # takes longer than all other imports of the sandbox, and is rarely needed

    return asyncio.run(coroutine)


class Tee(io.StringIO):
    """A buffer of printed text that also prints it, so that the output limit applies."""

    def write(self, text: str) -> int:
        if sys.__stdout__ is not None:
            sys.__stdout__.write(text)
        return super().write(text)


class RemoteObject:
    """A stand-in for an object of the other process, with calls and attributes."""

    def __init__(self, link: Link, number: int, kind: str, is_plain: bool) -> None:
        for name, value in (("_link", link), ("_number", number), ("_kind", kind), ("_plain", is_plain),
                            ("_made", []), ("_held", None), ("_fed", False)):
            object.__setattr__(self, name, value)

    def _ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        answer = self._link.ask(do, *args, **kwargs)
        if "value" not in answer:
            raise as_exception(self._link, answer)
        return decode(answer["value"], self._link.referred)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)


def of_code(link: Link, do: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Perform a request of the tests to the code. Tests are trusted, so any operation is allowed."""
    if do == "call":
        return args[0](*args[1:], **kwargs)
    if do == "take":
        return list(itertools.islice(args[0], args[1]))
    if do == "enter":
        return type(args[0]).__enter__(args[0])
    if do == "leave":
        return type(args[0]).__exit__(args[0], args[1], args[1] and args[1](args[2]), None)
    if do in ("plain", "state"):
        return decode(encode(args[0])) if do == "plain" else json.dumps(state_of(args[0]), sort_keys=True)
    return OPERATIONS[do](*args)


def of_tests(link: Link, do: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Perform a request of the code to the tests: a call of an object that they passed, a public attribute of an object
    of their own classes, or `input`. AttributeError for any other request."""
    if do == "input":
        return input(*args)
    ours = any(args[0] is value for value in link.own)
    if do == "call" and ours:
        return args[0](*args[1:], **kwargs)
    public = type(args[0]).__module__ in ("tests", leetcode.__name__) and not str(args[1]).startswith("_")
    if do in ("getattr", "setattr") and ours and public:
        return getattr(args[0], args[1]) if do == "getattr" else setattr(*args)
    raise AttributeError(f"the test's {type(args[0]).__name__} gives no {str(args[1:2])[1:-1]}")


def state_of(value: Any) -> Any:
    """Return a JSON tree of an object's state (by `__reduce_ex__`), including the objects in it."""
    return {type(value).__name__: encode(list(value.__reduce_ex__(2)[1:5]), lambda inner: (
        inner.__qualname__ if isinstance(inner, type) else state_of(inner)))}


def renew(old: Any, new: Any) -> Any:
    """Give the container `old` the content of `new`, and return `old`. Equally long lists also renew inner
    containers."""
    if isinstance(old, list) and len(old) == len(new):
        new = [renew(before, after) if isinstance(before, CHANGEABLE) and type(before) is type(after) else after
               for before, after in zip(old, new, strict=True)]
    if isinstance(old, list | bytearray):
        old[:] = new
    else:
        old.clear()
        (old.extend if isinstance(old, deque) else old.update)(new)
    return old


def names_of(kind: type) -> list[str]:
    """Return the names of an exception's class and its bases, up to the first built-in one."""
    names = [cls.__name__ for cls in kind.__mro__]
    built_in = [getattr(builtins, cls.__name__, None) is cls for cls in kind.__mro__]
    return names[: built_in.index(True) + 1]


def described(error: BaseException) -> dict[str, Any]:
    """Return an exception as a message: class names, arguments and text."""
    names = names_of(type(error))
    try:
        text = str(error)
        rewritten = len(names) > 1 and text != str(Exception(*error.args))  # its class defines __str__
        args = [text] if rewritten else [encode(value) for value in error.args]
    except Exception:  # noqa: BLE001, the code's __str__ may raise, or an argument may not be plain data
        text, args = "", []
    return {"error": names[-1], "names": names, "args": args, "text": f"{names[0]}: {text}"[:500]}


def as_exception(link: Link, answer: dict[str, Any]) -> BaseException:
    """Return the other process's exception as one of the same class, so that a test can expect it. Exceptions that end
    an iteration become RuntimeError: all(map(check, inputs)) would hide them."""
    kind = link.error_class([str(name) for name in answer.get("names") or [answer.get("error")]])
    if issubclass(kind, NOT_RAISED):
        return RuntimeError(str(answer.get("text", "")))
    exception: BaseException = kind(*(decode(tree) for tree in answer.get("args", ())))
    return exception
