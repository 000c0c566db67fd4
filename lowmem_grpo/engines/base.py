"""What the trainer asks of a rollout engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.types import Rollout

OnGroup = Callable[[int, list[Rollout]], None]  # (index of a prompt, all its rollouts)
Meanwhile = Callable[[int], None]  # (sequences that are still decoded)
# What an engine may be able to do beside `generate(prompts, params)`: the names of arguments, and of a method
ON_GROUP, MEANWHILE, CONVERSE = "on_group", "meanwhile", "converse"
EVERYTHING = frozenset({ON_GROUP, MEANWHILE, CONVERSE})
NEEDED = ("name", "kv_bytes", "generate", "on_policy_update", "sleep")  # what every run uses of a caller's engine


@dataclass(frozen=True)
class Request:
    """One turn that is asked for."""

    key: int  # names the episode, which has at most one turn in the engine at a time
    ids: list[int]  # (P,) the prompt; they begin with those of its last turn, unless the history was rewritten
    max_tokens: int  # that may be drawn
    seed: int  # for its random numbers


class Conversation(Protocol):
    """The source from which an engine gets turns to draw, and to which it gives them back."""

    def next_requests(self, busy: bool) -> list[Request]:
        """Return what can be decoded now. A `busy` engine has other turns to decode and gets what is there at once;
        another waits for the next, and an empty list tells it that there are no more."""
        ...

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        """The turn of an episode is drawn. Called in the engine's thread; it may make the next turn ready."""
        ...


class Engine(Protocol):
    """Samples completions with the trainer's own weights. The trainer is given one and imports none."""

    name: str
    capabilities: frozenset[str]  # a part of EVERYTHING; an engine without this attribute has none

    def generate(self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None,
                 meanwhile: Meanwhile | None = None) -> list[list[Rollout]]:
        """Sample `params.n` rollouts of each prompt (token ids) with the current policy. Ids are never re-tokenised.

        A sleeping engine wakes itself; if that runs out of memory, it reacts as it does in sampling. The engine calls
        `on_group` in this thread, once for each prompt, as soon as all rollouts of the prompt are finished. It passes
        the same objects that it returns in the end. It calls `meanwhile` in this thread, too, between two steps of
        decoding, with the number of sequences that are not finished. An error raised by either ends the call.
        """
        ...

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        """Decode turns until the conversation has no more. Of `params`, n, max_tokens and seed are not used: each
        request has its own.

        Errors and memory are handled as in `generate`: turns that were lost with an engine are decoded again, since a
        turn depends on nothing but its request. An error raised by the conversation ends the call. What was computed of
        a prompt that continues the last turn of its key is not computed again, where memory allows. A conversation with
        a true attribute `goes_on` may be taken up by the next one: its keys stand for the same episodes and the same
        weights there, so what was computed may be kept until the policy changes or the engine sleeps.
        """
        ...

    def on_policy_update(self, policy_version: int) -> None:
        """The weights changed in place: forget what was computed with the old ones."""
        ...

    def sleep(self) -> None:
        """Free everything but the weights, before training."""
        ...

    def wake(self) -> None:
        """Get ready to generate; `generate` would do it as well."""
        ...

    # An engine may have an attribute `pace` (`engines/progress.py`), from which a step's log takes where its time went.

    @property
    def slots(self) -> int | None:
        """Sequences that are decoded together at most; None is no bound."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of key-value cache: those held now, or the peak of the last generation."""
        ...

    def close(self) -> None:
        """Free everything that the engine owns."""
        ...


def check_own_engine(engine: Any) -> None:
    """Raise TypeError where a caller's own engine lacks what every run uses."""
    if lacking := [name for name in NEEDED if not hasattr(engine, name)]:
        raise TypeError(f"engine is a {type(engine).__name__} without {', '.join(lacking)}; an engine has "
                        f"{', '.join(NEEDED)} (see lowmem_grpo/engines/base.py), and says in `capabilities` what "
                        "else it can do")


def capabilities_of(engine: Any) -> frozenset[str]:
    """Return what an engine says that it can do; nothing for a caller's own that does not say."""
    return frozenset(getattr(engine, "capabilities", ()))


def slots_of(engine: Any) -> int | None:
    """Return how many sequences an engine decodes together; None, no bound, for a caller's own that does not say."""
    slots: int | None = getattr(engine, "slots", None)
    return slots
