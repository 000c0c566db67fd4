"""A tool: a function that a policy may call, and what a chat template is told of it."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")  # what OpenAI allows, and the dots of MCP servers; "_" leads nowhere
JSON_TYPES = (str, int, float, bool, NoneType, list, tuple, dict)
EXAMPLE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b
'''


@dataclass(frozen=True)
class Tool:
    """A function and its schema."""

    name: str
    schema: dict[str, Any]  # in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}
    function: Callable[..., Any]

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)

    @property
    def parameters(self) -> dict[str, Any]:
        return self.schema["function"].get("parameters") or {"type": "object", "properties": {}}

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(inspect.unwrap(self.function))


class ToolSchemaError(ValueError):
    """A function that cannot be a tool. The message says which, why, and what to write."""


def tool_of(function: Any) -> Tool:
    """Return the tool of a function, a bound method or an async one; a Tool as it is. Raises ToolSchemaError."""
    if isinstance(function, Tool):
        return checked_name(function)
    name = getattr(function, "__name__", None)
    if not callable(function) or isinstance(function, type) or not isinstance(name, str):
        raise ToolSchemaError("a tool must be a function, a bound method or a tool of an MCP server, got "
                              f"{function!r}; write a function around it, for example:{EXAMPLE}")
    from transformers.utils import get_json_schema  # takes seconds to import

    check_signature(name, function)
    try:
        schema = get_json_schema(function)
    except Exception as error:  # there are several kinds, with words for developers
        raise ToolSchemaError(f"the tool {name} has no schema: {error}. A tool reads like this:{EXAMPLE}") from error
    return checked_name(Tool(name, schema, function))


def checked_name(tool: Tool) -> Tool:
    """Return the tool, if a policy may write its name."""
    if not NAME.fullmatch(tool.name):
        raise ToolSchemaError(f"a tool cannot be called {tool.name!r}: a name begins with a letter and has letters, "
                              "digits, _, . and - after it, 64 at most; rename the function")
    return tool


def check_signature(name: str, function: Callable[..., Any]) -> None:
    """Refuse a function that has arguments without a type, a description, or a name that a call can give."""
    try:
        arguments = inspect.signature(function).parameters.values()
        hints = get_type_hints(function)
    except Exception as error:  # a hint may name what does not exist
        raise ToolSchemaError(f"the arguments of the tool {name} cannot be read ({error}); write their types as in:"
                              f"{EXAMPLE}") from error
    doc = inspect.getdoc(function)
    if not doc:
        raise ToolSchemaError(f"the tool {name} has no docstring, which tells the policy what it does; write one as in:"
                              f"{EXAMPLE}")
    for argument in arguments:
        what = f"argument {argument.name!r} of the tool {name}"
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
            raise ToolSchemaError(f"{what} takes {argument}, but a policy gives each argument by its name: write the "
                                  "arguments one by one")
        if argument.name not in hints:
            raise ToolSchemaError(f"{what} has no type: write it as in `{argument.name}: int`")
        if strange := next(not_json(hints[argument.name]), None):
            raise ToolSchemaError(f"{what} has the type {strange}, which JSON cannot hold: take str, int, float, bool, "
                                  "list, dict, Literal or None, and make the rest of them in the function")
        if not re.search(rf"^\s*{re.escape(argument.name)}:\s*\S", doc, re.MULTILINE):
            raise ToolSchemaError(f"{what} has no description: write `{argument.name}: ...` below \"Args:\" in the "
                                  f"docstring, without its type, as in:{EXAMPLE}")


def not_json(hint: Any) -> Iterator[str]:
    """Yield the types in a hint that JSON has no value for."""
    if get_origin(hint) is Literal or hint in (Any, ...):
        return
    if inner := get_args(hint):
        for part in inner:
            yield from not_json(part)
    elif hint not in JSON_TYPES:
        yield getattr(hint, "__name__", str(hint))
