"""A flood of requests at the endpoint: every call gets its own reply, token for token.

Many threads hold conversations of several turns with the `openai` client, every second one streamed, each conversation
in a session of its own. Each message has a word that no other request has. `lost` counts calls without a reply; `mixed`
replies and prompts with another request's word, or without their own; `inexact` turns whose trained tokens or
log-probabilities are not those that the engine drew, by a record made at the engine. `memory_ratio` is the resident
memory in the last quarter of the calls over that in the first, median over median; four conversations of each client
go before, which fill the caches. They are checked like the others, and are not among the calls.
"""

import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai.types.chat.chat_completion import Choice
from served import chat_over, scripted_worker

from lowmem_grpo import FastLanguageModel
from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.trajectories import Trajectory
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, Request
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.rollout_func import rollout_of
from lowmem_grpo.server.openai.engine_worker import EngineWorker
from lowmem_grpo.types import Rollout

STATM = Path("/proc/self/statm")
WARM = 4  # conversations of each client before: the engine keeps rows of twice as many conversations as go on at once
SECONDS = 120  # until a call without a reply counts as lost; no conversation begins after it
WORD = re.compile(r"w\d+-\d+-[0-9a-f]{8}")  # what each request has of its own


def echoing() -> EngineWorker:
    """A worker whose engine answers with the last word of the prompt that is like WORD."""
    return scripted_worker(lambda prompt: f"heard {WORD.findall(prompt)[-1]}", context=1024)


def sampling() -> EngineWorker:
    """A worker with a model, whose engine samples."""
    bare, tokenizer = FastLanguageModel.from_pretrained("tiny-games", max_seq_length=1024, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    return EngineWorker(model, tokenizer, engine=model.engine(Policy(model.inner), tokenizer))


def mark(prompt: list[int], completion: list[int], logprobs: list[float]) -> int:
    """What stands for a turn in the record."""
    return hash((tuple(prompt), tuple(completion), tuple(logprobs)))


class Flood:
    """Conversations with a worker, and what came of them."""

    def __init__(self, worker: EngineWorker, echoes: bool, turns: int) -> None:
        self.worker, self.chat, self.echoes, self.turns = worker, chat_over(worker), echoes, turns
        self.client = openai.OpenAI(base_url="http://127.0.0.1:1", api_key="-", timeout=SECONDS, max_retries=0)
        self.lock = threading.Lock()
        self.drawn: Counter[int] = Counter()  # turns that the engine drew, and that no trajectory has
        self.wrong: Counter[str] = Counter(lost=0, mixed=0, inexact=0)
        self.trained_tokens, self.errors = 0, list[str]()
        self.memory: list[int] = []  # pages after each call
        self.converse = worker.engine.converse
        worker.engine.converse = self.noted  # type: ignore[method-assign]

    def noted(self, conversation: Conversation, params: SamplingParams) -> None:
        """Let the engine serve a conversation, and note each turn on its way."""
        prompts: dict[int, list[int]] = {}

        def next_requests(busy: bool) -> list[Request]:
            requests = conversation.next_requests(busy)
            prompts.update({request.key: list(request.ids) for request in requests})
            return requests

        def add_rollout(key: int, rollout: Rollout) -> None:
            with self.lock:
                self.drawn[mark(prompts.pop(key), rollout.completion_ids, rollout.rollout_logprobs)] += 1
            conversation.add_rollout(key, rollout)

        noting: Any = SimpleNamespace(next_requests=next_requests, add_rollout=add_rollout)
        self.converse(noting, params)

    def run(self, clients: int, calls: int) -> None:
        talks = -(-calls // self.turns)
        with AgentEndpoint(self.chat, owned=[self.worker.close]) as endpoint, ThreadPoolExecutor(clients) as pool:
            for first, last in ((talks, talks + WARM * clients), (0, talks)):
                self.memory.clear()
                numbers = iter(range(first, last))
                for task in [pool.submit(self.work, endpoint, numbers) for _ in range(clients)]:
                    task.result()

    def work(self, endpoint: AgentEndpoint, numbers: Iterator[int]) -> None:
        """Hold conversations, each in a session of its own, and look at their trajectories."""
        for number in numbers:
            if self.errors:
                return
            words = [f"w{number}-{turn}-{secrets.token_hex(4)}" for turn in range(self.turns)]
            messages: list[Any] = []
            with endpoint.session() as session:
                client = self.client.with_options(base_url=session.base_url, api_key=session.api_key)
                for word in words:
                    messages.append({"role": "user", "content": f"Say {word}"})
                    text = self.ask(client, messages, stream=number % 2 == 1)
                    messages.append({"role": "assistant", "content": text})
                    with self.lock:
                        self.memory.append(int(STATM.read_text().split()[1]))
                        self.wrong["mixed"] += self.echoes and text != f"heard {word}"
            self.check(session.trajectory(), words)

    def ask(self, client: openai.OpenAI, messages: list[Any], stream: bool) -> str:
        """Return the text of a reply; empty, and noted, where none comes."""
        create: Any = client.chat.completions.create
        try:
            reply = create(model="agent", messages=messages, stream=stream, max_tokens=64 if self.echoes else 24)
            if not stream:
                return str(reply.choices[0].message.content)
            return "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)
        except openai.OpenAIError as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return ""

    def check(self, trajectory: Trajectory, words: list[str]) -> None:
        """Count what is wrong with a trajectory, and strike its turns off the record."""
        histories = [[self.chat.turn(one.turn) for one in history.messages_and_choices  # type: ignore[attr-defined]
                      if isinstance(one, Choice)] for history in trajectory.histories]
        turns = [turn for turn in histories[0] if turn is not None]
        rollout = rollout_of([turns])
        own = [place for place, one in enumerate(rollout.trained or [True] * len(rollout.completion_ids)) if one]
        with self.lock:
            self.wrong["lost"] += len(words) - len(turns)
            self.trained_tokens += len(own)
            for number, turn in enumerate(turns):
                said = set(WORD.findall(self.chat.texts.tokenizer.decode(turn.prompt_ids)))
                self.wrong["mixed"] += not set(words[:number + 1]) <= said <= set(words)
                places, own = own[:len(turn.completion_ids)], own[len(turn.completion_ids):]
                drawn = mark(turn.prompt_ids, *([values[place] for place in places] for values in (
                    rollout.completion_ids, rollout.rollout_logprobs)))
                self.wrong["inexact"] += not self.drawn[drawn]
                self.drawn[drawn] -= 1
            self.wrong["inexact"] += bool(own) + bool(rollout.splits)

    @property
    def memory_ratio(self) -> float:
        quarter = len(self.memory) // 4
        return median(self.memory[-quarter:]) / median(self.memory[:quarter])


@pytest.mark.slow
@pytest.mark.parametrize(("echoes", "clients", "calls", "turns"), [(True, 64, 320, 5), (False, 16, 48, 3)])
def test_no_call_of_many_at_once_is_lost_or_mixed_up_and_what_is_trained_is_what_was_drawn(
    echoes: bool, clients: int, calls: int, turns: int
) -> None:
    flood = Flood(echoing() if echoes else sampling(), echoes, turns)
    flood.run(clients, calls)
    assert flood.errors == []
    assert flood.wrong == {"lost": 0, "mixed": 0, "inexact": 0} and flood.drawn.total() == 0
    assert len(flood.memory) == calls and flood.trained_tokens >= calls
    assert not echoes or flood.memory_ratio < 1.1
