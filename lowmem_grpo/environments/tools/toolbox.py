"""The tools of a run, or of an episode: what the template is told of them, which are called, and what they answer."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.environments.tools.arguments import fault
from lowmem_grpo.environments.tools.forms import Reads, parser_of
from lowmem_grpo.environments.tools.parsers import Reading, custom
from lowmem_grpo.environments.tools.results import FinalResult, TokenLimit, ToolError, ToolOutage, described, text_of
from lowmem_grpo.environments.tools.schema import Tool, tool_of
from lowmem_grpo.types import Message, ToolCall


class Toolbox:
    """Functions that a policy may call.

    `functions` are plain or async functions, bound methods and tools of MCP servers. `max_tokens` bounds what one call
    returns; more is cut out of its middle. `parse` is None for the form of the tokenizer's template, the name of a form
    (`parsers.FORMS`, or "response_template"), or a function of a completion's text that gives its calls and raises for
    one that is malformed. `template_kwargs` are those with which prompts are rendered.

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
        """Do the same for other functions of these names, such as the methods of another instance of an environment."""
        known = {shared(tool.function): tool for tool in self.tools.values()}  # their schemas are not made again
        other = copy(self)
        other.tools = named([tool_of(function) if isinstance(function, Tool) or shared(function) not in known
                             else replace(known[shared(function)], function=function) for function in functions])
        if other.schemas != self.schemas:
            raise ValueError(f"the tools {', '.join(other.tools)} differ from those that the template was told of: "
                             f"{', '.join(self.tools)}")
        return other

    def read(self, completion_ids: Sequence[int], text: str) -> Reading:
        """Return what a completion says and calls. `text` is it without special tokens."""
        if callable(self.parse):
            return custom(self.parse, text)
        return Reading(text) if self.parser is None else self.parser.read(completion_ids, text)

    def is_async(self, call: ToolCall) -> bool:
        """Return whether the call should be awaited in an event loop: `answer`. Any other is for a thread: `run`."""
        tool = self.tools.get(call.name)
        return tool is not None and tool.is_async

    def run(self, call: ToolCall) -> str:
        """Return what the policy reads of a call. ToolError for one that failed, ToolOutage for a broken tool."""
        with self.failures_told():
            result = self.started(call)
            return self.as_text(asyncio.run(awaited(result)) if inspect.isawaitable(result) else result)

    async def answer(self, call: ToolCall) -> str:
        """Do the same in an event loop."""
        with self.failures_told():
            result = self.started(call)
            return self.as_text(await result if inspect.isawaitable(result) else result)

    def started(self, call: ToolCall) -> Any:
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name[:60]!r}; the tools are {', '.join(self.tools)}")
        if wrong := fault({"additionalProperties": False, **tool.parameters}, call.arguments):
            raise ToolError(f"{call.name}: {wrong}")
        return tool.function(**call.arguments)

    def as_text(self, result: Any) -> str:
        """Return a result as text, cut. One that ends the episode still does."""
        text = self.limit.cut(text_of(result))
        return FinalResult(text) if isinstance(result, FinalResult) else text

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Whatever is raised becomes a ToolError with a text for the policy, cut like a result; not an outage."""
        try:
            yield
        except ToolOutage:
            raise
        except (Exception, SystemExit) as error:
            words = error.words if isinstance(error, ToolError) else described(error)
            raise ToolError(self.limit.cut(words)) from error

    def message(self, call: ToolCall, content: str) -> Message:
        return {"role": "tool", "name": call.name if call.name in self.tools else "unknown", "content": content}


def named(tools: list[Tool]) -> dict[str, Tool]:
    by_name: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in by_name:
            raise ValueError(f"two tools are called {tool.name!r}, so a call could mean either; rename one of them")
        by_name[tool.name] = tool
    return by_name


def shared(function: Any) -> Any:
    """Return the function in the class, which methods of several instances share; any other function as it is."""
    return getattr(function, "__func__", function)


async def awaited(result: Any) -> Any:
    return await result
