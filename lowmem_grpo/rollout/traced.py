"""Episodes that somebody follows or plays: engines that tell what is said, and one whose turns a person types."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import CONVERSE, Conversation, Request
from lowmem_grpo.rollout.base_model_player import base_model
from lowmem_grpo.runs.trajectory import content_text, speaker
from lowmem_grpo.types import Message, Rollout

Tell = Callable[[str, str], None]  # (who, what was said)
CONTEXT = ("system", "user", "tool")


class HumanEngine:
    """An engine without a model: each turn is a text that `ask` returns."""

    name, slots, capabilities = "person", 1, frozenset({CONVERSE})

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ask: Callable[[], str]) -> None:
        self.tokenizer, self.ask = tokenizer, ask

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        while requests := conversation.next_requests(busy=False):
            for request in requests:
                conversation.add_rollout(request.key, self.turn(request))

    def turn(self, request: Request) -> Rollout:
        """Return the person's words, cut where a turn may have no more tokens; log-probabilities are 0."""
        text = self.ask()
        ids = self.tokenizer(text, add_special_tokens=False).input_ids or [self.tokenizer.eos_token_id]
        kept = ids[: request.max_tokens]
        return Rollout(kept, [0.0] * len(kept), "stop" if kept == ids else "length", text)


class Watched:
    """An engine whose episodes are told while they are played."""

    capabilities = frozenset({CONVERSE})

    def __init__(self, engine: Any, tell: Tell, who: str = "", base: Callable[[], Any] | None = None) -> None:
        """`who` says the engine's turns; without a name they are not told. `base` speaks for the base model."""
        self.engine, self.tell, self.who = engine, tell, who
        self.base = base or (lambda: engine)
        self.asked: Any = None  # the engine that speaks for the base model now
        self.name, self.slots = engine.name, getattr(engine, "slots", None)

    def converse(self, conversation: Any, params: SamplingParams) -> None:
        """Decode as `Engine.converse` does, and tell it. What the base model says is for the environment only."""
        if self.asked is not None:
            self.asked.converse(conversation, params)
        else:
            self.engine.converse(TracedConversation(conversation, self), params)

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Inside, the base model speaks."""
        engine = self.base()
        with base_model(engine):
            self.asked = engine
            try:
                yield
            finally:
                self.asked = None


class TracedConversation:
    """A conversation between an engine and a batch of episodes."""

    def __init__(self, batch: Any, ear: Watched) -> None:
        self.batch, self.ear = batch, ear

    def next_requests(self, busy: bool) -> list[Request]:
        """The next turns; before each, what led to it is told."""
        requests: list[Request] = self.batch.next_requests(busy)
        for request in requests:
            episode = self.batch.live[request.key]
            self.say(episode.turns[-1].replies if episode.turns else episode.opening)
        return requests

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        if self.ear.who:
            self.ear.tell(self.ear.who, rollout.text)
        self.batch.add_rollout(key, rollout)

    def say(self, messages: list[Message]) -> None:
        for message in messages:
            if message.get("role") in CONTEXT and (text := content_text(message)):
                self.ear.tell(speaker(message), text)
