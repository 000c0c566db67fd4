"""Judge requests through OpenAI's client, which only this file imports: `pip install lowmem-grpo[judge]`.

No message about a judge shows its key, a password in its URL, or terminal control characters.
"""

import asyncio
import inspect
import json
import re
from importlib import import_module
from typing import Any

from openai import APIConnectionError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from lowmem_grpo.rewards.judge.judge import Meter, UnansweredError, is_address, unanswered
from lowmem_grpo.rewards.judge.question import BadReplyError, Question, Ratings, shown
from lowmem_grpo.runs.findings import Finding

REPLY_BYTES = 4 << 20  # one response; long thinking with its scores takes a tenth of that
REDIRECTS = 5
SHORTEST = 8  # characters of a secret; a shorter key ("local", "EMPTY") is none, and occurs in ordinary words
SHOWN = 300  # characters of a server's or connection's error that are shown
PLACE = "[hidden]"
MOST_TOKENS = 1 << 32  # a larger count in a server's usage report is ignored
VISIBLE = re.compile(r"[!-~]+")  # the characters of a key
WRONG_URL = ("the client cannot use the judge's URL, of base_url or OPENAI_BASE_URL; it must be like "
             "https://api.example.com/v1")
STATUSES = {  # by HTTP status: kind of trouble, the server's behaviour, the fix
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


class ChatClient:
    """Sends questions to a server's model, each in its own request with the same options."""

    def __init__(self, base_url: str | None, api_key: str | None, timeout: float, retries: int, model: str,
                 options: dict[str, Any]) -> None:
        """`timeout` is in seconds, for one request. After 408, 409, 429, 5xx, a time-out or a lost connection it is
        repeated up to `retries` times, 0.5 to 8 s later or when the server says. ValueError for a missing key, a key
        that an HTTP header cannot hold, an invalid URL, or an option that the API does not know or JSON cannot hold."""
        self.model, self.options = model, options
        try:
            self.api = AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout, max_retries=retries,
                                   http_client=LimitedClient(timeout))
        except OpenAIError as error:
            raise ValueError(f"the judge has no API key ({error}). Give api_key=..., or set OPENAI_API_KEY; a server "
                             'of your own takes any text, api_key="local"') from error
        except Exception as error:  # the HTTP library raises its own errors, and their text may hold a password
            raise ValueError(WRONG_URL) from error
        if not VISIBLE.fullmatch(self.api.api_key):  # the message must not show the key
            raise ValueError("the API key has a space, a line break or a letter that is not ASCII, which no request "
                             "can hold; copy it again, without what stands around it")
        if not is_address(str(self.api.base_url)):
            raise ValueError(WRONG_URL)
        known = inspect.signature(self.api.chat.completions.create).parameters
        if unknown := sorted(name for name, value in options.items() if name not in known or not is_json(value)):
            raise ValueError(f"options has {sorted(options)}; it must be what the client's create() takes, without "
                             f"{unknown}")
        headers = options.get("extra_headers")
        hidden = [self.api.api_key, self.api.base_url.password,
                  *(headers.values() if isinstance(headers, dict) else ())]
        self.secrets = [text for text in hidden if isinstance(text, str) and len(text) >= SHORTEST]

    async def ask(self, question: Question, fault: str | None, meter: Meter) -> Ratings:
        """Return the ratings in the reply to a question, and add its cost to `meter`; `fault` describes what was wrong
        with the previous reply. UnansweredError if there are none."""
        create: Any = self.api.chat.completions.with_raw_response.create
        try:
            raw = await create(model=self.model, messages=question.messages(fault), **self.options)
            answer = raw.parse()
        except Exception as error:  # a server's response can make the client raise anything
            request = getattr(error, "request", None)
            taken = request.headers.get("x-stainless-retry-count", "0") if request is not None else "0"
            meter.retried += int(taken) if taken.isdigit() else 0
            raise UnansweredError(self.trouble_of(error)) from error
        usage = getattr(answer, "usage", None)
        meter.add(Meter(retried=raw.retries_taken, prompt_tokens=count_of(usage, "prompt_tokens"),
                        completion_tokens=count_of(usage, "completion_tokens")))
        return [(score, self.hide(reason)) for score, reason in self.ratings_of(question, answer)]

    def ratings_of(self, question: Question, answer: Any) -> Ratings:
        """Return the ratings in the client's response object, any part of which a server may have left out."""
        try:
            choice = answer.choices[0]
            said, cut = choice.message.content, choice.finish_reason == "length"
        except (AttributeError, TypeError, IndexError, KeyError) as error:
            raise UnansweredError(unanswered(
                "api", "what the server answers is not a chat completion",
                "check that base_url is that of an OpenAI-compatible API (it usually ends in /v1)",
            ), "the server's answer is not a chat completion") from error
        text = self.hide(said) if isinstance(said, str) else ""
        if cut:
            raise UnansweredError(unanswered(
                "cut", f"a reply was cut off and is not read ({shown(text)})",
                'raise the limit: options={"max_tokens": ...}, higher for a model that thinks first',
            ), "it was cut off at the limit of tokens")
        try:
            return question.read(text)
        except BadReplyError as error:
            raise UnansweredError(unanswered(
                "babble", f"a reply has no scores that can be used: {error}",
                "take a model that follows instructions better, or a simpler rubric",
            ), error.fault) from error

    def trouble_of(self, error: Exception) -> Finding:
        """Return the finding for a request that failed with this error."""
        url = str(self.api.base_url.copy_with(username="", password="", query=None)).rstrip("/")
        if isinstance(large := error.__cause__ or error, ReplyTooLargeError):
            return unanswered("large", f"{url} says too much: {large}",
                              "lower max_tokens in options, without logprobs, or look at what the server sends")
        if isinstance(error, APITimeoutError):
            return unanswered("slow", f"{url} did not answer within {self.api.timeout:g} s",
                              "raise timeout, lower concurrency, or take a faster model")
        if isinstance(error, APIConnectionError):
            return unanswered("down", f"{url} cannot be reached ({self.plain(error.__cause__ or error)})",
                              "check that the server is up and that base_url is right (it usually ends in /v1)")
        status = getattr(error, "status_code", None) or 500
        kind, what, fix = STATUSES.get(status) or STATUSES[400 if status < 500 else 500]
        return unanswered(kind, f"{url} {what.format(model=self.model)} ({self.plain(error)})", fix)

    def hide(self, text: str) -> str:
        """Return the text with the secrets (key, password, headers) replaced."""
        for secret in self.secrets:
            text = text.replace(secret, PLACE)
        return text

    def plain(self, said: object) -> str:
        """Return one line of at most SHOWN printable characters, without the secrets."""
        text = " ".join(self.hide(str(said)).split())[:SHOWN]
        return "".join(char if char.isprintable() else "?" for char in text)


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def count_of(usage: Any, name: str) -> int:
    count = getattr(usage, name, None)
    return count if type(count) is int and 0 < count < MOST_TOKENS else 0


class ReplyTooLargeError(OpenAIError):
    """A response that is too large to read. As an OpenAIError, it is passed on by OpenAI's client without a retry."""


class LimitedClient(DefaultAsyncHttpxClient):
    """An HTTP client that reads each response up to REPLY_BYTES and for `seconds` in all. It requests and accepts only
    uncompressed responses, since decompression could make one a thousand times as large. Each response is read as
    UTF-8, because a server could also name a compression as its charset."""

    def __init__(self, seconds: float) -> None:
        super().__init__(headers={"Accept-Encoding": "identity"}, timeout=seconds)
        self.seconds = seconds

    async def send(self, request: Any, **options: Any) -> Any:
        """Return the response with its body. ReplyTooLargeError if the body is too large or compressed, and the HTTP
        library's ReadTimeout if it is not complete in time, even if parts of it keep coming."""
        try:
            async with asyncio.timeout(self.seconds):
                return await self.send_with_redirects(request, options | {"stream": True, "follow_redirects": False})
        except TimeoutError as error:
            library = import_module(type(request).__module__.partition(".")[0])  # httpx, or its successor
            raise library.ReadTimeout("the answer was not whole in time", request=request) from error

    async def send_with_redirects(self, request: Any, options: dict[str, Any]) -> Any:
        """Return the response after at most REDIRECTS redirects."""
        for _ in range(1 + REDIRECTS):
            response = await super().send(request, **options)
            try:
                body = await body_of(response)
            finally:
                await response.aclose()
            if response.next_request is None:
                break
            request = response.next_request
        headers = response.headers.copy()
        headers["Content-Type"] = headers.get("Content-Type", "").partition(";")[0]
        return type(response)(response.status_code, headers=headers, content=body, request=request,
                              extensions=response.extensions)


async def body_of(response: Any) -> bytes:
    """Return the whole body. ReplyTooLargeError as soon as it is too large, or if it is compressed."""
    packed = response.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise ReplyTooLargeError(f"its answer is packed ({packed[:20]}), though it was asked not to pack it")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > REPLY_BYTES:
            raise ReplyTooLargeError(f"its answer has more than {REPLY_BYTES} bytes")
    return bytes(body)
