"""A desk whose engine says what a script says, and the chat over it."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from scripted import TEMPLATE, ScriptedEngine
from template_tokenizers import tokenizer_of

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Conversation, OnGroup, Request
from lowmem_grpo.service.call import LIVE, Call
from lowmem_grpo.service.chat import Chat
from lowmem_grpo.service.desk import Desk
from lowmem_grpo.types import Rollout


class DeskEngine(ScriptedEngine):
    """A scripted engine with all that a desk asks for. A `gate` that is cleared holds up each round."""

    def __init__(self, says: Callable[[str], str], template: str = TEMPLATE, slots: int | None = None) -> None:
        super().__init__(says)
        self.tokenizer, self.slots = tokenizer_of(template), slots
        self.gate, self.began = threading.Event(), threading.Event()
        self.gate.set()
        self.rounds: list[tuple[float, int]] = []  # of each: temperature, turns
        self.requests: list[Request] = []
        self.slept = self.version = self.conversations = 0

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None
    ) -> list[list[Rollout]]:
        self.rounds.append((params.temperature, len(prompts)))
        self.began.set()
        assert self.gate.wait(60)
        found = super().generate(prompts, params, on_group)
        self.asked.clear()
        return found

    def answer(self, prompt: list[int], most: int) -> Rollout:
        found = super().answer(prompt, most)
        found.policy_version = self.version
        return found

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        self.conversations += 1
        super().converse(Noted(conversation, self), params)

    def on_policy_update(self, policy_version: int) -> None:
        self.version = policy_version

    def sleep(self) -> None:
        self.slept += 1


class Noted:
    """A conversation whose last requests the engine remembers."""

    def __init__(self, inner: Conversation, engine: DeskEngine) -> None:
        self.inner, self.engine, self.give = inner, engine, inner.give

    def take(self, busy: bool) -> list[Request]:
        found = self.inner.take(busy)
        self.engine.requests = [*self.engine.requests[-99:], *found]
        return found


def scripted_desk(says: Callable[[str], str] = lambda prompt: "Yes.", context: int = 4096, seed: int = 0,
                  **more: Any) -> Desk:
    """A desk; `desk.engine` is a DeskEngine. Close it."""
    engine: Any = DeskEngine(says, **more)
    weight = torch.empty(len(engine.tokenizer), 0)
    model = SimpleNamespace(loaded=SimpleNamespace(tokenizer=engine.tokenizer, max_seq_length=context), inner=None)
    policy: Any = SimpleNamespace(head=SimpleNamespace(weight=weight))
    return Desk(model, policy=policy, engine=engine, seed=seed)


def chat_over(desk: Desk, **more: Any) -> Chat:
    """Its chat; the live model is called "agent"."""
    return Chat(desk, desk.tokenizer, lambda: {"agent": LIVE}, **more)


def call_of(desk: Desk, text: str, temperature: float = 1.0, **more: Any) -> Call:
    """A call with this prompt."""
    ids = desk.tokenizer(text, add_special_tokens=False).input_ids
    return Call(ids, SamplingParams(max_tokens=64, temperature=temperature), **more)
