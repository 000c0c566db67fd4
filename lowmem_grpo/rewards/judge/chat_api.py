"""The official client for OpenAI-compatible servers: the one file that imports it. `pip install lowmem-grpo[judge]`."""

import inspect
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lowmem_grpo.rewards.judge.judge import unanswered
from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.runs.findings import Finding

if TYPE_CHECKING:
    from openai import AsyncOpenAI

FORMS = ("json_schema", "json_object", "text")  # of structured output, the strictest first
REFUSED = (400, 422)  # the status of a request that a server does not take


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    text: str
    cut: bool = False  # at the limit of tokens
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0  # requests before the one that succeeded
    is_chat: bool = True  # False: it is no answer of a chat API


@dataclass(frozen=True)
class Failure:
    """What there is in place of an answer."""

    trouble: Finding
    retries: int = 0
    refused: bool = False  # the server understood the request and does not take it


def make_client(base_url: str | None, api_key: str | None, timeout: float, retries: int) -> "AsyncOpenAI":
    """A client; it waits `timeout` seconds for a request, and repeats it `retries` times after 408, 409, 429, 5xx, a
    time-out or a lost connection, 0.5 to 8 s later or when the server says.

    Raises ImportError where it is not installed, ValueError where it has no key.
    """
    try:
        from openai import AsyncOpenAI, OpenAIError
    except ImportError as error:
        raise ImportError("a judge at a URL needs the package openai: pip install openai") from error
    try:
        return AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout, max_retries=retries)
    except OpenAIError as error:
        raise ValueError(
            f"the judge has no API key ({error}). Give api_key=..., or set OPENAI_API_KEY; a server of your own takes "
            'any text, api_key="local"'
        ) from error


def unknown_options(client: "AsyncOpenAI", options: dict[str, Any]) -> list[str]:
    """Names among `options` that a request does not have, or whose values JSON does not have."""
    known = inspect.signature(client.chat.completions.create).parameters
    return sorted(name for name, value in options.items() if name not in known or not is_json(value))


def is_json(value: Any) -> bool:
    """Whether a request can carry it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


async def ask(
    client: "AsyncOpenAI", model: str, question: Question, fault: str | None, form: str, options: dict[str, Any]
) -> Reply | Failure:
    """One chat completion."""
    from openai import OpenAIError

    shape = {} if form == "text" else {"response_format": response_format(question, form)}
    create: Any = client.chat.completions.with_raw_response.create
    try:
        raw = await create(model=model, messages=question.messages(fault), **shape, **options)
        return reply_of(raw.parse(), raw.retries_taken)
    except (OpenAIError, ValueError, RecursionError) as error:  # a body that claims to be JSON and is not, or is deep
        return failure_of(error, model, str(client.base_url), client.timeout)


def response_format(question: Question, form: str) -> dict[str, Any]:
    """What the request says of the reply's form: any JSON, or the question's own schema."""
    if form == "json_object":
        return {"type": form}
    return {"type": form, "json_schema": {"name": "scores", "strict": True, "schema": question.schema}}


def reply_of(answer: Any, retries: int) -> Reply:
    """From the client's object, of which a server may have left out anything."""
    usage = getattr(answer, "usage", None)
    given, taken = (count_of(getattr(usage, name, None)) for name in ("prompt_tokens", "completion_tokens"))
    try:
        choice = answer.choices[0]
        text, cut = choice.message.content, choice.finish_reason == "length"
    except (AttributeError, TypeError, IndexError, KeyError):
        return Reply("", False, given, taken, retries, is_chat=False)
    return Reply(text if isinstance(text, str) else "", cut, given, taken, retries)


def count_of(value: Any) -> int:
    """A count of tokens as a server gave it; 0 where it gave none, or something else."""
    return value if isinstance(value, int) and value > 0 else 0


def failure_of(error: Exception, model: str, url: str, timeout: Any) -> Failure:
    """What failed, in words."""
    request = getattr(error, "request", None)
    taken = request.headers.get("x-stainless-retry-count", "0") if request is not None else "0"
    status = getattr(error, "status_code", None)
    return Failure(trouble_of(error, model, url, timeout), int(taken) if taken.isdigit() else 0, status in REFUSED)


def trouble_of(error: Exception, model: str, url: str, timeout: Any) -> Finding:
    """The trouble behind an error of the client."""
    from openai import APIConnectionError, APITimeoutError

    if isinstance(error, APITimeoutError):
        return unanswered("slow", f"{url} did not answer within {timeout:g} s",
                       "raise timeout, lower concurrency, or take a faster model")
    if isinstance(error, APIConnectionError):
        return unanswered("down", f"{url} cannot be reached ({error.__cause__ or error})",
                       "see that the server runs and that base_url is right (it mostly ends in /v1)")
    status, said = getattr(error, "status_code", None), " ".join(str(error).split())[:300]
    return {
        401: unanswered("key", f"{url} does not take the API key ({said})", "give the right api_key"),
        403: unanswered("key", f"{url} does not let this key use {model} ({said})", "give another api_key or model"),
        404: unanswered("model", f"{url} knows no model {model!r}, or has no chat completions there ({said})",
                     "see the server's list of models (/v1/models), and that base_url ends as the server asks"),
        429: unanswered("limit", f"{url} takes no more requests for now ({said})",
                     "lower concurrency, raise retries and deadline, or see to the account's limits"),
    }.get(status or 0) or unanswered(
        "server" if status is None or status >= 500 else "request", f"{url} answered with an error ({said})",
        "see the server's log" if status is None or status >= 500 else "see that model, options and prompt length are "
        "what the server takes",
    )
