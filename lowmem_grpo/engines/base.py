"""What the trainer asks of a rollout engine, and what every engine keeps: finished prompts, and lengths of answers."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean
from typing import Any, Protocol

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.types import Rollout

OnGroup = Callable[[int, list[Rollout]], None]  # (index of a prompt, all its rollouts)
Meanwhile = Callable[[int], None]  # (sequences that are still decoded)
# What an engine may be able to do beside `generate(prompts, params)`: the names of arguments, and of a method
ON_GROUP, MEANWHILE, CONVERSE = "on_group", "meanwhile", "converse"
EVERYTHING = frozenset({ON_GROUP, MEANWHILE, CONVERSE})
MOST_PROMPTS = 100_000  # that are remembered, at about 150 bytes each


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

    # An engine may have an attribute `pace` (`engines/pace.py`), from which a step's log takes where its time went.

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


def capabilities_of(engine: Any) -> frozenset[str]:
    return frozenset(getattr(engine, "capabilities", ()))


class Calls:
    """The calls that an engine makes to its caller while it samples, and whether one failed."""

    failed_outside: Exception | None = None  # an error of our own code or of the caller's, not of the engine

    @contextmanager
    def outside_the_engine(self) -> Iterator[None]:
        """An error raised inside is not the engine's: a new engine would meet it again."""
        try:
            yield
        except Exception as error:
            self.failed_outside = error
            raise


class FinishedPrompts(Calls):
    """The rollouts of the prompts that are finished. Each prompt is reported once, even if the call starts again."""

    def __init__(self, prompts: int, on_group: OnGroup | None, meanwhile: Meanwhile | None = None) -> None:
        self.prompts, self.on_group, self.meanwhile = prompts, on_group, meanwhile
        self.rollouts: dict[int, list[Rollout]] = {}

    def add(self, prompt: int, rollouts: list[Rollout]) -> None:
        """Keep and report all rollouts of a prompt."""
        assert prompt not in self.rollouts, prompt
        self.rollouts[prompt] = rollouts
        if self.on_group is not None:
            self.on_group(prompt, rollouts)

    def between(self, running: int) -> None:
        """Two steps of decoding are apart, and so many sequences are not finished."""
        if self.meanwhile is not None and running:
            with self.outside_the_engine():
                self.meanwhile(running)

    @property
    def missing(self) -> list[int]:
        return [prompt for prompt in range(self.prompts) if prompt not in self.rollouts]

    def result(self) -> list[list[Rollout]]:
        """The rollouts of all prompts, in the order of the prompts."""
        return [self.rollouts[prompt] for prompt in range(self.prompts)]


class ExpectedLengths:
    """Mean lengths of the last answers to each prompt; prompts that were sampled longest ago are forgotten first.

    Where not all sequences have room at once, those that will be long are begun first, as the call ends with those that
    were begun last. Nothing that is drawn depends on the order.
    """

    def __init__(self, most: int = MOST_PROMPTS) -> None:
        self.most = most
        self.known: OrderedDict[bytes, float] = OrderedDict()

    def note(self, prompt: list[int], lengths: list[int]) -> None:
        key = key_of(prompt)
        self.known[key] = fmean(lengths)
        self.known.move_to_end(key)
        if len(self.known) > self.most:
            self.known.popitem(last=False)

    def order(self, prompts: list[list[int]]) -> list[int]:
        """The places of the prompts, the longest expected first. One that was never answered counts as the mean of the
        others; equals stay in the given order, as all do where nothing is known."""
        means = [self.known.get(key_of(prompt)) for prompt in prompts]
        usual = fmean([length for length in means if length is not None] or [0.0])
        lengths = [usual if length is None else length for length in means]
        return sorted(range(len(prompts)), key=lambda place: -lengths[place])


def key_of(prompt: list[int]) -> bytes:
    return blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
