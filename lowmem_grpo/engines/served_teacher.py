"""`ServedTeacher`: the log-probabilities of sequences by a teacher behind a URL, which is asked for several at a time.

The server is vLLM's (`vllm serve MODEL --max-logprobs K`) or ours (`lowmem-grpo serve MODEL`). Both answer a prompt in
`/v1/completions` with `prompt_logprobs`: at each place the K likeliest tokens and the prompt's own, at temperature 1.
No message shows the API key or a password in the URL.
"""

import asyncio
import logging
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from lowmem_grpo.utils import COUNT, POSITIVE, Rule, at_least, require

try:
    import openai
except ImportError as missing:
    raise ImportError("a teacher at a URL needs the package openai: pip install openai") from missing

logger = logging.getLogger(__name__)
T = TypeVar("T")
Sequences = list[tuple[list[int], list[int]]]  # ids of a prompt (P,) and of its completion (C,)

DIFFERENCE = 0.02  # nats by which equal questions may be answered differently, in the mean of a text's tokens
QUESTIONS = 4  # equal ones in the self-test, at the same time: a server may have several replicas
TEXT = "Is 12 * 12 = 144? Yes: 10 * 12 is 120, two more twelves are 24, and 120 + 24 = 144. The answer is 144."
ROUNDING = 1e-3  # how far a log-probability may be above 0, and a sum of probabilities above 1
SHOWN = 300  # characters of a server's error that are shown
SHORTEST = 8  # characters of a key that is secret; shorter ones ("local", "EMPTY") are in ordinary words
PLACEHOLDER = "\ufffd"  # a part of a character; how it is decoded depends on its neighbours
UP = "check that the server is up, and its URL"
FIXES = {400: "shorten prompts or completions or serve a longer context (vLLM: --max-model-len), and serve at least "
              "top_k log-probabilities (vLLM: --max-logprobs)",
         401: "give its key: teacher=ServedTeacher(url, api_key=...), of lowmem_grpo.engines.served_teacher",
         403: "give another api_key or model",
         404: "check the model's name in the server's list (/v1/models), and that the URL ends in /v1"}


def is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(re.match(r"https?://[^/\s]+(/\S*)?$", url) and parts.hostname and parts.port != 0)
    except ValueError:  # of the port
        return False


ADDRESS: Rule = ("an address that begins with http:// or https://, such as http://127.0.0.1:8000/v1", is_address)


class TeacherError(RuntimeError):
    """A served teacher cannot be trained on; the message says what it answered and what to do."""


@dataclass(frozen=True)
class TeacherScores:
    """What a teacher says of C completion tokens, on the host. Entry t describes completion token t."""

    logprobs: Tensor  # (C,) float32, of the completion's own tokens
    top_ids: Tensor  # (C, K) int64, the likeliest tokens, the likeliest first
    top_logprobs: Tensor  # (C, K) float32


class ServedTeacher:
    def __init__(self, base_url: str, model: str | None = None, api_key: str = "local", *, top_k: int = 20,
                 timeout: float = 300.0, retries: int = 5, concurrency: int = 16, vocabulary: int | None = None,
                 ) -> None:
        """model: its name on the server; None for a server with one model. timeout: seconds for a sequence, with its
        retries after transient errors (408, 409, 429, 5xx, a lost connection; 0.5 to 8 s later or when the server
        says). concurrency: concurrent requests. vocabulary: the rows of the student's output head, if known.
        ValueError for an invalid setting, key or URL."""
        address = urlsplit(str(base_url))
        self.url = address._replace(netloc=address.netloc.rpartition("@")[2], query="").geturl()
        for name, value, rule in (("the teacher's URL", self.url, ADDRESS), ("top_k", top_k, COUNT),
                                  ("timeout", timeout, POSITIVE), ("retries", retries, at_least(0)),
                                  ("concurrency", concurrency, COUNT)):
            require(name, value, rule)
        tail = "" if address.path.strip("/") else "/v1"  # TRL's URLs end at the port
        self.base_url = address._replace(path=address.path.rstrip("/") + tail).geturl()
        self.model, self.api_key, self.top_k, self.timeout = model, api_key, int(top_k), float(timeout)
        self.retries, self.concurrency, self.vocabulary = int(retries), int(concurrency), vocabulary
        self.secrets = [text for text in (api_key, address.password) if text and len(text) >= SHORTEST]

    def reach(self) -> None:
        """Ask once for the list of models. TeacherError if nobody answers; what is answered is not looked at."""
        with openai.OpenAI(base_url=self.base_url, api_key=self.api_key, timeout=self.timeout,
                           max_retries=0) as client:
            try:
                client.models.list()
            except openai.APIConnectionError as error:
                raise TeacherError(f"the teacher at {self.url} cannot be reached "
                                   f"({self.plain(error.__cause__ or error)}); {UP}") from None
            except (openai.OpenAIError, ValueError):
                logger.debug("the teacher at %s has no list of models", self.url)  # which a server need not have

    def score(self, sequences: Sequences) -> list[TeacherScores]:
        """Return the scores of each completion behind its prompt. TeacherError if one cannot be had."""
        return self.answers(sequences, self.scores_of)

    def columns(self, sequences: Sequences) -> list[dict[str, Any]]:
        """Return, for each sequence, a row's columns of a stored teacher (`rollout/stored_completions.py`)."""
        return [{"completion_ids": ids, "teacher_top_ids": scores.top_ids.tolist(),
                 "teacher_top_logprobs": scores.top_logprobs.tolist()}
                for (_, ids), scores in zip(sequences, self.score(sequences), strict=True)]

    def check(self, tokenizer: Any) -> float:
        """Ask for a short text several times, and return the mean difference of its tokens' log-probabilities in nats.
        TeacherError if the answers differ by more than DIFFERENCE, are not complete, or name tokens that the student's
        `tokenizer` does not have."""
        ids = list(tokenizer(TEXT).input_ids)
        answers = self.answers([(ids[:1], ids[1:])] * QUESTIONS, lambda *answer: (self.scores_of(*answer), answer[0]))
        first, *others = [scores.logprobs for scores, _ in answers]
        self.check_tokens(answers[0][1], tokenizer)
        difference = max(float((other - first).abs().mean()) for other in others)
        if difference > DIFFERENCE:
            raise TeacherError(f"{self.url} answers equal questions differently: by {difference:.3g} nats in the mean "
                               f"of {len(first)} tokens, and at most {DIFFERENCE} are allowed. Serve one replica, or "
                               "replicas with equal weights, dtype and options")
        return difference

    def check_tokens(self, places: list[dict[str, Any]], tokenizer: Any) -> None:
        """Raise TeacherError if the server names a token otherwise than `tokenizer` does."""
        theirs = {int(token): entry["decoded_token"].strip() for place in places for token, entry in place.items()
                  if isinstance(entry.get("decoded_token"), str)}
        ours = {token: str(tokenizer.decode([token])).strip() for token in theirs}
        whole = [token for token in theirs if PLACEHOLDER not in ours[token] + theirs[token]]
        if not whole:
            logger.warning("%s does not say which tokens its ids are; make sure that they are the student's", self.url)
        if other := [token for token in whole if ours[token] != theirs[token]]:
            raise TeacherError(f"{self.url} has other tokens than the student: of {len(whole)}, {len(other)} differ, "
                               f"and id {other[0]} is {theirs[other[0]]!r} there and {ours[other[0]]!r} here. Take a "
                               "teacher with the student's tokenizer")

    def answers(self, sequences: Sequences, read: Callable[[list[Any], list[int]], T]) -> list[T]:
        """Return what `read` makes of each completion's `prompt_logprobs`, C places, and its C tokens. TeacherError if
        they are missing, or not P + C for a sequence."""
        if empty := [number for number, (prompt, _) in enumerate(sequences) if not prompt]:
            raise ValueError(f"sequence {empty[0]} has no prompt token; the first completion token needs one before it")
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop already
            return thread.submit(asyncio.run, self.ask_all(sequences, read)).result()

    async def ask_all(self, sequences: Sequences, read: Callable[[list[Any], list[int]], T]) -> list[T]:
        async def ask_one(prompt: list[int], ids: list[int]) -> T:
            async with slots:  # an answer takes much more memory than what is made of it
                return read((await self.ask(client, [*prompt, *ids]))[len(prompt):], ids)

        slots = asyncio.Semaphore(self.concurrency)
        async with openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, timeout=self.timeout,
                                      max_retries=self.retries) as client:
            if self.model is None:
                self.model = await self.only_model(client)
            return list(await asyncio.gather(*(ask_one(*sequence) for sequence in sequences)))

    async def only_model(self, client: openai.AsyncOpenAI) -> str:
        names = [model.id for model in (await self.limited(client.models.list(), 0)).data]
        if len(names) != 1:
            raise TeacherError(f"{self.url} serves {', '.join(names) or 'no model'}; say which is the teacher: "
                               "ServedTeacher(base_url, model=...)")
        return names[0]

    async def ask(self, client: openai.AsyncOpenAI, ids: list[int]) -> list[Any]:
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": self.top_k}
        reply: Any = await self.limited(client.post("/completions", body=body, cast_to=object), len(ids))
        try:
            places = reply["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            places = None
        if not isinstance(places, list):
            raise TeacherError(f"{self.url} answers without prompt_logprobs ({self.plain(reply)}); serve the teacher "
                               "with vllm serve or lowmem-grpo serve")
        if len(places) != len(ids):
            raise TeacherError(f"{self.url} answers with prompt_logprobs for {len(places)} tokens, and was asked for "
                               f"{len(ids)}; serve it without truncation of prompts")
        return places

    async def limited(self, request: Any, tokens: int) -> Any:
        """Await a request within the time limit. TeacherError, without secrets, if it fails."""
        try:
            async with asyncio.timeout(self.timeout):
                return await request
        except (TimeoutError, openai.APITimeoutError):
            does, fix = f"did not answer within {self.timeout:g} s", "raise timeout or lower concurrency"
        except openai.APIStatusError as error:
            does = f"answered HTTP {error.status_code} to {tokens} tokens: {self.plain(error.response.text)}"
            fix = FIXES.get(error.status_code, "look at the server's log")
        except openai.APIConnectionError as error:
            does, fix = f"cannot be reached ({self.plain(error.__cause__ or error)})", UP
        except (openai.OpenAIError, ValueError) as error:
            does, fix = f"gives no answer that can be read ({self.plain(error)})", "check that the URL ends in /v1"
        raise TeacherError(f"the teacher at {self.url} {does}; {fix}") from None

    def plain(self, said: object) -> str:
        """Return the text of `said` as one line of at most SHOWN characters, without the secrets."""
        text = str(said)
        for secret in self.secrets:
            text = text.replace(secret, "[hidden]")
        return "".join(char if char.isprintable() else "?" for char in " ".join(text.split())[:SHOWN])

    def scores_of(self, places: list[Any], ids: list[int]) -> TeacherScores:
        """Return the scores of a completion from its C places of `prompt_logprobs`."""
        own, top = list[float](), list[list[tuple[int, float]]]()
        for at, (place, token) in enumerate(zip(places, ids, strict=True)):
            try:
                values = {int(name): math.nan if (value := entry["logprob"]) is None else float(value)
                          for name, entry in place.items()}
            except (AttributeError, KeyError, TypeError, ValueError):
                values = {}
            likeliest = sorted(values.items(), key=lambda item: -item[1])[:self.top_k]
            if fault := self.fault(values, likeliest, token):
                raise TeacherError(f"{self.url}: the scores of completion token {at} {fault} ({self.plain(place)})")
            own.append(values[token])
            top.append(likeliest)
        ids_and_values = torch.tensor(top, dtype=torch.float64).reshape(-1, self.top_k, 2)
        return TeacherScores(torch.tensor(own), ids_and_values[..., 0].long(), ids_and_values[..., 1].float())

    def fault(self, values: dict[int, float], likeliest: list[tuple[int, float]], token: int) -> str:
        """Return what is wrong with the log-probabilities at a place that holds `token`, and what to do; else ""."""
        if token not in values:
            return f"are not for {token}, which stands there; serve a model that reads the ids that it is sent"
        if not all(-math.inf < value < ROUNDING for value in values.values()) or sum(
                math.exp(value) for _, value in likeliest) > 1 + ROUNDING:
            return ("are no log-probabilities (finite, 0 at most, with probabilities up to 1 together); look at the "
                    "teacher's weights, and serve vLLM with --logprobs-mode raw_logprobs")
        if len(likeliest) < self.top_k:
            return f"hold {len(likeliest)} tokens, and top_k is {self.top_k}; lower top_k"
        if self.vocabulary is not None and (most := max(name for name, _ in likeliest)) >= self.vocabulary:
            return f"hold the id {most}, and the student has {self.vocabulary} tokens; lower top_k"
        return ""
