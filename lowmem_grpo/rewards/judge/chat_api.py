"""The official client for OpenAI-compatible servers; only this file imports it. `pip install lowmem-grpo[judge]`."""

import inspect
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lowmem_grpo.rewards.judge.judge import unanswered
from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.runs.findings import Finding

if TYPE_CHECKING:
    from openai import AsyncOpenAI

SHORTEST = 8  # characters; a shorter key ("local", "EMPTY") is no secret, and stands in ordinary words
SHOWN = 300  # characters of what a server or its connection says
PLACE = "[hidden]"
MOST_TOKENS = 1 << 32  # that a server may say one request took
VISIBLE = re.compile(r"[!-~]+")  # what a key consists of
WRONG_URL = ("the client cannot use the judge's URL, of base_url or OPENAI_BASE_URL; it must be like "
             "https://api.example.com/v1")
STATUSES = {  # an answer's: a short name, what the server does, and what to do about it
    401: ("key", "does not take the API key", "give the right api_key"),
    403: ("key", "does not let this key use {model}", "give another api_key or model"),
    404: ("model", "knows no model {model!r}, or has no chat completions there",
          "check the server's list of models (/v1/models), and that base_url ends as the server asks"),
    429: ("limit", "takes no more requests for now",
          "lower concurrency, raise retries and deadline, or check the limits of the account"),
    400: ("request", "answered with an error",
          "check that the server accepts this model, these options and prompts of this length"),
    500: ("server", "answered with an error", "look at the server's log"),
}


@dataclass(frozen=True)
class JudgeReply:
    """A server's answer."""

    text: str
    cut: bool = False  # at the limit of tokens
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0  # failed requests before this one
    is_chat: bool = True  # False: it is not the answer of a chat API


@dataclass(frozen=True)
class Failure:
    """The error that takes the place of an answer."""

    trouble: Finding
    retries: int = 0


def make_client(base_url: str | None, api_key: str | None, timeout: float, retries: int) -> "AsyncOpenAI":
    """A client that waits `timeout` seconds for a request. After 408, 409, 429, 5xx, a time-out or a lost connection it
    repeats the request up to `retries` times, 0.5 to 8 s later or when the server says. Raises ImportError if it is not
    installed, and ValueError if it has no key, or one that no request can hold, or if the URL is none."""
    try:
        from openai import AsyncOpenAI, OpenAIError

        from lowmem_grpo.rewards.judge.limited_client import LimitedClient
    except ImportError as error:
        raise ImportError("a judge at a URL needs the package openai: pip install openai") from error
    try:
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout, max_retries=retries,
                             http_client=LimitedClient(timeout))
    except OpenAIError as error:
        raise ValueError(f"the judge has no API key ({error}). Give api_key=..., or set OPENAI_API_KEY; a server of "
                         'your own takes any text, api_key="local"') from error
    except Exception as error:  # the client's library has one of its own, and its words may hold a password
        raise ValueError(WRONG_URL) from error
    if not VISIBLE.fullmatch(client.api_key):  # which the message must not show
        raise ValueError("the API key has a space, a line break or a letter that is not ASCII, which no request can "
                         "hold; copy it again, without what stands around it")
    if not is_address(str(client.base_url)):
        raise ValueError(WRONG_URL)
    return client


def unknown_options(client: "AsyncOpenAI", options: dict[str, Any]) -> list[str]:
    """Return the names among `options` that a request does not know, or whose values JSON cannot hold."""
    known = inspect.signature(client.chat.completions.create).parameters
    return sorted(name for name, value in options.items() if name not in known or not is_json(value))


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


async def ask(
    client: "AsyncOpenAI", model: str, question: Question, fault: str | None, options: dict[str, Any]
) -> JudgeReply | Failure:
    create: Any = client.chat.completions.with_raw_response.create
    secrets = secrets_of(client, options)
    try:
        raw = await create(model=model, messages=question.messages(fault), **options)
        answer = raw.parse()
    except Exception as error:  # noqa: BLE001, what a server sends can raise any in the client and below it
        return failure_of(error, model, client, secrets)
    return reply_of(answer, raw.retries_taken, secrets)


def reply_of(answer: Any, retries: int, secrets: list[str]) -> JudgeReply:
    """Return the reply in the client's object; a server may have left out any part of it."""
    try:
        choice = answer.choices[0]
        said, cut, is_chat = choice.message.content, choice.finish_reason == "length", True
    except (AttributeError, TypeError, IndexError, KeyError):
        said, cut, is_chat = "", False, False
    text = hidden(said, secrets) if isinstance(said, str) else ""
    usage = getattr(answer, "usage", None)
    prompt, completion = (count_of(usage, f"{name}_tokens") for name in ("prompt", "completion"))
    return JudgeReply(text, cut, prompt, completion, retries, is_chat)


def count_of(usage: Any, name: str) -> int:
    count = getattr(usage, name, None)
    return count if type(count) is int and 0 < count < MOST_TOKENS else 0


def failure_of(error: Exception, model: str, client: "AsyncOpenAI", secrets: list[str]) -> Failure:
    request = getattr(error, "request", None)
    taken = request.headers.get("x-stainless-retry-count", "0") if request is not None else "0"
    trouble = trouble_of(error, model, address(client.base_url), client.timeout, secrets)
    return Failure(trouble, int(taken) if taken.isdigit() else 0)


def trouble_of(error: Exception, model: str, url: str, timeout: Any, secrets: list[str]) -> Finding:
    from openai import APIConnectionError, APITimeoutError

    from lowmem_grpo.rewards.judge.limited_client import ReplyTooLargeError

    if isinstance(large := error.__cause__ or error, ReplyTooLargeError):
        return unanswered("large", f"{url} says too much: {large}",
                          "lower max_tokens in options, without logprobs, or look at what the server sends")
    if isinstance(error, APITimeoutError):
        return unanswered("slow", f"{url} did not answer within {timeout:g} s",
                       "raise timeout, lower concurrency, or take a faster model")
    if isinstance(error, APIConnectionError):
        return unanswered("down", f"{url} cannot be reached ({plain(error.__cause__ or error, secrets)})",
                       "check that the server is up and that base_url is right (it usually ends in /v1)")
    status = getattr(error, "status_code", None) or 500
    kind, what, fix = STATUSES.get(status) or STATUSES[400 if status < 500 else 500]
    return unanswered(kind, f"{url} {what.format(model=model)} ({plain(error, secrets)})", fix)


# What a message about a judge never shows: its key, a password in its URL, characters that a terminal obeys


def secrets_of(client: Any, options: dict[str, Any]) -> list[str]:
    """Return what the client and the extra headers of a request hold that only the server may know."""
    headers = options.get("extra_headers")
    secrets = [client.api_key, client.base_url.password, *(headers.values() if isinstance(headers, dict) else ())]
    return [text for text in secrets if isinstance(text, str) and len(text) >= SHORTEST]


def hidden(text: str, secrets: Iterable[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, PLACE)
    return text


def plain(said: object, secrets: Iterable[str]) -> str:
    """Return one line of at most SHOWN characters that can be printed, without the secrets."""
    text = " ".join(hidden(str(said), secrets).split())[:SHOWN]
    return "".join(char if char.isprintable() else "?" for char in text)


def address(url: Any) -> str:
    return str(url.copy_with(username="", password="", query=None)).rstrip("/")


def is_address(url: str) -> bool:
    """Return whether it is the URL of a server: http or https, a host, and a port that there can be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
