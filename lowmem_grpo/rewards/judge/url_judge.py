"""A judge behind an OpenAI-compatible URL, asked concurrently while other completions are sampled. No message shows the
API key, a password in the URL, or terminal control characters."""

import asyncio
import inspect
import re
from importlib import import_module
from typing import Any

from pydantic import HttpUrl

from lowmem_grpo.rewards.judge.judge import Judge, Round
from lowmem_grpo.rewards.judge.question import BadReplyError, Question, Ratings
from lowmem_grpo.utils import COUNT, OF_KINDS, POSITIVE, TEXT, at_least, require

try:
    import openai
except ImportError as missing:
    raise ImportError("a judge at a URL needs the package openai: pip install openai") from missing

OURS = ("model", "messages", "stream", "n", "timeout")  # arguments that `options` must not set
REPLY_BYTES = 4 << 20  # the largest response; long thinking with its scores takes a tenth of that
SHORTEST = 8  # characters of a secret; a shorter key ("local", "EMPTY") is not secret, and is in ordinary words
SHOWN = 300  # characters of a server's or connection's error that are shown
TROUBLES: dict[type[Exception], tuple[str, str, str]] = {  # (kind, problem, fix) of the first class that matches
    openai.APITimeoutError: ("slow", "did not answer within {timeout:g} s",
                             "raise timeout, lower concurrency, or take a faster model"),
    openai.APIConnectionError: ("down", "cannot be reached",
                                "check that the server is up and that base_url is right (it usually ends in /v1)"),
    openai.AuthenticationError: ("key", "does not take the API key", "give the right api_key"),
    openai.PermissionDeniedError: ("key", "does not let this key use {name}", "give another api_key or model"),
    openai.NotFoundError: ("model", "knows no model {name!r}, or has no chat completions there",
                           "check the server's list of models (/v1/models), and that base_url ends as the server asks"),
    openai.RateLimitError: ("limit", "takes no more requests for now",
                            "lower concurrency, raise retries and deadline, or check the limits of the account"),
    openai.APIStatusError: ("request", "answered with an error", "look at the server's log, and check that it accepts "
                            "this model, these options and prompts of this length"),
    Exception: ("answer", "gives no chat completion that can be read", "check that base_url is that of an OpenAI-"
                "compatible API (it usually ends in /v1), or lower max_tokens in options if the answer is too large"),
}
CUT = "it was cut off at the limit of tokens"
FIXES = {"cut": 'raise the limit: options={"max_tokens": ...}, higher for a model that thinks first',
         "babble": "take a model that follows instructions better, or a simpler rubric"}


class UrlJudge(Judge):
    """Judges with a model on a server that has OpenAI's chat completions API (OpenAI, vLLM, SGLang, llama.cpp, ...)."""

    def __init__(self, base_url: str | None, model: str, api_key: str | None = None, *, timeout: float = 60.0,
                 deadline: float = 120.0, retries: int = 2, concurrency: int = 16, cache_size: int = 10_000,
                 options: dict[str, Any] | None = None, **gone: Any) -> None:
        """None for `base_url` or `api_key` means the client's default (OpenAI's URL, OPENAI_API_KEY).

        timeout: seconds without any answer. deadline: seconds for all questions of one call, with retries. retries:
        further requests after a transient error (408, 409, 429, 5xx, a time-out, a lost connection; 0.5 to 8 s later or
        when the server says), and after a reply without scores. concurrency: concurrent requests in the whole run.
        options: further arguments of each request, such as {"temperature": 0, "max_tokens": 2000, "reasoning_effort":
        "low", "response_format": {"type": "json_object"}}.

        ValueError for an invalid setting, key or URL, or an option that the API does not know."""
        super().__init__(model, cache_size, **gone)
        where = str(base_url).rpartition("@")[2].partition("?")[0][:99]  # without a password
        require("base_url", where, ("an address that begins with http:// or https://, or None for OpenAI's own",
                                    lambda _: base_url is None or is_address(str(base_url))))
        for name, value, rule in (("model", model, TEXT), ("timeout", timeout, POSITIVE),
                                  ("deadline", deadline, POSITIVE), ("retries", retries, at_least(0)),
                                  ("concurrency", concurrency, COUNT),
                                  ("options", options or {}, OF_KINDS[dict])):
            require(name, value, rule)
        self.base_url, self.api_key, self.timeout = base_url, api_key, float(min(timeout, deadline))
        self.deadline, self.retries, self.concurrency = float(deadline), retries, concurrency
        self.time_limit, self.options = self.deadline + 5.0, dict(options or {})  # 5 s for work besides waiting
        self.sessions: dict[Any, tuple[openai.AsyncOpenAI, asyncio.Semaphore]] = {}  # by event loop
        self.check_client(self.open_client())

    def open_client(self) -> openai.AsyncOpenAI:
        """Return a new client, which asks for uncompressed responses. ValueError without a key or with a wrong URL."""
        http = openai.DefaultAsyncHttpxClient(headers={"Accept-Encoding": "identity"}, max_redirects=2,
                                              event_hooks={"response": [read_body]})
        try:
            return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, timeout=self.timeout,
                                      max_retries=self.retries, http_client=http)
        except openai.OpenAIError as error:
            raise ValueError(f"the judge has no API key ({error}). Give api_key=..., or set OPENAI_API_KEY; a server "
                             'of your own takes any text, api_key="local"') from error

    def check_client(self, client: openai.AsyncOpenAI) -> None:
        """Store a client's secrets and URL. ValueError for an invalid key, which is not shown, or an unknown option."""
        if not (isinstance(client.api_key, str) and re.fullmatch("[!-~]+", client.api_key)):
            raise ValueError("the API key is not a text, or has a space, a line break or a letter that is not ASCII, "
                             "which no request can hold; copy it again, without what stands around it")
        known = inspect.signature(client.chat.completions.create).parameters.keys() - {*OURS}
        if wrong := sorted(map(str, self.options.keys() - known)):
            raise ValueError(f"options has {wrong}; it must be what the client's create() takes, without "
                             f"{', '.join(OURS)}, which the judge sets itself")
        headers = self.options.get("extra_headers")
        hidden = [client.api_key, client.base_url.password, *(headers.values() if isinstance(headers, dict) else ())]
        self.secrets = [text for text in hidden if isinstance(text, str) and len(text) >= SHORTEST]
        self.url = str(client.base_url.copy_with(username="", password="", query=None)).rstrip("/")

    async def rate(self, questions: list[Question]) -> Round:
        now, waiting = self.begin(questions)
        try:
            async with asyncio.timeout(self.deadline):
                await asyncio.gather(*(self.answer(question, now) for question in waiting))
        except TimeoutError:
            late = len({*waiting} - now.found.keys())
            now.report("late", f"{late} of {len(questions)} questions had no answer after {self.deadline:g} s",
                       "raise deadline or concurrency, or take a faster model")
        return self.end(now)

    def session(self) -> tuple[openai.AsyncOpenAI, asyncio.Semaphore]:
        """Return the client and the semaphore that limits its requests. Both are bound to the current event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self.sessions:
            self.sessions = {other: held for other, held in self.sessions.items() if not other.is_closed()}
            self.sessions[loop] = self.open_client(), asyncio.Semaphore(self.concurrency)
        return self.sessions[loop]

    async def answer(self, question: Question, now: Round) -> None:
        """Ask a question, with `retries` retries while replies have no scores; store the ratings in the Round `now`."""
        fault: str | None = None
        for left in range(self.retries, -1, -1):
            try:
                return self.learn(now, question, await self.ask(question, fault, now))
            except BadReplyError as bad:
                fault = bad.fault
                now.retried += bool(left)
                if not left:
                    kind = "cut" if fault == CUT else "babble"
                    now.report(kind, f"a reply has no scores that can be used: {bad}", FIXES[kind])
            except Exception as error:  # noqa: BLE001, a server's response can make the client raise anything
                kind, does, fix = next(told for types, told in TROUBLES.items() if isinstance(error, types))
                does = does.format(name=self.name, timeout=self.timeout)
                return now.report(kind, f"{self.url} {does} ({self.plain(error.__cause__ or error)})", fix)

    async def ask(self, question: Question, fault: str | None, now: Round) -> Ratings:
        """Return the ratings in the reply to a question, and add its cost to the Round `now`. `fault`: what was wrong
        with the previous reply. BadReplyError for a reply without ratings; any other error if there is no reply."""
        client, slots = self.session()
        create: Any = client.chat.completions.create
        async with slots:
            answer = await create(model=self.name, messages=question.messages(fault), **self.options)
        for name in ("prompt_tokens", "completion_tokens"):
            count = getattr(getattr(answer, "usage", None), name, None)
            setattr(now, name, getattr(now, name) + (count if isinstance(count, int) else 0))
        choice = answer.choices[0]  # a server may have left out any part
        text = self.hide(said) if isinstance(said := choice.message.content, str) else ""
        if choice.finish_reason == "length":
            raise BadReplyError(CUT, text)
        return [(score, self.hide(reason)) for score, reason in question.read(text)]

    def hide(self, text: str) -> str:
        """Return the text with the secrets (key, password, headers) replaced."""
        for secret in self.secrets:
            text = text.replace(secret, "[hidden]")
        return text

    def plain(self, said: object) -> str:
        """Return the text of `said` as one line of at most SHOWN printable characters, without the secrets."""
        text = " ".join(self.hide(str(said)).split())[:SHOWN]
        return "".join(char if char.isprintable() else "?" for char in text)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"sessions": {}}


def is_address(url: str) -> bool:
    """Return whether `url` is a server's URL: http or https, with a host and a valid port, if any."""
    try:
        return bool(HttpUrl(url))
    except ValueError:
        return False


async def read_body(response: Any) -> None:
    """Read a response's body without decompression, which could make it a thousand times as large. The response's
    charset is ignored, because Python has compressing charsets too. OpenAIError for a body of more than REPLY_BYTES."""
    body = bytearray()
    async for piece in response.stream:
        body += piece
        if len(body) > REPLY_BYTES:
            raise openai.OpenAIError(f"its answer has more than {REPLY_BYTES} bytes")
    await response.stream.aclose()
    library = import_module(type(response).__module__.partition(".")[0])  # httpx, or its successor
    response.stream = library.ByteStream(bytes(body))
    response.headers.pop("Content-Encoding", None)
    response.headers["Content-Type"] = response.headers.get("Content-Type", "").partition(";")[0]
