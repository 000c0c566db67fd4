"""A flood of requests at an endpoint: whether every call is answered, with its own reply, token for token.

    python -m bench.agents.load                            # 64 clients, 2,000 calls, an engine that echoes
    python -m bench.agents.load --engine model --calls 512 # the embedded model of the games

64 threads hold conversations of several turns with the `openai` client, every second one streamed, each conversation in
a session of its own. Each message has a word that no other request has. `lost` counts calls without a reply; `mixed`
replies and prompts with another request's word, or without their own; `inexact` turns whose trained tokens or
log-probabilities are not those that the engine drew, by a record made in the engine. `memory_ratio` is the resident
memory in the last quarter of the calls over that in the first, median over median; four conversations of each client
go before, which fill the caches. They are checked like the others, and are not among the calls.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
import openai
from openai.types.chat.chat_completion import Choice
from rich.console import Console

from bench.agents.engines import WORD, Echo, Recorded, mark
from bench.common import options, tables
from bench.common.rows import append_row, machine
from lowmem_grpo import FastLanguageModel
from lowmem_grpo.agents.endpoint import AgentEndpoint
from lowmem_grpo.agents.trajectories import Trajectory
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.from_turns import rollout_of
from lowmem_grpo.service.call import LIVE
from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.types import Turn
from lowmem_grpo.units import MIB

RESULTS = Path(__file__).resolve().parents[1] / "results" / "agents_load.jsonl"
STATM = Path("/proc/self/statm")
PAGE = 4096  # bytes
TARGET = 1.05  # of memory
WARM = 4  # conversations of each client before: the engine keeps rows of twice as many conversations as go on at once
console = Console(width=120)


@dataclass
class Flood:
    """What came of it."""

    seconds: list[float] = field(default_factory=list)  # of each call
    memory: list[int] = field(default_factory=list)  # bytes after each call
    lost: int = 0
    mixed: int = 0
    inexact: int = 0
    trained_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, seconds: float) -> None:
        with self.lock:
            self.seconds.append(seconds)
            self.memory.append(int(STATM.read_text().split()[1]) * PAGE)

    @property
    def memory_ratio(self) -> float:
        quarter = len(self.memory) // 4
        return median(self.memory[-quarter:]) / median(self.memory[:quarter])


def flood(engine: str, clients: int, calls: int, turns: int, tokens: int = 24) -> dict[str, Any]:
    """Figures of a flood by the engine "echo" or "model"."""
    bare, tokenizer = FastLanguageModel.from_pretrained("tiny-games", max_seq_length=1024, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    record = Recorded(Echo(tokenizer) if engine == "echo" else model.engine(Policy(model.inner), tokenizer))
    desk = Desk(model, tokenizer, engine=record)  # type: ignore[arg-type]
    chat = Chat(desk, tokenizer, lambda: {"agent": LIVE}, max_turn_tokens=tokens if engine == "model" else None)
    found, client = Flood(), openai.OpenAI(base_url="http://127.0.0.1:1", api_key="-")
    with AgentEndpoint(chat, owned=[desk.close]) as endpoint, ThreadPoolExecutor(clients) as pool:
        def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                converse(endpoint, client, number, turns, found, record, engine == "echo")

        def rush(first: int, last: int) -> float:
            numbers, start = iter(range(first, last)), time.perf_counter()
            for worker in [pool.submit(work, numbers) for _ in range(clients)]:
                worker.result()
            return time.perf_counter() - start

        talks = -(-calls // turns)
        rush(talks, talks + WARM * clients)
        found.seconds.clear()
        found.memory.clear()
        wall = rush(0, talks)
    left = sum(record.drawn.values())
    return {
        "engine": engine, "clients": clients, "calls": len(found.seconds), "turns": turns, "lost": found.lost,
        "mixed": found.mixed, "inexact": found.inexact, "drawn_for_nobody": left,
        "trained_tokens": found.trained_tokens, "memory_ratio": round(found.memory_ratio, 4),
        "memory_mib": round(median(found.memory) / MIB), "calls_a_second": round(len(found.seconds) / wall, 2),
        "median_seconds": round(median(found.seconds), 4),
        "p95_seconds": round(quantiles(found.seconds, n=20)[-1], 4), "errors": found.errors[:3],
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
            start = time.perf_counter()
            try:
                text = asked(own, messages, stream=number % 2 == 1)
            except openai.OpenAIError as error:
                found.lost += 1
                found.errors.append(f"{type(error).__name__}: {error}")
                return
            found.answered(time.perf_counter() - start)
            found.mixed += echo and text != f"heard {words[-1]}"
            messages.append({"role": "assistant", "content": text})
    check(endpoint.chat, session.trajectory(), words, found, record)


def asked(client: openai.OpenAI, messages: list[Any], stream: bool) -> str:
    """The text of a reply."""
    create: Any = client.chat.completions.create
    reply = create(model="agent", messages=messages, stream=stream)
    if not stream:
        return str(reply.choices[0].message.content)
    return "".join(chunk.choices[0].delta.content or "" for chunk in reply if chunk.choices)


def check(chat: Chat, trajectory: Trajectory, words: list[str], found: Flood, record: Recorded) -> None:
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


def turn_of(chat: Chat, choice: Choice) -> Turn:
    """The turn that a reply names. LookupError where it is not held."""
    turn = chat.turn(choice.turn)  # type: ignore[attr-defined]
    if turn is None:
        raise LookupError(f"the turn {choice.turn} is not held")  # type: ignore[attr-defined]
    return turn


@click.command(help=__doc__)
@click.option("--engine", default="echo", show_default=True, type=click.Choice(["echo", "model"]))
@click.option("--clients", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--calls", default=2000, show_default=True, type=click.IntRange(min=8), help="Of all clients together.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(min=1), help="Calls of a conversation.")
@click.option("--tokens", default=24, show_default=True, type=click.IntRange(min=1), help="Of a reply of the model.")
@options.output(RESULTS)
def main(engine: str, clients: int, calls: int, turns: int, tokens: int, output: Path) -> None:
    where = machine(("lowmem-grpo", "torch", "transformers", "openai", "fastapi", "uvicorn"))
    row = flood(engine, clients, calls, turns, tokens)
    append_row(output, row | where)
    shown = ("engine", "clients", "calls", "lost", "mixed", "inexact", "drawn_for_nobody", "memory_ratio",
             "calls_a_second", "median_seconds", "p95_seconds")
    console.print(tables.terminal(None, shown, [[str(row[name]) for name in shown]]),
                  f"target: none lost, mixed or inexact; memory_ratio at most {TARGET:g}")


if __name__ == "__main__":
    main()
