"""The interface between the trainer and a rollout engine, and what the engines share: the finished prompts of a call,
the expected lengths of completions, and the time per phase."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, Self

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.memory.time_plan import TAIL
from lowmem_grpo.types import OnGroup, Rollout

Meanwhile = Callable[[int], None]  # (number of unfinished sequences)
OnTokens = Callable[[list[int], list[float]], bool]  # (new tokens, their log-probabilities); False ends the turn
# Optional capabilities beyond `generate(prompts, params)`: two keyword arguments of `generate`, and a method
ON_GROUP, MEANWHILE, CONVERSE = "on_group", "meanwhile", "converse"
EVERYTHING = frozenset({ON_GROUP, MEANWHILE, CONVERSE})
NEEDED = ("name", "kv_bytes", "generate", "on_policy_update", "sleep")  # attributes a user-supplied engine must have
MOST_PROMPTS = 100_000  # prompts whose lengths are remembered, at about 150 bytes each
# The phases of a call's time: prefill, decode steps with many sequences, and the tail, when few are left to decode
PHASES = ("prefill", "full", "tail")


@dataclass(frozen=True)
class Request:
    """A request to sample one turn of an episode."""

    key: int  # identifies the episode, which has at most one turn in the engine at a time
    ids: list[int]  # (P,) the prompt; it extends the tokens of the episode's last turn unless the history was rewritten
    max_tokens: int  # the most tokens to sample
    seed: int  # for this turn's random numbers
    on_tokens: OnTokens | None = None  # is called as tokens are sampled, in the engine's thread, and must not wait
    begun: Rollout | None = None  # the first tokens of the completion, which an earlier request sampled


class Conversation(Protocol):
    """The source of an engine's requests to sample turns, and the receiver of the sampled turns."""

    def next_requests(self, busy: bool) -> list[Request]:
        """Return the requests that are ready. If the engine is `busy` (it has other turns to decode), return at once,
        even without a request. Otherwise wait for one; an empty list then ends the conversation."""
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

        A sleeping engine wakes itself. If memory runs out, while waking or sampling, the engine tries again in less
        memory. Once all rollouts of a prompt are finished, the engine passes them to `on_group`, in the caller's
        thread. The returned lists hold the same objects. Between decode steps, the engine calls `meanwhile` with the
        number of unfinished sequences, also in the caller's thread. An error raised by either callback ends the call.
        """
        ...

    def converse(self, conversation: Conversation, params: SamplingParams) -> None:
        """Decode turns until the conversation has no more. `n`, `max_tokens` and `seed` of `params` are ignored: each
        request samples one turn with its own limit and seed.

        Errors and a lack of memory are handled as in `generate`: turns lost when an engine dies are decoded again,
        since a turn depends only on its request. An error raised by the conversation ends the call. A request's
        `on_tokens` gets the tokens of its unfinished turn, never a token twice; if it returns False, the turn ends with
        the tokens that it has, as if they were all that was asked for. An engine with `resumes` takes such
        a turn as the `begun` of a later request, and samples on behind it. If a prompt extends the previous turn
        with the same key, that turn's KV cache is reused where memory allows. If the conversation's attribute `goes_on`
        is true, the next conversation uses the same keys for the same episodes and weights, so the KV cache may be kept
        until the policy changes or the engine sleeps. Its method `awaited()`, if it has one, returns the keys of
        interrupted turns that will go on, whose KV cache is kept first.
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

    # An engine may have an attribute `pace` (a `Pace`), whose timings go into the step's log.

    @property
    def slots(self) -> int | None:
        """The most sequences decoded together; None for no limit, or if a user-supplied engine lacks this attribute."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache, for the log: those held now (vLLM), or the peak of the last call (transformers engine)."""
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


class Calls:
    """The base class of objects that track an engine call. It records errors raised by the caller's callback, so that
    they are not taken for errors of the engine."""

    failed_outside: Exception | None = None  # an error raised by our own code or the caller's, not by the engine

    @contextmanager
    def outside_the_engine(self) -> Iterator[None]:
        """Record that an error in this context is not the engine's, so that the call is not repeated."""
        try:
            yield
        except Exception as error:
            self.failed_outside = error
            raise


class FinishedPrompts(Calls):
    """The rollouts of a call's finished prompts. `on_group` gets each prompt once, even if the engine restarts."""

    def __init__(self, prompts: int, on_group: OnGroup | None, meanwhile: Meanwhile | None = None) -> None:
        self.prompts, self.on_group, self.meanwhile = prompts, on_group, meanwhile
        self.rollouts: dict[int, list[Rollout]] = {}

    def add(self, prompt: int, rollouts: list[Rollout]) -> None:
        assert prompt not in self.rollouts, prompt
        self.rollouts[prompt] = rollouts
        if self.on_group is not None:
            self.on_group(prompt, rollouts)

    def between(self, running: int) -> None:
        """Call `meanwhile` with the number of `running` sequences, unless it is 0."""
        if self.meanwhile is not None and running:
            with self.outside_the_engine():
                self.meanwhile(running)

    @property
    def missing(self) -> list[int]:
        return [prompt for prompt in range(self.prompts) if prompt not in self.rollouts]

    def result(self) -> list[list[Rollout]]:
        assert not self.missing, f"the device reported no end of prompts {self.missing}"
        return [self.rollouts[prompt] for prompt in range(self.prompts)]


class ExpectedLengths:
    """The mean completion length of each prompt when last sampled. Prompts sampled longest ago are forgotten first.

    If an engine cannot decode all sequences at once, the sequences expected to be longest start first, so that no long
    sequence decodes alone at the end. The sampled tokens do not depend on the order.
    """

    def __init__(self) -> None:
        self.known: OrderedDict[int, float] = OrderedDict()  # by the hash of a prompt's tokens

    def note_groups(self, prompts: list[list[int]], groups: list[list[Rollout]]) -> None:
        for prompt, rollouts in zip(prompts, groups, strict=True):
            key = hash(tuple(prompt))
            self.known[key] = fmean(len(rollout.completion_ids) for rollout in rollouts)
            self.known.move_to_end(key)
            if len(self.known) > MOST_PROMPTS:
                self.known.popitem(last=False)

    def order(self, prompts: list[list[int]]) -> list[int]:
        """Return the prompts' indices, longest expected completion first. Ties keep their order. A prompt of unknown
        length is expected to have the mean of the known lengths."""
        means = [self.known.get(hash(tuple(prompt))) for prompt in prompts]
        usual = fmean([length for length in means if length is not None] or [0.0])
        lengths = [usual if length is None else length for length in means]
        return sorted(range(len(prompts)), key=lambda place: -lengths[place])


class Pace:
    """Seconds and tokens per phase since `pop_measured`. Engines call `step` when they wait for the device anyway."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.tokens = dict.fromkeys(PHASES, 0)  # prompt tokens computed in prefill, else tokens drawn
        self.preemptions = 0  # sequences evicted for lack of KV cache, which are recomputed
        self.most = 0  # the most sequences that ran together
        self.start_call()

    def start_call(self) -> None:
        """Begin a call. Steps that decode few sequences, compared with the call's largest batch, count as its tail."""
        self.widest = 0
        self.resume()

    def resume(self) -> None:
        """Restart the clock: the time until now was not spent in the engine."""
        self.mark, self.reading = time.perf_counter(), False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside this context from the measurements."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.mark += time.perf_counter() - began

    def read(self, tokens: int) -> None:
        """Note that the next `step` also computes `tokens` prompt tokens, so that its time counts as prefill."""
        self.reading = True
        self.tokens["prefill"] += tokens

    def step(self, running: int, drawn: int | None = None) -> None:
        """Note the end of a decode step of `running` sequences, which drew `drawn` tokens (None: one each)."""
        now = time.perf_counter()
        self.widest = max(self.widest, running)
        self.most = max(self.most, running)
        phase = "prefill" if self.reading else "tail" if running < TAIL * self.widest else "full"
        self.seconds[phase] += now - self.mark
        if not self.reading:
            self.tokens[phase] += running if drawn is None else drawn
        self.mark, self.reading = now, False

    def add(self, other: "Pace") -> None:
        for phase in PHASES:
            self.seconds[phase] += other.seconds[phase]
            self.tokens[phase] += other.tokens[phase]
        self.preemptions += other.preemptions
        self.most = max(self.most, other.most)

    def pop_measured(self) -> Self:
        taken = copy(self)
        self.seconds, self.tokens = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0)
        self.preemptions = self.most = 0
        return taken

    def metrics(self) -> dict[str, float]:
        """Return values for the log: seconds and tokens per second of each phase, the share of the time spent in tails
        (see `start_call`), the most sequences decoded together, and preemptions. Empty if nothing ran."""
        if not self.most:
            return {}
        seconds = {f"time/sampling/{name}_s": spent for name, spent in self.seconds.items()}
        speeds = {f"tokens_per_second/{name}": self.tokens[name] / spent
                  for name, spent in self.seconds.items() if spent}
        share = self.seconds["tail"] / max(sum(self.seconds.values()), 1e-9)
        return {**seconds, "time/sampling/tail_share": share, **speeds,
                "sampling/most_together": self.most, "sampling/preemptions": self.preemptions}
