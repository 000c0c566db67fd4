"""`ChatRequest`: the body of a request for a chat completion, read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.service.errors import ChatError
from lowmem_grpo.service.fields import check
from lowmem_grpo.service.messages import plain, shown, turn_named
from lowmem_grpo.types import Message

TEMPLATES_OWN = ("tools", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
                 "return_tensors", "padding", "truncation", "max_length", "documents")


@dataclass(frozen=True)
class ChatRequest:
    """What is asked for, in plain form."""

    model: str
    messages: list[Message]
    turn: str  # that the last answer says it is of
    tools: list[dict[str, Any]] | None
    reads_calls: bool  # tool_choice is not "none"
    parallel: bool  # all calls of a completion are told, not only the first
    n: int
    max_tokens: int | None
    seed: int | None
    sampling: dict[str, Any]  # temperature, top_p, top_k, min_p, stop
    top_logprobs: int | None  # None: no log-probabilities
    stream: bool
    stream_usage: bool
    token_ids: bool
    template_kwargs: dict[str, Any]

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "ChatRequest":
        """Read a body. ChatError for a field that is unknown, not supported or not within its range."""
        if not isinstance(body, Mapping):
            raise ChatError(400, f"the body is {shown(body)}; it must be a JSON object with model and messages")
        given = {name: value for name, value in body.items() if value is not None}
        for name, value in given.items():
            check(name, value)
        for name in ("model", "messages"):
            if name not in given:
                raise ChatError(400, f"{name} is missing; a request has model and messages", name)
        messages, tools = plain(given["messages"]), tools_of(given.get("tools"))
        return cls(
            model=given["model"], messages=messages, turn=turn_named(given["messages"]), tools=tools,
            reads_calls=given.get("tool_choice") != "none", parallel=given.get("parallel_tool_calls", True),
            n=given.get("n", 1), max_tokens=most_tokens(given), seed=given.get("seed"), sampling=sampling_of(given),
            top_logprobs=likeliest_of(given), stream=given.get("stream", False),
            stream_usage=stream_usage(given), token_ids=given.get("return_token_ids", False),
            template_kwargs=template_kwargs(given.get("chat_template_kwargs", {})),
        )


def tools_of(given: Any) -> list[dict[str, Any]] | None:
    """The tools in OpenAI's form."""
    for at, tool in enumerate(given or []):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ChatError(400, f"tools[{at}] is {shown(tool)}; it must be {{'type': 'function', 'function': "
                            "{'name': ..., 'description': ..., 'parameters': {...}}}", f"tools[{at}]")
    names = [tool["function"]["name"] for tool in given or []]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ChatError(400, f"two tools are called {twice[0]!r}, so a call could mean either; rename one of them",
                        "tools")
    return [{"type": "function", "function": dict(tool["function"])} for tool in given] if given else None


def most_tokens(given: Mapping[str, Any]) -> int | None:
    """The bound on a completion, by either name."""
    old, new = given.get("max_tokens"), given.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise ChatError(400, f"max_tokens is {old} and max_completion_tokens is {new}, which mean the same; give one "
                        "of them", "max_tokens", "invalid_value")
    return old if new is None else new


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """How tokens are drawn; what the request leaves out is drawn as in training."""
    return {name: given[name] for name in ("temperature", "top_p", "top_k", "min_p", "stop") if name in given}


def likeliest_of(given: Mapping[str, Any]) -> int | None:
    """How many likely tokens are told beside each drawn one; None without log-probabilities."""
    count: int = given.get("top_logprobs", 0)
    if count and not given.get("logprobs"):
        raise ChatError(400, f"top_logprobs is {count} without logprobs; set logprobs to true", "top_logprobs")
    return count if given.get("logprobs") else None


def stream_usage(given: Mapping[str, Any]) -> bool:
    """Whether the last chunk of a stream counts the tokens."""
    options = given.get("stream_options", {})
    if options and not given.get("stream"):
        raise ChatError(400, "stream_options is given without stream; set stream to true", "stream_options")
    if other := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        raise ChatError(400, f"stream_options has {other[0]}; include_usage is what is known here", "stream_options")
    return bool(options.get("include_usage"))


def template_kwargs(given: dict[str, Any]) -> dict[str, Any]:
    """Options of the chat template."""
    if own := sorted(set(given) & set(TEMPLATES_OWN)):
        raise ChatError(400, f"chat_template_kwargs has {own[0]}, which is not the template's to choose; leave it out",
                        "chat_template_kwargs")
    return given
