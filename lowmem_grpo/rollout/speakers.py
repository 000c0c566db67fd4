"""Who speaks in an episode beside the policy: the base model, a person, and those who are told what is said.

Environments ask the base model, which the engine decodes that samples the policy. It has one set of weights at a time,
so all that was asked is decoded together, once half of the episodes in play wait for it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import CONVERSE, Conversation, Request, slots_of
from lowmem_grpo.engines.decoding import converse
from lowmem_grpo.environments.protocol import AskBase
from lowmem_grpo.runs.trajectory import content_text, speaker
from lowmem_grpo.types import Message, Rollout

Heard = Callable[[int, AskBase, str], None]  # (key of the episode, what was asked, the reply)
Tell = Callable[[str, str], None]  # (who, what was said)
CONTEXT = ("system", "user", "tool")


class BaseModelPlayer:
    """The requests of a batch's episodes to the base model, as an engine sees them: a `Conversation`."""

    def __init__(self, heard: Heard, collect: Callable[[bool], None]) -> None:
        """`heard` takes a reply in; `collect` takes in what workers have done (True: after waiting for all)."""
        self.heard, self.collect = heard, collect
        self.waiting: dict[int, tuple[Request, AskBase]] = {}  # by the key of the episode
        self.open: dict[int, AskBase] = {}  # in the engine
        self.temperature = 0.0  # that the requests in the engine have

    def ask(self, request: Request, ask: AskBase) -> None:
        """A question, to be decoded with others; one that leaves no room for a reply gets an empty one at once."""
        if request.max_tokens < 1:
            self.heard(request.key, ask, "")
        else:
            self.waiting[request.key] = (request, ask)

    def next_requests(self, busy: bool) -> list[Request]:
        """Return what can be decoded now; see `Conversation`."""
        self.collect(not busy)
        keys = sorted(key for key, (_, ask) in self.waiting.items() if ask.temperature == self.temperature)
        taken = [self.waiting.pop(key) for key in keys]
        self.open |= {request.key: ask for request, ask in taken}
        return [request for request, _ in taken]

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        self.heard(key, self.open.pop(key), rollout.text)

    def speak(self, engine: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Decode all that is asked, and what is asked meanwhile."""
        with base_model(engine):
            while self.waiting:
                self.temperature = next(iter(self.waiting.values()))[1].temperature
                most = max(ask.max_tokens for _, ask in self.waiting.values())
                params = SamplingParams(n=1, temperature=self.temperature, max_tokens=most)
                converse(engine, self, params, tokenizer)


def base_model(engine: Any) -> AbstractContextManager[Any]:
    """Inside, the engine samples the base model. TypeError for a caller's own engine that cannot."""
    owner: Any = engine if hasattr(engine, "base_model") else getattr(engine, "policy", None)
    if not hasattr(owner, "base_model"):
        raise TypeError(f"the environment asks the base model (AskBase), and the engine {getattr(engine, 'name', '?')} "
                        "has neither base_model() nor policy.base_model(), a context in which it samples without the "
                        "adapter")
    return owner.base_model()


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
        self.name, self.slots = engine.name, slots_of(engine)

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
