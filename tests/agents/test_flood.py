"""A flood of requests at the endpoint: every call gets its own reply, token for token.

Many threads hold conversations of several turns with the `openai` client, every second one streamed, each conversation
in a session of its own. Each message has a word that no other request has. `lost` counts calls without a reply; `mixed`
replies and prompts with another request's word, or without their own; `inexact` turns whose trained tokens or
log-probabilities are not those that the engine drew, by a record made in the engine. `memory_ratio` is the resident
memory in the last quarter of the calls over that in the first, median over median; four conversations of each client
go before, which fill the caches. They are checked like the others, and are not among the calls.
"""

import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion import Choice
from transformers import PreTrainedTokenizerBase

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.trajectories import Trajectory
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, Engine, Request
from lowmem_grpo.engines.decoding import in_rounds
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.rollout_func import rollout_of
from lowmem_grpo.server.openai.chat_handler import ChatHandler
from lowmem_grpo.server.openai.conversation_cache import ConversationCache
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.server.openai.request_queue import LIVE
from lowmem_grpo.types import OnGroup, Rollout, Turn

STATM = Path("/proc/self/statm")
PAGE = 4096  # bytes
WARM = 4  # conversations of each client before: the engine keeps rows of twice as many conversations as go on at once
WORD = re.compile(r"w\d+-\d+-[0-9a-f]{8}")  # what each request has of its own


class Echo:
    """Answers with the last word of the prompt that is like WORD, whatever the weights are."""

    name, slots, kv_bytes, capabilities = "transformers", 64, 0, frozenset({"on_group", "converse"})

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        found = [[self.answer(ids)] for ids in prompts]
        for index, rollouts in enumerate(found):
            if on_group is not None:
                on_group(index, rollouts)
        return found

    def answer(self, prompt: list[int]) -> Rollout:
        text = f"heard {WORD.findall(self.tokenizer.decode(prompt))[-1]}"
        ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
        return Rollout(ids, [-0.5] * len(ids), "stop", text)

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        in_rounds(self, conversation, params, self.tokenizer)

    def on_policy_update(self, policy_version: int) -> None:
        pass

    def sleep(self) -> None:
        pass

    def close(self) -> None:
        pass


class Recorded:
    """Another engine, and all that was drawn by it: hashes of (prompt, completion, log-probabilities), counted."""

    def __init__(self, engine: Engine | Any) -> None:
        self.engine, self.name = engine, engine.name
        self.drawn: Counter[int] = Counter()
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        self.engine.converse(Noted(conversation, self), params)

    def note(self, prompt: list[int], completion: list[int], logprobs: list[float]) -> None:
        with self.lock:
            self.drawn[mark(prompt, completion, logprobs)] += 1


class Noted:
    """A conversation whose turns are noted on their way."""

    def __init__(self, conversation: Conversation, record: Recorded) -> None:
        self.conversation, self.record = conversation, record
        self.prompts: dict[int, list[int]] = {}

    def next_requests(self, busy: bool) -> list[Request]:
        requests = self.conversation.next_requests(busy)
        self.prompts |= {request.key: list(request.ids) for request in requests}
        return requests

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        self.record.note(self.prompts.pop(key), rollout.completion_ids, rollout.rollout_logprobs)
        self.conversation.add_rollout(key, rollout)


def mark(prompt: list[int], completion: list[int], logprobs: list[float]) -> int:
    """What stands for a turn in the record."""
    return hash((tuple(prompt), tuple(completion), tuple(logprobs)))


@dataclass
class Flood:
    """What came of it."""

    memory: list[int] = field(default_factory=list)  # bytes after each call
    lost: int = 0
    mixed: int = 0
    inexact: int = 0
    trained_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self) -> None:
        with self.lock:
            self.memory.append(int(STATM.read_text().split()[1]) * PAGE)

    @property
    def memory_ratio(self) -> float:
        quarter = len(self.memory) // 4
        return median(self.memory[-quarter:]) / median(self.memory[:quarter])


def flood(engine: str, clients: int, calls: int, turns: int) -> dict[str, Any]:
    """Figures of a flood by the engine "echo" or "model"."""
    bare, tokenizer = FastLanguageModel.from_pretrained("tiny-games", max_seq_length=1024, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    record = Recorded(Echo(tokenizer) if engine == "echo" else model.engine(Policy(model.inner), tokenizer))
    worker = EngineWorker(model, tokenizer, engine=record)  # type: ignore[arg-type]
    chat = ChatHandler(worker, lambda: {"agent": LIVE}, ConversationCache(tokenizer))
    found, client = Flood(), openai.OpenAI(base_url="http://127.0.0.1:1", api_key="-")
    with AgentEndpoint(chat, owned=[worker.close]) as endpoint, ThreadPoolExecutor(clients) as pool:
        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                converse(endpoint, client, number, turns, found, record, engine == "echo")

        def rush(first: int, last: int) -> None:
            numbers = iter(range(first, last))
            for task in [pool.submit(work, numbers) for _ in range(clients)]:
                task.result()

        talks = -(-calls // turns)
        rush(talks, talks + WARM * clients)
        found.memory.clear()
        rush(0, talks)
    return {
        "calls": len(found.memory), "lost": found.lost, "mixed": found.mixed, "inexact": found.inexact,
        "drawn_for_nobody": sum(record.drawn.values()), "trained_tokens": found.trained_tokens,
        "memory_ratio": found.memory_ratio, "errors": found.errors[:3],
    }


def converse(
    endpoint: AgentEndpoint, client: openai.OpenAI, number: int, turns: int, found: Flood, record: Recorded, echo: bool,
) -> None:
    """One conversation in a session of its own, and its trajectory looked at."""
    words: list[str] = []
    messages: list[Any] = []
    with endpoint.session() as session:
        own = client.with_options(base_url=session.base_url, api_key=session.api_key)
        for turn in range(turns):
            words.append(f"w{number}-{turn}-{secrets.token_hex(4)}")
            messages.append({"role": "user", "content": f"Say {words[-1]}"})
            try:
                text = asked(own, messages, stream=number % 2 == 1, **{} if echo else {"max_tokens": 24})
            except openai.OpenAIError as error:
                found.lost += 1
                found.errors.append(f"{type(error).__name__}: {error}")
                return
            found.answered()
            found.mixed += echo and text != f"heard {words[-1]}"
            messages.append({"role": "assistant", "content": text})
    check(endpoint.chat, session.trajectory(), words, found, record)


def asked(client: openai.OpenAI, messages: list[Any], stream: bool, **options: Any) -> str:
    """The text of a reply."""
    create: Any = client.chat.completions.create
    reply = create(model="agent", messages=messages, stream=stream, **options)
    if not stream:
        return str(reply.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)


def check(chat: ChatHandler, trajectory: Trajectory, words: list[str], found: Flood, record: Recorded) -> None:
    """Count what is wrong with a trajectory, and strike its turns off the engine's record."""
    histories = [[turn_of(chat, one) for one in history.messages_and_choices if isinstance(one, Choice)]
                 for history in trajectory.histories]
    turns = histories[0]
    with found.lock:
        found.lost += len(words) - sum(map(len, histories))
        for place, turn in enumerate(turns):
            said = WORD.findall(chat.texts.tokenizer.decode(turn.prompt_ids))
            found.mixed += not set(words[:place + 1]) <= set(said) <= set(words)
    rollout = rollout_of(histories)
    trained = rollout.trained or [True] * len(rollout.completion_ids)
    ids, logprobs = ([one for one, own in zip(values, trained, strict=True) if own]
                     for values in (rollout.completion_ids, rollout.rollout_logprobs))
    with found.lock:
        found.trained_tokens += len(ids)
    for turn in turns:
        own = (ids[:len(turn.completion_ids)], logprobs[:len(turn.completion_ids)])
        ids, logprobs = ids[len(own[0]):], logprobs[len(own[0]):]
        drawn = mark(turn.prompt_ids, *own)
        with record.lock, found.lock:
            found.inexact += not record.drawn[drawn]
            record.drawn[drawn] -= 1
    with found.lock:
        found.inexact += bool(ids) + bool(rollout.splits)


def turn_of(chat: ChatHandler, choice: Choice) -> Turn:
    """The turn that a reply names. LookupError where it is not held."""
    turn = chat.turn(choice.turn)  # type: ignore[attr-defined]
    if turn is None:
        raise LookupError(f"the turn {choice.turn} is not held")  # type: ignore[attr-defined]
    return turn


@pytest.mark.slow
@pytest.mark.parametrize("engine, clients, calls, turns", [("echo", 64, 320, 5), ("model", 16, 48, 3)])
def test_no_call_of_many_at_once_is_lost_or_mixed_up_and_what_is_trained_is_what_was_drawn(
    engine: str, clients: int, calls: int, turns: int,
) -> None:
    found = flood(engine, clients, calls, turns)
    assert found["errors"] == []
    wrong = {name: found[name] for name in ("lost", "mixed", "inexact", "drawn_for_nobody")}
    assert wrong == dict.fromkeys(wrong, 0)
    assert found["calls"] == calls and found["trained_tokens"] >= calls
    if engine == "echo":
        assert found["memory_ratio"] < 1.1
