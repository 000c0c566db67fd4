"""The stand-in that tests hold for an object of the code under test; see `remote`."""

import json
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from lowmem_grpo.rewards.sandbox.plain import decode
from lowmem_grpo.rewards.sandbox.remote import CHANGEABLE, OPERATIONS, RemoteObject, Undecided, as_exception

MOST = 1000  # items of an iterator that are fetched in one request


class Subject(RemoteObject):
    """A test's stand-in for an object of the code under test."""

    def _ask(self, do: str, *args: Any, **kwargs: Any) -> Any:
        self._link.calls += (is_call := do != "bool")  # the truth of a function tells nothing about the code
        answer = self._link.ask(do, *args, **kwargs)
        if answer.get("printed"):
            sys.stdout.write(str(answer["printed"]))
        if "value" not in answer:
            self._link.raised.append((error := as_exception(self._link, answer), str(answer.get("text"))))
            raise error
        value = decode(answer["value"], self._link.referred)
        self._link.answers += is_call and not isinstance(value, Subject)
        return at_once(value) if answer.get("awaited") else value

    def _as_data(self, other: Any) -> Any:
        """Return the object's data, for an operation with `other`, which is data. If the object is not plain data:
        Undecided if the test names the object's class, which may define a comparison with data; else TypeError."""
        if self._plain:
            if self._held is None:
                data = self._ask("plain", self)
                if isinstance(data, CHANGEABLE):
                    return data
                object.__setattr__(self, "_held", [data])  # kept, as the code's class could give other data next time
            return self._held[0]
        if self._kind in self._link.named:
            raise Undecided(f"only the code's own {self._kind} could compare itself with {other!r:.100}")
        raise TypeError(f"the code gave a {self._kind}, which is not plain data")

    def _not_fed(self) -> None:
        if self._fed:
            raise Undecided(f"only the code says what this {self._kind} is, which it made with a value of the test")

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Subject):
            return bool((self._plain or self._kind in self._link.named) and self._as_data(other) == other)
        if self is not other and not self._ask("eq", self, other):
            return False
        states = {self._ask("state", side) for side in (self, other)} if self is not other or self._made else set()
        if len(states) > 1 or any(made not in state for made in self._made + other._made for state in states):
            raise Undecided(f"only the code says that two objects are equal; what they hold does not ({self._kind})")
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        if self._kind == "type" and isinstance(result, Subject):
            made = [json.dumps(value) for value in (*args, *kwargs.values()) if isinstance(value, str | int | float)]
            object.__setattr__(result, "_made", made)
        return result

    def __hash__(self) -> int:
        return int(self._ask("hash", self))

    def __contains__(self, item: Any) -> bool:
        try:
            return any(item is element or item == element for element in self)
        except TypeError:
            return bool(item in self._as_data(item))

    def __iter__(self) -> Iterator[Any]:
        source, size = self._ask("iter", self), 1
        while items := self._ask("take", source, size):
            yield from items
            size = min(2 * size, MOST)

    def __next__(self) -> Any:
        if not (items := self._ask("take", self, 1)):
            raise StopIteration
        return items[0]

    def __enter__(self) -> Any:
        return self._ask("enter", self)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return bool(self._ask("leave", self, kind, None if error is None else str(error)))

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, Subject) and bool(self._ask("isinstance", other, self))


async def at_once(value: Any) -> Any:
    """Return the result of an async function that the code's process has awaited already."""
    return value


def asked(name: str) -> Callable[..., Any]:
    """Return a method that asks the code for a result that must be data, such as a length; the test's process computes
    the result for immutable plain data. Undecided if the code made the object with a value of the test: the object
    could return what the test expects."""
    def ask(self: Subject, *args: Any) -> Any:
        self._not_fed()
        if self._plain and not isinstance(data := self._as_data(None), CHANGEABLE):
            return OPERATIONS[name](data, *args)
        return self._ask(name, self, *args)

    return ask


def compared(name: str) -> Callable[..., Any]:
    """Return a comparison method. The code compares its own objects with each other; the test compares data."""
    def compare(self: Subject, other: Any) -> Any:
        if isinstance(other, Subject) and not (self._plain or other._plain):
            self._not_fed()
            other._not_fed()
            return self._ask(name, self, other)
        theirs = other._as_data(self) if isinstance(other, Subject) else other
        return getattr(operator, name)(self._as_data(other), theirs)

    return compare


def computed(name: str, turned: bool = False) -> Callable[..., Any]:
    """Return a method for a binary operation of the code's object and another value. If the object is plain data, the
    test's process computes the result. Otherwise the code's process does, provided that the other value is an object of
    the code too, or that the test names the object's class. A result made with a value of the test must be an object,
    and is marked `_fed`, because it may hold what the test expects: abs(f(2) - 4) < 0.1."""
    def compute(self: Subject, other: Any) -> Any:
        if not self._plain and (isinstance(other, Subject) or self._kind in self._link.named):
            result = self._ask(name, *((other, self) if turned else (self, other)))
            if isinstance(result, Subject):
                object.__setattr__(result, "_fed", not isinstance(other, Subject) or self._fed or other._fed)
            if isinstance(other, Subject) or isinstance(result, Subject):
                return result
        return getattr(operator, name)(*((other, self._as_data(other)) if turned else (self._as_data(other), other)))

    return compute


for _name in ("len", "bool", "str", "repr", "int", "float", "abs", "neg", "pos", "invert", "round", "format",
              "reversed", "getitem", "setitem", "delitem", "delattr", "index"):
    setattr(Subject, f"__{_name}__", asked(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Subject, f"__{_name}__", compared(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift",
              "rshift"):
    _function = _name if hasattr(operator, _name) else f"{_name}_"
    setattr(Subject, f"__{_name}__", computed(_function))
    setattr(Subject, f"__r{_name}__", computed(_function, turned=True))
