"""`BaseModelPlayer`: what environments ask the base model, decoded by the engine that samples the policy. It has one
set of weights at a time, so all that was asked is decoded together, once half of the episodes in play wait for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Request
from lowmem_grpo.engines.decoding import converse
from lowmem_grpo.environments.observations import AskBase
from lowmem_grpo.types import Rollout

Heard = Callable[[int, AskBase, str], None]  # (key of the episode, what was asked, the reply)


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
