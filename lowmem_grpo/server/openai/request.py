"""`ChatRequest` and `TextRequest`: the checked bodies of completion requests, with messages in a plain form."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from lowmem_grpo.config.sampling import FORMAT, PENALTY
from lowmem_grpo.config.unsupported import Table, only
from lowmem_grpo.data.prompt_inputs import plain_message, with_object
from lowmem_grpo.server.requests import Body, ChatError, shown, words_of
from lowmem_grpo.types import Message
from lowmem_grpo.utils import JsonError, check_json

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KEPT = ("name", "reasoning_content", "thinking")  # text fields that a chat template may read
OWN = ("role", "content", "tool_calls", "tool_call_id", "turn")
EMPTY: tuple[Any, ...] = (None, [], {}, "")  # values of fields that are unset, as in replies
MOST_COMPLETIONS, MOST_TEXTS = 128, 4096
MOST_STOPS, MOST_STOP = 64, 1024  # each is searched for after each token of all who are decoded together
DRAWN = {"temperature", "top_p", "top_k", "min_p", "stop"}
OF_THE_CALLER = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")  # ignored
REFUSED: Table = {
    **only(PENALTY, presence_penalty=(None, 0), frequency_penalty=(None, 0), repetition_penalty=(None, 1)),
    **only(FORMAT, logit_bias=(None, {}), guided_json=None, guided_regex=None, guided_choice=None,
           structured_outputs=None, response_format=(None, {"type": "text"})),
    **only("The model is not forced to call a tool; reward the call instead.", tool_choice=(None, "none", "auto")),
    **only("Use tools and tool_choice.", functions=(None, []), function_call=None),
    **only("Only text is made here; leave it out.", audio=None, modalities=(None, ["text"])),
    **only("The model has one way of thinking; say more with chat_template_kwargs.", reasoning_effort=None,
           verbosity=None),
    **only("Put what should be searched into a tool.", web_search_options=None),
    **only("Nothing is predicted beforehand; leave it out.", prediction=None),
    **only("There is one service; leave it out.", service_tier=(None, "auto", "default")),
    **only("Nothing is moderated; leave it out.", moderation=None),
    **only("What was computed of a conversation is always kept while memory allows; leave it out.",
           prompt_cache_options=None, prompt_cache_retention=None),
    **only("The answer continues a last message of the assistant, and else begins a turn; leave it out.",
           add_generation_prompt=(None, True), continue_final_message=(None, False), echo=(None, False)),
    **only("Every end token ends a completion; leave it out.", min_tokens=(None, 0)),
}
REFUSED_OF_CHAT: Table = {
    **REFUSED,
    **only("A chat's prompt has none; ask /v1/completions with the prompt's token ids.", prompt_logprobs=None),
}
REFUSED_OF_TEXT: Table = {
    **REFUSED,
    **only("A reply has the completion only; put the prompt before it yourself.", echo=(None, False)),
    **only("Every completion is told; ask for n, and choose among them.", best_of=(None, 1)),
    **only("The model continues a text, and does not fill gaps.", suffix=(None, "")),
}
CODES = {"extra_forbidden": "unknown_parameter", "missing": None}  # by pydantic's error type
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # if a tool has none
Count = Annotated[int, Field(ge=1)]
Likeliest = Annotated[int, Field(ge=0, le=20)]
PromptLikeliest = Annotated[int, Field(ge=0, le=128)]


def plain(messages: Any) -> list[Message]:
    """Return a request's messages in the plain form for chat templates: content as text, arguments as objects, tool
    results in the order of the calls and with their tools' names. ChatError for invalid messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ChatError(400, f"messages is {shown(messages)}; it must be a list of at least one message such as "
                        "{'role': 'user', 'content': 'Hello'}", "messages")
    checked = [message_of(plain_message(message), f"messages[{at}]") for at, message in enumerate(messages)]
    return list(in_order(checked))


def message_of(message: Any, place: str) -> Message:
    """Return a checked message with the role that chat templates know. ChatError (400), which names the `place` as
    OpenAI does, for another role or content."""
    if not isinstance(message, Mapping) or message.get("role") not in [*ROLES]:
        role = message.get("role") if isinstance(message, Mapping) else message
        raise ChatError(400, f"{place}.role is {shown(role)}; allowed are {', '.join(ROLES)}", f"{place}.role")
    role = ROLES[message["role"]]
    calls = calls_of(message.get("tool_calls") or [], f"{place}.tool_calls")
    if calls and role != "assistant":
        raise ChatError(400, f"{place} is of the role {role} and has tool_calls; only the assistant calls tools",
                        f"{place}.tool_calls")
    if other := [key for key, value in message.items() if key not in (*OWN, *KEPT) and value not in EMPTY]:
        raise ChatError(400, f"{place} has {other[0]}, which is not supported; leave it out. A message has role, "
                        "content, tool_calls, tool_call_id and name", f"{place}.{other[0]}")
    unsaid = role == "assistant" and message.get("content") is None
    content = text_of("" if unsaid else message.get("content"), f"{place}.content")
    kept = {key: str(message[key]) for key in KEPT if message.get(key)}
    answers = {"tool_call_id": str(message["tool_call_id"])} if role == "tool" and message.get("tool_call_id") else {}
    return {"role": role, **kept, "content": content, **({"tool_calls": calls} if calls else {}), **answers}


def text_of(content: Any, place: str) -> str:
    """Return the text of a message's content: a string, or a list of text parts to join."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatError(400, f"{place} is {shown(content)}; it must be a text or a list of parts of the type text",
                        place)
    for at, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatError(400, f"{place}[{at}] is a part of the type {shown(kind)}; only text is supported, as in "
                            "{'type': 'text', 'text': 'Hello'}", f"{place}[{at}].type")
    return "".join(part["text"] for part in content)


def calls_of(tool_calls: Any, place: str) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant message, with arguments parsed to objects if they are valid JSON."""
    calls = []
    for at, call in enumerate(tool_calls if isinstance(tool_calls, Sequence) else [tool_calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatError(400, f"{place}[{at}] is {shown(call)}; it must be {{'id': ..., 'type': 'function', "
                            "'function': {'name': ..., 'arguments': '{...}'}}", f"{place}[{at}]")
        arguments = arguments_of(function.get("arguments"), f"{place}[{at}].function.arguments")
        calls.append({"id": str(call.get("id") or ""), "type": "function", "function": {
            "name": function["name"], "arguments": arguments}})
    return calls


def arguments_of(arguments: Any, place: str) -> Any:
    """Return the arguments of a call, as an object if they are its text. ChatError for what no template can render."""
    try:
        value = with_object({"arguments": arguments})["arguments"]
        check_json(value, nul=True)
        return value
    except JsonError as error:
        raise ChatError(400, f"{place}: {error}", place) from None


def in_order(messages: list[Message]) -> Iterator[Message]:
    """Yield messages without call ids: tool results are in the order of the calls, with their tools' names."""
    names: dict[str, tuple[int, str]] = {}  # place and tool of the last message's calls, by call id
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            placed = [(*names.get(result.get("tool_call_id", ""), (len(names), result.get("name"))), result)
                      for result in group]
            for _, name, result in sorted(placed, key=itemgetter(0)):
                rest = {key: value for key, value in result.items() if key not in ("role", "tool_call_id", "name")}
                yield {"role": "tool", **({"name": name} if name else {}), **rest}
            continue
        for message in group:
            calls = message.get("tool_calls") or []
            names = {call["id"]: (place, call["function"]["name"]) for place, call in enumerate(calls)}
            unnumbered = [{key: call[key] for key in ("type", "function")} for call in calls]
            yield message | ({"tool_calls": unnumbered} if calls else {})


def stop_of(stop: Any) -> Any:
    texts = [stop] if isinstance(stop, str) else stop
    if (not texts or not isinstance(texts, list) or len(texts) > MOST_STOPS
            or not all(isinstance(text, str) and 0 < len(text) <= MOST_STOP for text in texts)):
        raise ValueError(f"is {shown(stop)}; it must be a text that is not empty, of at most {MOST_STOP} characters, "
                         f"or a list of at most {MOST_STOPS} of these")
    return stop


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    if other := sorted(set(options) - {"include_usage", "include_obfuscation"}):
        raise ValueError(f"has {other[0]}; include_usage is what is known here")
    return options


class CompletionRequest(Body, extra="forbid"):
    """The fields of every completion request. Sampling defaults are those of training."""

    field: ClassVar[str]  # name of the field with the prompt
    refused: ClassVar[Table]
    model: str
    n: Annotated[int, Field(ge=1, le=MOST_COMPLETIONS)] = 1  # completions of each prompt
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: Annotated[Any, AfterValidator(stop_of)] = None
    seed: int | None = None
    stream: bool = False
    stream_options: Annotated[dict[str, Any], AfterValidator(checked_options)] = {}
    return_token_ids: bool = False
    prompt_logprobs: PromptLikeliest | None = None  # how many likeliest tokens to report at each place of the prompt

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Parse a body. ChatError for a field that is unknown, missing, unsupported or out of range."""
        if not isinstance(body, Mapping):
            raise ChatError(400, f"the body is {shown(body)}; it must be a JSON object with model and {cls.field}")
        fields = {name: value for name, value in body.items() if value is not None and name not in OF_THE_CALLER}
        for name in fields.keys() & cls.refused.keys():
            fixed, value = cls.refused[name], fields[name] if name in cls.model_fields else fields.pop(name)
            if value not in fixed.values or isinstance(value, bool) != isinstance(fixed.values[-1], bool):
                raise ChatError(400, f"{name} is {shown(value)}, which is not supported. {fixed.advice}", name,
                                "unsupported_parameter")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise ChatError(400, words_of(error, cls), str(first["loc"][0]),
                            CODES.get(first["type"], "invalid_value")) from None

    @model_validator(mode="after")
    def check_together(self) -> Self:
        """Raise ChatError for fields that contradict each other."""
        if self.stream_options and not self.stream:
            raise ChatError(400, "stream_options is given without stream; set stream to true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise ChatError(400, "prompt_logprobs comes with a whole reply only; leave stream out", "prompt_logprobs")
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        return self.model_dump(include=DRAWN, exclude_unset=True)

    @property
    def bound(self) -> int | None:
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """The number of likeliest tokens to report at each position; None without log-probabilities."""
        raise NotImplementedError


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    """Return the checked tools of a chat, in OpenAI's form; None for none. ChatError (400) for the first other one."""
    for at, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and function["name"]
                and isinstance(function.get("parameters") or {}, Mapping)):
            raise ChatError(400, f"tools[{at}] is {shown(tool)}; it must be {{'type': 'function', 'function': "
                            "{'name': ..., 'description': ..., 'parameters': {...}}}", f"tools[{at}]")
    names = Counter(tool["function"]["name"] for tool in tools or [])
    if twice := [name for name, count in names.items() if count > 1]:
        raise ChatError(400, f"two tools are called {twice[0]!r}, so a call could mean either; rename one of them",
                        "tools")
    return [{"type": "function", "function": {**tool["function"], "parameters": tool["function"].get("parameters")
                                              or NO_PARAMETERS}} for tool in tools] if tools else None


class ChatRequest(CompletionRequest):
    field, refused = "messages", REFUSED_OF_CHAT
    messages: Annotated[list[Any], AfterValidator(plain)]
    tools: Annotated[list[Any] | None, AfterValidator(tools_of)] = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True  # return all calls of a completion, not only the first
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Likeliest = 0
    chat_template_kwargs: dict[str, Any] = {}  # checked where the template is known

    @model_validator(mode="after")
    def check_names(self) -> Self:
        """Raise ChatError if max_tokens contradicts its newer name, or top_logprobs lacks logprobs."""
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise ChatError(400, f"max_tokens is {old} and max_completion_tokens is {new}, which mean the same; give "
                            "one of them", "max_tokens", "invalid_value")
        if self.top_logprobs and not self.logprobs:
            raise ChatError(400, f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs to true",
                            "top_logprobs")
        return self

    @property
    def bound(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """Return the prompts as a list, each a text or token ids. ChatError for anything else."""
    prompts = [prompt] if isinstance(prompt, str) or (prompt and is_ids(prompt)) else prompt
    parts = {f"prompt[{at}]": part for at, part in enumerate(prompts)} if isinstance(prompts, list) else {}
    for place, part in (parts or {"prompt": prompt}).items():
        if not parts or not (isinstance(part, str) or is_ids(part)):
            raise ChatError(400, f"{place} is {shown(part)}; a prompt is a text or a list of token ids, and several "
                                 "are a list of these", "prompt", "invalid_value")
    return list(prompts)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


class TextRequest(CompletionRequest):
    """A request for completions of plain prompts, each a text or token ids."""

    field, refused = "prompt", REFUSED_OF_TEXT
    prompt: Annotated[Any, AfterValidator(prompts_of)]
    max_tokens: Count | None = 16  # OpenAI's default
    logprobs: Likeliest | None = None

    @model_validator(mode="after")
    def check_count(self) -> Self:
        """Raise ChatError if the request asks for more than MOST_TEXTS completions."""
        if (count := len(self.prompt) * self.n) > MOST_TEXTS:
            raise ChatError(400, f"{len(self.prompt)} prompts with n={self.n} ask for {count} completions; at most "
                                 f"{MOST_TEXTS} are made for a request", "prompt", "invalid_value")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.logprobs
