"""A judge behind an OpenAI-compatible URL: concurrent questions, while other completions are still being sampled."""

import asyncio
from typing import TYPE_CHECKING, Any

from lowmem_grpo.rewards.judge.judge import Judge, Round, UnansweredError, check_gone, is_address, unanswered
from lowmem_grpo.rewards.judge.question import Question
from lowmem_grpo.utils import COUNT, POSITIVE, TEXT, at_least, require

if TYPE_CHECKING:
    from lowmem_grpo.rewards.judge.chat_api import ChatClient

MARGIN_SECONDS = 5.0  # for the work of `rate` besides waiting
OURS = ("model", "messages", "stream", "n", "timeout")  # arguments that `options` must not set


class UrlJudge(Judge):
    """Judges with a model on a server that has OpenAI's chat completions API (OpenAI, vLLM, SGLang, llama.cpp, ...)."""

    def __init__(self, base_url: str | None, model: str, api_key: str | None = None, *, timeout: float = 60.0,
                 deadline: float = 120.0, retries: int = 2, concurrency: int = 16, cache_size: int = 10_000,
                 options: dict[str, Any] | None = None, **gone: Any) -> None:
        """None for `base_url` or `api_key` means the client's default (OpenAI's URL, OPENAI_API_KEY).

        timeout: seconds for one request. deadline: seconds for all questions of one call, with retries.
        retries: further requests after a transient error, and after a reply without scores.
        concurrency: concurrent requests in the whole run. options: further arguments of each request, such as
        {"temperature": 0, "max_tokens": 2000, "reasoning_effort": "low", "response_format": {"type": "json_object"}}.

        ValueError for invalid settings or a missing key, ImportError without the package openai.
        """
        check_gone(gone)
        where = str(base_url).rpartition("@")[2].partition("?")[0][:99]  # without a password
        require("base_url", where, ("an address that begins with http:// or https://, or None for OpenAI's own",
                                    lambda _: base_url is None or is_address(str(base_url))))
        require("model", model, TEXT)
        for name, value, rule in (("timeout", timeout, POSITIVE), ("deadline", deadline, POSITIVE),
                                  ("retries", retries, at_least(0)), ("concurrency", concurrency, COUNT)):
            require(name, value, rule)
        for name, setting, kind in (("api_key", api_key, str), ("options", options, dict)):  # values may be secret
            if not isinstance(setting, kind | None):
                raise ValueError(f"{name} is a {type(setting).__name__}; it must be a {kind.__name__}, or None")
        names = sorted(options or {})
        if own := [name for name in names if name in OURS]:
            raise ValueError(f"options has {names}; it must be without {', '.join(own)}, which the judge sets itself")
        super().__init__(model, cache_size)
        self.client_settings = (base_url, api_key, min(timeout, deadline), retries, model, dict(options or {}))
        self.deadline, self.retries, self.concurrency = float(deadline), retries, concurrency
        self.time_limit = self.deadline + MARGIN_SECONDS
        self.sessions: dict[Any, tuple[ChatClient, asyncio.Semaphore]] = {}  # by event loop, to which both are bound
        self.spare: ChatClient | None = open_client(*self.client_settings)  # not used by any loop yet

    async def rate(self, questions: list[Question]) -> Round:
        """Return a round with the ratings of the questions answered within the deadline. Failures raise no error."""
        now, waiting = self.begin(questions)
        client, places = self.session()
        tasks = [asyncio.ensure_future(self._answer(client, places, question, now)) for question in waiting]
        try:
            if tasks:
                done, late = await asyncio.wait(tasks, timeout=self.deadline)
                for task in done:
                    task.result()  # raises programming errors
                if late:
                    now.troubles.append(unanswered(
                        "late", f"{len(late)} of {len(questions)} questions had no answer after {self.deadline:g} s",
                        "raise deadline or concurrency, or take a faster model",
                    ))
        finally:
            for task in tasks:
                task.cancel()
            self.end(now)
        return now

    async def _answer(self, client: "ChatClient", places: asyncio.Semaphore, question: Question, now: Round) -> None:
        """Ask a question, and again up to `retries` times until a reply has scores; store the ratings in `now`."""
        fault: str | None = None
        for left in range(self.retries, -1, -1):
            try:
                async with places:
                    ratings = await client.ask(question, fault, now.meter)
            except UnansweredError as error:
                fault = error.fault
                if fault is None or not left:
                    now.troubles.append(error.trouble)
                    break
                now.meter.retried += 1
            else:
                self.learn(now, question, ratings)
                break

    def session(self) -> tuple["ChatClient", asyncio.Semaphore]:
        """Return the client of this event loop, and the semaphore that limits its requests."""
        loop = asyncio.get_running_loop()
        if loop not in self.sessions:
            self.sessions = {other: held for other, held in self.sessions.items() if not other.is_closed()}
            client, self.spare = self.spare or open_client(*self.client_settings), None
            self.sessions[loop] = client, asyncio.Semaphore(self.concurrency)
        return self.sessions[loop]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"sessions": {}, "spare": None}


def open_client(*settings: Any) -> "ChatClient":
    """Return a client with these settings. ImportError without the package openai."""
    try:
        from lowmem_grpo.rewards.judge.chat_api import ChatClient
    except ImportError as error:
        raise ImportError("a judge at a URL needs the package openai: pip install openai") from error
    return ChatClient(*settings)
