"""Speakers in episodes besides the policy (the base model, a person), and an engine wrapper that reports all messages.
The engine has one set of weights at a time, so questions to the base model are decoded together, once half of the
episodes in play wait for replies."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import CONVERSE, Conversation, Request
from lowmem_grpo.engines.decoding import converse
from lowmem_grpo.environments.protocol import AskBase
from lowmem_grpo.runs.trajectory import content_text, speaker
from lowmem_grpo.types import Rollout

Heard = Callable[[int, AskBase, str], None]  # (key of the episode, what was asked, the reply)
Tell = Callable[[str, str], None]  # (who, what was said)
CONTEXT = ("system", "user", "tool")


class BaseModelPlayer:
    """The questions that a batch's episodes ask the base model, as a `Conversation` for the engine."""

    def __init__(self, heard: Heard, collect: Callable[[bool], None]) -> None:
        """`heard` gets each reply. `collect(wait)` processes workers' results, and may wait for them."""
        self.heard, self.collect = heard, collect
        self.waiting: dict[int, tuple[Request, AskBase]] = {}  # questions by episode key
        self.open: dict[int, AskBase] = {}  # questions that the engine is decoding, by episode key
        self.temperature = 0.0  # for the questions that the engine is decoding

    def ask(self, request: Request, ask: AskBase) -> None:
        """Queue a question. If it leaves no room for a reply, answer it with an empty reply at once."""
        if request.max_tokens < 1:
            self.heard(request.key, ask, "")
        else:
            self.waiting[request.key] = (request, ask)

    def next_requests(self, busy: bool) -> list[Request]:
        """Return the waiting questions that have the current decoding temperature; see `Conversation`."""
        self.collect(not busy)
        keys = sorted(key for key, (_, ask) in self.waiting.items() if ask.temperature == self.temperature)
        taken = [self.waiting.pop(key) for key in keys]
        self.open |= {request.key: ask for request, ask in taken}
        return [request for request, _ in taken]

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        self.heard(key, self.open.pop(key), rollout.text)

    def speak(self, engine: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Decode all waiting questions, and questions asked meanwhile, one temperature after the other."""
        with base_model(engine):
            while self.waiting:
                self.temperature = next(iter(self.waiting.values()))[1].temperature
                most = max(ask.max_tokens for _, ask in self.waiting.values())
                params = SamplingParams(n=1, temperature=self.temperature, max_tokens=most)
                converse(engine, self, params, tokenizer)


def base_model(engine: Any) -> AbstractContextManager[Any]:
    """Let the engine sample the base model in this context. TypeError if a user-supplied engine cannot do that."""
    owner: Any = engine if hasattr(engine, "base_model") else getattr(engine, "policy", None)
    if not hasattr(owner, "base_model"):
        raise TypeError(f"the environment asks the base model (AskBase), and the engine {getattr(engine, 'name', '?')} "
                        "has neither base_model() nor policy.base_model(), a context in which it samples without the "
                        "adapter")
    return owner.base_model()


class HumanEngine:
    """An engine without a model: each turn is a person's text, returned by `ask`."""

    name, slots, capabilities = "person", 1, frozenset({CONVERSE})

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ask: Callable[[], str]) -> None:
        self.tokenizer, self.ask = tokenizer, ask

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        while requests := conversation.next_requests(busy=False):
            for request in requests:
                text = self.ask()
                ids = self.tokenizer(text, add_special_tokens=False).input_ids or [self.tokenizer.eos_token_id]
                kept = ids[: request.max_tokens]
                conversation.add_rollout(request.key, Rollout(  # the log-probabilities are not known
                    kept, [0.0] * len(kept), "stop" if kept == ids else "length", text))


class Watched:
    """An engine wrapper that reports what is said in episodes while they are played."""

    capabilities = frozenset({CONVERSE})

    def __init__(self, engine: Any, tell: Tell, who: str = "", base: Callable[[], Any] | None = None) -> None:
        """`tell` is called with (speaker, text). `who` names the speaker of the engine's turns; if it is empty, these
        turns are not reported. `base` returns the engine that samples the base model, by default `engine`."""
        self.engine, self.tell, self.who = engine, tell, who
        self.base = base or (lambda: engine)
        self.asked: Any = None  # the engine that samples the base model; None outside `base_model`
        self.name, self.slots = engine.name, getattr(engine, "slots", None)

    def converse(self, conversation: Any, params: SamplingParams) -> None:
        """Decode as `Engine.converse` does, and report the messages, except the base model's replies."""
        if self.asked is not None:
            self.asked.converse(conversation, params)
        else:
            self.engine.converse(TracedConversation(conversation, self), params)

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """Let `converse` sample the base model in this context."""
        engine = self.base()
        with base_model(engine):
            self.asked = engine
            try:
                yield
            finally:
                self.asked = None


class TracedConversation:
    """A wrapper of an EpisodeBatch that reports the messages between its episodes and the engine."""

    def __init__(self, batch: Any, ear: Watched) -> None:
        self.batch, self.ear = batch, ear

    def next_requests(self, busy: bool) -> list[Request]:
        """Return the next turns, after reporting the messages that lead to each."""
        requests: list[Request] = self.batch.next_requests(busy)
        for request in requests:
            episode = self.batch.live[request.key]
            for message in episode.turns[-1].replies if episode.turns else episode.opening:
                if message.get("role") in CONTEXT and (text := content_text(message)):
                    self.ear.tell(speaker(message), text)
        return requests

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        if self.ear.who:
            self.ear.tell(self.ear.who, rollout.text)
        self.batch.add_rollout(key, rollout)
