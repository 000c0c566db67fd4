"""The tools of a run or an episode: their schemas for the chat template, and running the policy's calls."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.data.prompts import DataError
from lowmem_grpo.environments.tools.arguments import fault
from lowmem_grpo.environments.tools.forms import Reads, parser_of
from lowmem_grpo.environments.tools.parsers import Reading, custom
from lowmem_grpo.environments.tools.results import FinalResult, TokenLimit, ToolError, ToolOutage, described, text_of
from lowmem_grpo.environments.workers import LateError
from lowmem_grpo.types import Message, ToolCall

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")  # as OpenAI allows, plus dots for MCP servers; no leading "_"
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
    """A function that the policy may call, and the schema that the chat template shows to the policy."""

    name: str
    schema: dict[str, Any]  # OpenAI's format: {"type": "function", "function": {"name", "description", "parameters"}}
    function: Callable[..., Any]

    def __call__(self, **arguments: Any) -> Any:
        return self.function(**arguments)

    @property
    def parameters(self) -> dict[str, Any]:
        return self.schema["function"].get("parameters") or {"type": "object", "properties": {}}


class ToolSchemaError(ValueError):
    """A function that cannot be a tool; the message says which, why, and how to fix it."""


def tool_of(function: Any) -> Tool:
    """Return a function or bound method, plain or async, as a Tool. ToolSchemaError if it cannot be a tool."""
    if isinstance(function, Tool):
        return checked_name(function)
    name = getattr(function, "__name__", None)
    if not callable(function) or isinstance(function, type | partial) or not isinstance(name, str):
        raise ToolSchemaError("a tool must be a function, a bound method or a tool of an MCP server, got "
                              f"{function!r}; write a function around it, for example:{EXAMPLE}")
    from transformers.utils import get_json_schema  # takes seconds to import

    check_signature(name, function)
    try:
        schema = get_json_schema(function)
    except Exception as error:  # parsers raise several types, with messages for developers
        raise ToolSchemaError(f"the tool {name} has no schema: {error}. A tool reads like this:{EXAMPLE}") from error
    return checked_name(Tool(name, schema, function))


def checked_name(tool: Tool) -> Tool:
    """Return the tool; ToolSchemaError if its name is not allowed."""
    if not NAME.fullmatch(tool.name):
        raise ToolSchemaError(f"a tool cannot be called {tool.name!r}: a name begins with a letter and has letters, "
                              "digits, _, . and - after it, 64 at most; rename the function")
    return tool


def check_signature(name: str, function: Callable[..., Any]) -> None:
    """Raise ToolSchemaError for a function without a docstring, or with arguments that lack a JSON type or description
    or cannot be passed by name."""
    try:
        arguments = inspect.signature(function).parameters.values()
        hints = get_type_hints(function)
    except Exception as error:  # a hint may name an undefined type
        raise ToolSchemaError(f"the arguments of the tool {name} cannot be read ({error}); write their types as in:"
                              f"{EXAMPLE}") from error
    doc = inspect.getdoc(function)
    if not doc:
        raise ToolSchemaError(f"the tool {name} has no docstring, which tells the policy what it does; write one as in:"
                              f"{EXAMPLE}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ToolSchemaError(f"the tool {name} yields, and a call has one result: return it, as a text or a list")
    for argument in arguments:
        what = f"argument {argument.name!r} of the tool {name}"
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD, argument.POSITIONAL_ONLY):
            raise ToolSchemaError(f"{what} takes {argument}, but a policy gives each argument by its name: write the "
                                  "arguments one by one")
        if argument.name not in hints:
            fix = "pass an object's method" if argument.name == "self" else f"write it as in `{argument.name}: int`"
            raise ToolSchemaError(f"{what} has no type: {fix}")
        if strange := next(not_json(hints[argument.name]), None):
            raise ToolSchemaError(f"{what} has the type {strange}, which JSON cannot hold: take str, int, float, bool, "
                                  "list, dict, Literal or None, and make the rest of them in the function")
        if not re.search(rf"^\s*{re.escape(argument.name)}:\s*\S", doc, re.MULTILINE):
            raise ToolSchemaError(f"{what} has no description: write `{argument.name}: ...` below \"Args:\" in the "
                                  f"docstring, without its type, as in:{EXAMPLE}")


def not_json(hint: Any) -> Iterator[str]:
    """Yield the names of the types in a hint that JSON cannot represent."""
    if get_origin(hint) is Literal or hint in (Any, ...):
        return
    if inner := get_args(hint):
        for part in inner:
            yield from not_json(part)
    elif hint not in JSON_TYPES:
        yield getattr(hint, "__name__", str(hint))


class Toolbox:
    """The tools that a policy may call.

    `functions` are plain or async functions, bound methods and tools of MCP servers. `max_tokens` limits the result of
    one call; longer results are cut in the middle. `parse` is None for the format of the tokenizer's template, the name
    of a format (`parsers.FORMS`, or "response_template"), or a function that returns the calls in a completion's text,
    and raises for a malformed one. `template_kwargs` are the chat template's arguments for prompts.

    Raises ValueError for two tools of one name, functions that cannot be tools, and a template without tool calls.
    """

    def __init__(self, functions: Sequence[Any], tokenizer: PreTrainedTokenizerBase, max_tokens: int,
                 parse: Callable[..., Any] | str | None = None,
                 template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tools = named([tool_of(function) for function in functions])
        self.limit, self.parse = TokenLimit(tokenizer, max_tokens), parse
        self.parser: Reads | None = None
        if self.tools and not callable(parse):
            self.parser = parser_of(tokenizer, self.schemas, parse, template_kwargs or {})

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def with_functions(self, functions: Sequence[Any]) -> "Toolbox":
        """Return a copy with other functions of the same names and schemas, such as the methods of another environment
        instance. ValueError if the schemas differ."""
        known = {shared(tool.function): tool for tool in self.tools.values()}  # schemas of the same methods are reused
        other = copy(self)
        other.tools = named([tool_of(function) if isinstance(function, Tool) or shared(function) not in known
                             else replace(known[shared(function)], function=function) for function in functions])
        if other.schemas != self.schemas:
            raise ValueError(f"the tools {', '.join(other.tools)} differ from those that the template was told of: "
                             f"{', '.join(self.tools)}")
        return other

    def read(self, completion_ids: Sequence[int], text: str) -> Reading:
        """Parse a completion. `text` is its text without special tokens."""
        if callable(self.parse):
            return custom(self.parse, text)
        return Reading(text) if self.parser is None else self.parser.read(completion_ids, text)

    def run(self, call: ToolCall, make: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]) -> str:
        """Return a call's result as text, cut to `max_tokens`. `make` calls the function, and takes the arguments of
        `WorkerJob.call`. Raises ToolError, whose message the policy reads, if the call fails, ToolOutage if the tool is
        broken, LateError if it takes too long, and DataError if it returns an image."""
        tool = self.tools.get(call.name)
        try:
            if tool is None:
                raise ToolError(f"there is no tool {call.name[:60]!r}; the tools are {', '.join(self.tools)}")
            if wrong := fault({"additionalProperties": False, **tool.parameters}, call.arguments):
                raise ToolError(f"{call.name}: {wrong}")
            result = make(tool.function, (), call.arguments)
            text = self.limit.cut(text_of(result))
        except (ToolOutage, DataError, LateError):
            raise
        except (Exception, SystemExit) as error:
            words = error.words if isinstance(error, ToolError) else described(error)
            raise ToolError(self.limit.cut(words)) from error
        return FinalResult(text) if isinstance(result, FinalResult) else text

    def message(self, call: ToolCall, content: str) -> Message:
        return {"role": "tool", "name": call.name if call.name in self.tools else "unknown", "content": content}


def named(tools: list[Tool]) -> dict[str, Tool]:
    """Return the tools by name. ValueError for a duplicate name."""
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise ValueError(f"two tools are called {tool.name!r}, so a call could mean either; rename one of them")
        by_name[tool.name] = tool
    return by_name


def shared(function: Any) -> Any:
    return getattr(function, "__func__", function)
