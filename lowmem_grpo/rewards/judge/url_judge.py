"""A judge behind an OpenAI-compatible URL: many questions at a time, while other completions are still sampled."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

from lowmem_grpo.rewards.judge.chat_api import FORMS, Failure, Reply, ask, make_client, unknown_options
from lowmem_grpo.rewards.judge.hidden import hidden, is_address, secrets_of
from lowmem_grpo.rewards.judge.judge import Judge, Prices, Round, check_settings, is_count, is_seconds, unanswered
from lowmem_grpo.rewards.judge.question import Question, Ratings
from lowmem_grpo.rewards.judge.replies import BadReplyError, shown
from lowmem_grpo.rewards.judge.usage import Usage
from lowmem_grpo.runs.findings import Finding

logger = logging.getLogger(__name__)

REFUSALS = 100  # refusals in different words that are remembered
MARGIN_SECONDS = 5.0  # for what `rate` does besides waiting
OURS = ("model", "messages", "response_format", "stream", "n", "timeout")  # arguments that `options` cannot change


class UrlJudge(Judge):
    """A model of a server: OpenAI's, or any that speaks its chat completions (vLLM, SGLang, llama.cpp, Ollama, ...)."""

    def __init__(
        self, base_url: str | None, model: str, api_key: str | None = None, *, timeout: float = 60.0,
        deadline: float = 120.0, retries: int = 2, concurrency: int = 16, price_prompt: float | None = None,
        price_completion: float | None = None, cache_size: int = 10_000, cache_file: str | Path | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """None for `base_url` or `api_key` means the client's own (OpenAI's URL, OPENAI_API_KEY).

        timeout: seconds for one request. deadline: seconds for all questions of one call, with retries.
        retries: further requests after an error that may pass, and after a reply without scores.
        concurrency: requests at a time, in the whole run. price_*: of a million tokens, for the meter.
        options: more for each request, e.g. {"temperature": 0, "max_tokens": 2000, "reasoning_effort": "low"}.

        Raises ValueError for settings that make no sense or if there is no key, and ImportError without openai.
        """
        named = isinstance(options, dict) or options is None
        wrong = sorted({*(options or {})} & {*OURS}) if named else []
        check_settings({
            "base_url": (str(base_url).rpartition("@")[2].partition("?")[0][:99],
                         base_url is None or is_address(str(base_url)),
                         "an address that begins with http:// or https://, or None for OpenAI's own"),
            "model": (model, isinstance(model, str) and bool(model), "the server's name for its model"),
            "api_key": (type(api_key).__name__, api_key is None or isinstance(api_key, str), "a text, or None"),
            "timeout": (timeout, is_seconds(timeout), "seconds above 0"),
            "deadline": (deadline, is_seconds(deadline), "seconds above 0"),
            "retries": (retries, is_count(retries, 0), "a number, 0 or above"),
            "concurrency": (concurrency, is_count(concurrency, 1), "a number, at least 1"),
            "options": (type(options).__name__, named, "a dict, or None"),
        })
        check_settings({  # their values are not shown: a header may be a secret
            "options": (sorted(options or {}), not wrong, f"without {', '.join(wrong)}, which the judge sets itself"),
        })
        super().__init__(model, cache_size, cache_file, Prices(price_prompt, price_completion))
        self.client_settings = (base_url, api_key, min(timeout, deadline), retries)
        self.deadline, self.retries, self.concurrency = float(deadline), retries, concurrency
        self.time_limit = self.deadline + MARGIN_SECONDS
        self.options = dict(options or {})
        self.form = 0  # index into FORMS: the strictest form that the server is known to take
        self.taken = False  # whether the server took a request in that form
        self.doubted = False  # whether a count of tokens was not taken; that is said once
        self.refusals: set[str] = set()  # what the server said when the form was not the reason
        client = make_client(*self.client_settings)  # if there can be no client, the run does not begin
        self.identity = repr((str(client.base_url), model, sorted(self.options.items())))
        unknown = unknown_options(client, self.options)
        check_settings({"options": (sorted(self.options), not unknown,
        f"what the client's create() takes, without {unknown}")})
        self._sessions = Sessions(client)

    async def rate(self, questions: list[Question]) -> Round:
        """Ratings of the questions that were answered within the deadline. A failure of judging raises no error."""
        now, waiting = self.begin(questions)
        client, places = self._sessions.here(self)
        tasks = [asyncio.ensure_future(self._answer(client, places, question, now)) for question in waiting]
        try:
            if tasks:
                done, late = await asyncio.wait(tasks, timeout=self.deadline)
                for task in done:
                    task.result()  # raises what is a mistake of ours
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

    async def _answer(self, client: Any, places: asyncio.Semaphore, question: Question, now: Round) -> None:
        """Ask until the reply has scores, up to `retries` further times."""
        fault, last, reply, secrets = None, "", Reply(""), secrets_of(client, self.options)
        for attempt in range(1 + self.retries):
            async with places:
                found = await self._ask(client, question, fault, now)
            now.meter.retried += found.retries + (attempt > 0)
            if isinstance(found, Failure):
                now.troubles.append(found.trouble)
                return
            reply = found
            self._count(reply.usage, now)
            try:
                ratings = read(question, reply)
                self.learn(now, question, [(score, hidden(reason, secrets)) for score, reason in ratings])
                return
            except BadReplyError as bad:
                fault, last = bad.fault, str(bad)
        now.troubles.append(no_scores(last, reply))

    def _count(self, usage: Usage, now: Round) -> None:
        now.meter.prompt_tokens += usage.prompt
        now.meter.completion_tokens += usage.completion
        if usage.doubt and not self.doubted:
            logger.warning("judge %s: its counts of tokens cannot be true (%s). Such counts are guessed from the texts "
                           "from here on; compare the cost with the server's bill", self.name, usage.doubt)
        self.doubted |= bool(usage.doubt)

    async def _ask(self, client: Any, question: Question, fault: str | None, now: Round) -> Reply | Failure:
        """One answer, in the strictest form that the server takes. A looser form that it takes is remembered."""
        first = self.form
        for form in range(first, len(FORMS)):
            found = await ask(client, self.name, question, fault, FORMS[form], self.options)
            if isinstance(found, Reply):
                self._note_taken(form)
            if isinstance(found, Reply) or not found.refused or self._is_content(form, found):
                break
            if form + 1 == len(FORMS):
                self._note_refusal(found)
            else:
                now.meter.retried += 1
        return found

    def _is_content(self, form: int, refused: Failure) -> bool:
        """Whether a request was refused for another reason than its form: the server has taken other requests in this
        form, or has said the same in every form."""
        return (self.taken and form == self.form) or in_general(refused) in self.refusals

    def _note_refusal(self, refused: Failure) -> None:
        """No form helped, so these words are about something else, for example a prompt that is too long."""
        if len(self.refusals) < REFUSALS:
            self.refusals.add(in_general(refused))

    def _note_taken(self, form: int) -> None:
        if form > self.form:
            logger.warning("judge %s: the server does not take response_format %s; asking for %s from here on",
                           self.name, FORMS[self.form], FORMS[form])
        if form >= self.form:
            self.form, self.taken = form, True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_sessions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _sessions=Sessions())


class Sessions:
    """A client and the places for its requests for each event loop: neither can be used in two loops."""

    def __init__(self, spare: Any = None) -> None:
        """`spare` is a client that no loop has used."""
        self.spare = spare
        self.made: dict[Any, tuple[Any, asyncio.Semaphore]] = {}

    def here(self, judge: UrlJudge) -> tuple[Any, asyncio.Semaphore]:
        """Those of the running loop."""
        loop = asyncio.get_running_loop()
        if loop not in self.made:
            client, self.spare = self.spare or make_client(*judge.client_settings), None
            self.made = {other: session for other, session in self.made.items() if not other.is_closed()}
            self.made[loop] = (client, asyncio.Semaphore(judge.concurrency))
        return self.made[loop]


def in_general(refused: Failure) -> str:
    """What the server said, with 0 for every number in it."""
    return re.sub(r"\d+", "0", refused.trouble.problem)


def read(question: Question, reply: Reply) -> Ratings:
    """The ratings in a reply. Raises BadReplyError if there are none."""
    if not reply.is_chat:
        raise BadReplyError("the server's answer is not a chat completion")
    if reply.cut:
        raise BadReplyError("it was cut off at the limit of tokens", shown(reply.text))
    return question.read(reply.text)


def no_scores(fault: str, reply: Reply) -> Finding:
    """The finding for a question whose last reply had no scores either."""
    if not reply.is_chat:
        return unanswered("api", "what the server answers is not a chat completion",
                       "check that base_url is that of an OpenAI-compatible API (it usually ends in /v1)")
    if reply.cut:
        return unanswered("cut", f"a reply was cut off and is not read ({shown(reply.text)})",
                       'raise the limit: options={"max_tokens": ...}, higher for a model that thinks first')
    return unanswered("babble", f"a reply has no scores that can be used: {fault}",
                   "take a model that follows instructions better, or a simpler rubric")
