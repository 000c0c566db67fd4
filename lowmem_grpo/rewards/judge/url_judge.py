"""A judge behind an OpenAI-compatible URL: concurrent questions, while other completions are still being sampled. Only
this file imports OpenAI's client: `pip install lowmem-grpo[judge]`.

No message about a judge shows its key, a password in its URL, or terminal control characters.
"""

import asyncio
import inspect
import json
import re
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from lowmem_grpo.rewards.judge.judge import Judge, Meter, Round
from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.rewards.judge.reply import BadReplyError, Ratings, Trouble, shown
from lowmem_grpo.utils import COUNT, POSITIVE, TEXT, at_least, require

try:
    from openai import APIConnectionError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
except ImportError as missing:
    raise ImportError("a judge at a URL needs the package openai: pip install openai") from missing

MARGIN_SECONDS = 5.0  # for the work of `rate` besides waiting
OURS = ("model", "messages", "stream", "n", "timeout")  # arguments that `options` must not set
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


class UrlJudge(Judge):
    """Judges with a model on a server that has OpenAI's chat completions API (OpenAI, vLLM, SGLang, llama.cpp, ...)."""

    def __init__(self, base_url: str | None, model: str, api_key: str | None = None, *, timeout: float = 60.0,
                 deadline: float = 120.0, retries: int = 2, concurrency: int = 16, cache_size: int = 10_000,
                 options: dict[str, Any] | None = None, **gone: Any) -> None:
        """None for `base_url` or `api_key` means the client's default (OpenAI's URL, OPENAI_API_KEY).

        timeout: seconds for one request. deadline: seconds for all questions of one call, with retries.
        retries: further requests after a transient error (408, 409, 429, 5xx, a time-out, a lost connection; 0.5 to 8 s
        later or when the server says), and after a reply without scores. concurrency: concurrent requests in the whole
        run. options: further arguments of each request, such as
        {"temperature": 0, "max_tokens": 2000, "reasoning_effort": "low", "response_format": {"type": "json_object"}}.

        ValueError for invalid settings, a missing key or one that no HTTP header can hold, an invalid URL, or an option
        that the API does not know or JSON cannot hold. Importing this class without the package openai: ImportError.
        """
        super().__init__(model, cache_size, **gone)
        where = str(base_url).rpartition("@")[2].partition("?")[0][:99]  # without a password
        require("base_url", where, ("an address that begins with http:// or https://, or None for OpenAI's own",
                                    lambda _: base_url is None or is_address(str(base_url))))
        for name, value, rule in (("model", model, TEXT), ("timeout", timeout, POSITIVE),
                                  ("deadline", deadline, POSITIVE), ("retries", retries, at_least(0)),
                                  ("concurrency", concurrency, COUNT)):
            require(name, value, rule)
        for name, setting, kind in (("api_key", api_key, str), ("options", options, dict)):  # values may be secret
            if not isinstance(setting, kind | None):
                raise ValueError(f"{name} is a {type(setting).__name__}; it must be a {kind.__name__}, or None")
        self.base_url, self.api_key, self.timeout = base_url, api_key, float(min(timeout, deadline))
        self.deadline, self.retries, self.concurrency = float(deadline), retries, concurrency
        self.time_limit = self.deadline + MARGIN_SECONDS
        self.options = dict(options or {})
        self.sessions: dict[Any, tuple[AsyncOpenAI, asyncio.Semaphore]] = {}  # by event loop, to which both are bound
        self.check_client(self.open_client())

    def open_client(self) -> AsyncOpenAI:
        """Return a new client. ValueError if there is no key, or the client cannot use the URL."""
        try:
            return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, timeout=self.timeout,
                               max_retries=self.retries, http_client=LimitedClient(self.timeout))
        except OpenAIError as error:
            raise ValueError(f"the judge has no API key ({error}). Give api_key=..., or set OPENAI_API_KEY; a server "
                             'of your own takes any text, api_key="local"') from error
        except Exception as error:  # the HTTP library raises its own errors, and their text may hold a password
            raise ValueError(WRONG_URL) from error

    def check_client(self, client: AsyncOpenAI) -> None:
        """Note the secrets and the URL of a client, to tell of it. ValueError for a wrong key, URL or option."""
        if not VISIBLE.fullmatch(client.api_key):  # the message must not show the key
            raise ValueError("the API key has a space, a line break or a letter that is not ASCII, which no request "
                             "can hold; copy it again, without what stands around it")
        if not is_address(str(client.base_url)):
            raise ValueError(WRONG_URL)
        names, known = sorted(self.options), inspect.signature(client.chat.completions.create).parameters
        if own := [name for name in names if name in OURS]:
            raise ValueError(f"options has {names}; it must be without {', '.join(own)}, which the judge sets itself")
        if unknown := [name for name in names if name not in known or not is_json(self.options[name])]:
            raise ValueError(f"options has {names}; it must be what the client's create() takes, without {unknown}")
        headers = self.options.get("extra_headers")
        hidden = [client.api_key, client.base_url.password, *(headers.values() if isinstance(headers, dict) else ())]
        self.secrets = [text for text in hidden if isinstance(text, str) and len(text) >= SHORTEST]
        self.url = str(client.base_url.copy_with(username="", password="", query=None)).rstrip("/")

    async def rate(self, questions: list[Question]) -> Round:
        """Return a round with the ratings of the questions answered within the deadline. Failures raise no error."""
        now, waiting = self.begin(questions)
        client, places = self.session()
        tasks = [asyncio.ensure_future(self.answer(client, places, question, now)) for question in waiting]
        try:
            if tasks:
                done, late = await asyncio.wait(tasks, timeout=self.deadline)
                for task in done:
                    task.result()  # raises programming errors
                if late:
                    now.report("late", f"{len(late)} of {len(questions)} questions had no answer after "
                               f"{self.deadline:g} s", "raise deadline or concurrency, or take a faster model")
        finally:
            for task in tasks:
                task.cancel()
            self.end(now)
        return now

    def session(self) -> tuple[AsyncOpenAI, asyncio.Semaphore]:
        """Return the client of this event loop, and the semaphore that limits its requests."""
        loop = asyncio.get_running_loop()
        if loop not in self.sessions:
            self.sessions = {other: held for other, held in self.sessions.items() if not other.is_closed()}
            self.sessions[loop] = self.open_client(), asyncio.Semaphore(self.concurrency)
        return self.sessions[loop]

    async def answer(self, client: AsyncOpenAI, places: asyncio.Semaphore, question: Question, now: Round) -> None:
        """Ask a question, and again up to `retries` times until a reply has scores; store the ratings in `now`."""
        fault: str | None = None
        for left in range(self.retries, -1, -1):
            try:
                async with places:
                    ratings = await self.ask(client, question, fault, now.meter)
                return self.learn(now, question, ratings)
            except BadReplyError as bad:
                fault = bad.fault
                now.meter.retried += bool(left)
                if not left:
                    now.report(*(bad.trouble or ("babble", f"a reply has no scores that can be used: {bad}",
                                                 "take a model that follows instructions better, or a simpler rubric")))
            except Exception as error:  # noqa: BLE001, a server's response can make the client raise anything
                taken = getattr(getattr(error, "request", None), "headers", {}).get("x-stainless-retry-count", "0")
                now.meter.retried += int(taken) if taken.isdigit() else 0
                return now.report(*self.trouble_of(error))

    async def ask(self, client: AsyncOpenAI, question: Question, fault: str | None, meter: Meter) -> Ratings:
        """Return the ratings in the reply to a question, and add its cost to `meter`; `fault` describes what was wrong
        with the previous reply. BadReplyError if there are none, and the client's own error if there is no reply."""
        create: Any = client.chat.completions.with_raw_response.create
        raw = await create(model=self.name, messages=question.messages(fault), **self.options)
        answer = raw.parse()
        usage = getattr(answer, "usage", None)
        meter.add(Meter(retried=raw.retries_taken, prompt_tokens=count_of(usage, "prompt_tokens"),
                        completion_tokens=count_of(usage, "completion_tokens")))
        return [(score, self.hide(reason)) for score, reason in question.read(self.text_of(answer))]

    def text_of(self, answer: Any) -> str:
        """Return the reply in the client's response object, any part of which a server may have left out."""
        try:
            choice = answer.choices[0]
            said, is_cut = choice.message.content, choice.finish_reason == "length"
        except (AttributeError, TypeError, IndexError, KeyError) as error:
            raise BadReplyError("the server's answer is not a chat completion", trouble=(
                "api", "what the server answers is not a chat completion",
                "check that base_url is that of an OpenAI-compatible API (it usually ends in /v1)")) from error
        text = self.hide(said) if isinstance(said, str) else ""
        if is_cut:
            raise BadReplyError("it was cut off at the limit of tokens", trouble=(
                "cut", f"a reply was cut off and is not read ({shown(text)})",
                'raise the limit: options={"max_tokens": ...}, higher for a model that thinks first'))
        return text

    def trouble_of(self, error: Exception) -> Trouble:
        """Return the kind of a request's error, the problem, and the fix."""
        if isinstance(refused := error.__cause__ or error, RefusedAnswerError):
            return ("large", f"{self.url} says too much: {refused}",
                    "lower max_tokens in options, without logprobs, or look at what the server sends")
        if isinstance(error, APITimeoutError):
            return ("slow", f"{self.url} did not answer within {self.timeout:g} s",
                    "raise timeout, lower concurrency, or take a faster model")
        if isinstance(error, APIConnectionError):
            return ("down", f"{self.url} cannot be reached ({self.plain(error.__cause__ or error)})",
                    "check that the server is up and that base_url is right (it usually ends in /v1)")
        status = getattr(error, "status_code", None) or 500
        kind, what, fix = STATUSES.get(status) or STATUSES[400 if status < 500 else 500]
        return kind, f"{self.url} {what.format(model=self.name)} ({self.plain(error)})", fix

    def hide(self, text: str) -> str:
        """Return the text with the secrets (key, password, headers) replaced."""
        for secret in self.secrets:
            text = text.replace(secret, PLACE)
        return text

    def plain(self, said: object) -> str:
        """Return one line of at most SHOWN printable characters, without the secrets."""
        text = " ".join(self.hide(str(said)).split())[:SHOWN]
        return "".join(char if char.isprintable() else "?" for char in text)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"sessions": {}}


def is_address(url: str) -> bool:
    """Return whether `url` is a server's URL: http or https, with a host and a valid port, if any."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def count_of(usage: Any, name: str) -> int:
    count = getattr(usage, name, None)
    return count if type(count) is int and 0 < count < MOST_TOKENS else 0


class RefusedAnswerError(OpenAIError):
    """A response that is not read. As an OpenAIError, it is passed on by OpenAI's client without a retry."""


class LimitedClient(DefaultAsyncHttpxClient):
    """An HTTP client that reads each response up to REPLY_BYTES and for `seconds` in all. It requests and accepts only
    uncompressed responses, since decompression could make one a thousand times as large."""

    def __init__(self, seconds: float) -> None:
        super().__init__(headers={"Accept-Encoding": "identity"}, timeout=seconds, max_redirects=REDIRECTS,
                         event_hooks={"response": [read_body]})
        self.seconds = seconds

    async def send(self, request: Any, **options: Any) -> Any:
        """Return the response with its body. RefusedAnswerError if the body is too large or compressed, or after too
        many redirects, and the HTTP library's ReadTimeout if it is not complete in time, even if it keeps coming."""
        library = library_of(request)
        try:
            async with asyncio.timeout(self.seconds):
                return await super().send(request, **options)
        except TimeoutError as error:
            raise library.ReadTimeout("the answer was not whole in time", request=request) from error
        except library.TooManyRedirects as error:
            raise RefusedAnswerError(f"it redirects more than {REDIRECTS} times") from error


def library_of(value: Any) -> Any:
    return import_module(type(value).__module__.partition(".")[0])  # httpx, or its successor


async def read_body(response: Any) -> None:
    """Read the whole body. RefusedAnswerError as soon as it is too large, or if it is compressed. It counts as UTF-8,
    because a server could also name a compression as its charset."""
    packed = response.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise RefusedAnswerError(f"its answer is packed ({packed[:20]}), though it was asked not to pack it")
    body = bytearray()
    async for piece in response.stream:
        body += piece
        if len(body) > REPLY_BYTES:
            raise RefusedAnswerError(f"its answer has more than {REPLY_BYTES} bytes")
    await response.stream.aclose()
    response.stream = library_of(response).ByteStream(bytes(body))
    response.headers["Content-Type"] = response.headers.get("Content-Type", "").partition(";")[0]
