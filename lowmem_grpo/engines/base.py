"""The interface between the trainer and a rollout engine."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.types import OnGroup, Rollout

Meanwhile = Callable[[int], None]  # (number of unfinished sequences)
# Optional capabilities beyond `generate(prompts, params)`: two keyword arguments of `generate`, and a method
ON_GROUP, MEANWHILE, CONVERSE = "on_group", "meanwhile", "converse"
EVERYTHING = frozenset({ON_GROUP, MEANWHILE, CONVERSE})
NEEDED = ("name", "kv_bytes", "generate", "on_policy_update", "sleep")  # attributes a user-supplied engine must have


@dataclass(frozen=True)
class Request:
    """A request to sample one turn of an episode."""

    key: int  # identifies the episode, which has at most one turn in the engine at a time
    ids: list[int]  # (P,) the prompt; it extends the tokens of the episode's last turn unless the history was rewritten
    max_tokens: int  # the most tokens to sample
    seed: int  # for this turn's random numbers


class Conversation(Protocol):
    """The source of an engine's requests for turns, to which it returns the sampled turns."""

    def next_requests(self, busy: bool) -> list[Request]:
        """Return the requests that are ready. For a `busy` engine, which has other turns to decode, return at once,
        even if no request is ready. Otherwise block until one is ready; an empty list means that the talk is over."""
        ...

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        """Receive the sampled turn of an episode, in the engine's thread. The episode's next turn may then be ready."""
        ...


class Engine(Protocol):
    """A sampler of completions that uses the trainer's own weights. The trainer imports no engine; it is passed one."""

    name: str
    capabilities: frozenset[str]  # a subset of EVERYTHING; an engine without this attribute has none

    def generate(self, prompts: list[list[int]], params: SamplingParams, on_group: OnGroup | None = None,
                 meanwhile: Meanwhile | None = None) -> list[list[Rollout]]:
        """Sample `params.n` rollouts of each prompt (token ids) with the current policy. Ids are never re-tokenised.

        A sleeping engine wakes itself, and handles a lack of memory then as it does during sampling. The engine calls
        `on_group` in this thread, once per prompt, as soon as all its rollouts are finished, with the same objects that
        it returns at the end. It also calls `meanwhile` in this thread, between decode steps, with the number of
        unfinished sequences. An error raised by either callback ends the call.
        """
        ...

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        """Decode turns until the conversation has no more. `n`, `max_tokens` and `seed` of `params` are ignored: each
        request samples one turn with its own limit and seed.

        Errors and memory are handled as in `generate`: turns lost when an engine dies are decoded again, since a turn
        depends only on its request. An error raised by the conversation ends the call. If a prompt extends the last
        turn of its key, that turn's KV cache is reused where memory allows. If the conversation has a true attribute
        `goes_on`, the next conversation uses the same keys for the same episodes and weights, so the KV cache may be
        kept until the policy changes or the engine sleeps.
        """
        ...

    def on_policy_update(self, policy_version: int) -> None:
        """Drop everything computed with the old weights. The caller has already changed the weights in place."""
        ...

    def sleep(self) -> None:
        """Free everything but the weights, before training."""
        ...

    def wake(self) -> None:
        """Get ready to generate; `generate` does this itself if needed."""
        ...

    # An engine may have an attribute `pace` (`engines/progress.py`), whose timings go into the step's log.

    @property
    def slots(self) -> int | None:
        """The most sequences decoded together; None for no limit, as for a user-supplied engine without the attribute.
        """
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache that the engine holds now, or the peak of its last call."""
        ...

    def close(self) -> None:
        """Free everything that the engine owns."""
        ...


def check_own_engine(engine: Any) -> None:
    """Raise TypeError if a user-supplied engine lacks an attribute that every run uses."""
    if lacking := [name for name in NEEDED if not hasattr(engine, name)]:
        raise TypeError(f"engine is a {type(engine).__name__} without {', '.join(lacking)}; an engine has "
                        f"{', '.join(NEEDED)} (see lowmem_grpo/engines/base.py), and says in `capabilities` what "
                        "else it can do")


def capabilities_of(engine: Any) -> frozenset[str]:
    """Return the engine's declared capabilities; none for a user-supplied engine that declares nothing."""
    return frozenset(getattr(engine, "capabilities", ()))
