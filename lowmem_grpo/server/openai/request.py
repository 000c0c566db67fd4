"""`ChatRequest` and `TextRequest`: the checked bodies of completion requests."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from lowmem_grpo.config.sampling import FORMAT, PENALTY
from lowmem_grpo.config.unsupported import Table, only
from lowmem_grpo.server.openai.messages import plain
from lowmem_grpo.server.requests import Body, ChatError, shown, words_of

MOST_COMPLETIONS, MOST_TEXTS = 128, 4096
TEMPLATES_OWN = ("tools", "messages", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
                 "return_tensors", "padding", "truncation", "max_length", "documents")
DRAWN = {"temperature", "top_p", "top_k", "min_p", "stop"}
NO_SOUND = "Only text is made here; leave it out."
OF_THE_CALLER = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")  # ignored
REFUSED: Table = {
    **only(PENALTY, presence_penalty=(None, 0), frequency_penalty=(None, 0), repetition_penalty=(None, 1)),
    **only(FORMAT, logit_bias=(None, {}), guided_json=None, guided_regex=None, guided_choice=None,
           structured_outputs=None, response_format=(None, {"type": "text"})),
    **only("The model is not forced to call a tool; reward the call instead.", tool_choice=(None, "none", "auto")),
    **only("Use tools and tool_choice.", functions=(None, []), function_call=None),
    **only(NO_SOUND, audio=None, modalities=(None, ["text"])),
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
    **only("Log-probabilities of the prompt are not computed.", prompt_logprobs=None),
}
REFUSED_OF_TEXT: Table = {
    **REFUSED,
    **only("A reply has the completion only; put the prompt before it yourself.", echo=(None, False)),
    **only("Every completion is told; ask for n, and choose among them.", best_of=(None, 1)),
    **only("The model continues a text, and does not fill gaps.", suffix=(None, "")),
}
CODES = {"extra_forbidden": "unknown_parameter", "missing": None}  # by pydantic's error type
Count = Annotated[int, Field(ge=1)]
Likeliest = Annotated[int, Field(ge=0, le=20)]


def stop_of(stop: Any) -> Any:
    texts = [stop] if isinstance(stop, str) else stop
    if not texts or not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"is {shown(stop)}; it must be a text that is not empty, or a list of these")
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
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        return self.model_dump(include=DRAWN, exclude_unset=True)

    @property
    def bound(self) -> int | None:
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """The number of likely tokens reported beside each sampled one; None without log-probabilities."""
        raise NotImplementedError


def tools_of(tools: Any) -> list[dict[str, Any]] | None:
    for at, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ChatError(400, f"tools[{at}] is {shown(tool)}; it must be {{'type': 'function', 'function': "
                            "{'name': ..., 'description': ..., 'parameters': {...}}}", f"tools[{at}]")
    names = [tool["function"]["name"] for tool in tools or []]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ChatError(400, f"two tools are called {twice[0]!r}, so a call could mean either; rename one of them",
                        "tools")
    return [{"type": "function", "function": dict(tool["function"])} for tool in tools] if tools else None


def template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    if own := sorted(set(kwargs) & set(TEMPLATES_OWN)):
        raise ChatError(400, f"chat_template_kwargs has {own[0]}, which is not the template's to choose; leave it out",
                        "chat_template_kwargs")
    return kwargs


class ChatRequest(CompletionRequest):
    """A request for the next message of a chat."""

    field, refused = "messages", REFUSED
    messages: Annotated[list[Any], AfterValidator(plain)]
    tools: Annotated[list[Any] | None, AfterValidator(tools_of)] = None
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True  # return all calls of a completion, not only the first
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Likeliest = 0
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(template_kwargs)] = {}

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
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt and is_ids(prompt):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise wrong("prompt", prompt)
    for place, part in enumerate(prompt):
        if not isinstance(part, str) and not is_ids(part):
            raise wrong(f"prompt[{place}]", part)
    return prompt


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def wrong(place: str, value: Any) -> ChatError:
    return ChatError(400, f"{place} is {shown(value)}; a prompt is a text or a list of token ids, and several are a "
                          "list of these", "prompt", "invalid_value")


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
