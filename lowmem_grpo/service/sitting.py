"""`Sitting`: the calls of one flavour, as an engine sees them."""

import itertools
import logging
import time

from lowmem_grpo.engines.base import Engine, Request
from lowmem_grpo.service.call import LIVE, Call
from lowmem_grpo.service.waiting import NO_ROUND, Asked, Round, Waiting
from lowmem_grpo.types import Rollout, Turn

logger = logging.getLogger(__name__)
MOST = 4096  # conversations that are remembered; an engine keeps fewer


class Keys:
    """Numbers that never stand for two conversations, nor for two sets of weights, so that what an engine computed for
    one is never taken for another's."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.known: dict[tuple[object, ...], int] = {}  # by adapter, the caller's key, sitting; the latest used last

    def new(self) -> int:
        return next(self.numbers)

    def of(self, call: Call, sitting: int) -> int:
        """Return the number of a call's conversation. That of a saved adapter has another one in each sitting, since
        its folder may be written anew in between."""
        if call.key is None:
            return self.new()
        name = (call.adapter, call.key, None if call.adapter in (LIVE, None) else sitting)
        self.known[name] = number = self.known.pop(name) if name in self.known else self.new()
        if len(self.known) > MOST:
            del self.known[next(iter(self.known))]
        return number


class Sitting:
    """A `Conversation` of an engine. It ends where anything else waits, once the calls in the engine are finished."""

    goes_on = True  # in a later sitting

    def __init__(
        self, waiting: Waiting, flavour: tuple[object, ...], keys: Keys, before: Round = NO_ROUND,
    ) -> None:
        """`before` is a round of an earlier sitting, its calls and its seconds: as many may come again."""
        self.waiting, self.flavour, self.keys, self.number = waiting, flavour, keys, keys.new()
        self.before, self.widest = before, NO_ROUND  # `widest` is the round of this sitting with the most calls
        self.open: dict[int, Asked] = {}
        self.engine: Engine | None = None
        self.begun = False
        self.back, self.since = 0, time.monotonic()  # callers that were served since the engine took calls, and when

    def meet(self, engine: Engine) -> None:
        self.engine = engine

    def take(self, busy: bool) -> list[Request]:
        """See `Conversation`. Calls that were cancelled meanwhile are left out."""
        self.widest = max(self.widest, self.last)
        while taken := self.waiting.take(self.flavour, self.room, not busy, not self.begun, *self.expected):
            self.begun, self.back, self.since = True, 0, time.monotonic()
            if requests := [self.enter(asked) for asked in taken if not asked.future.cancelled()]:
                return requests
        return []

    def give(self, key: int, rollout: Rollout) -> None:
        """The turn of a call is drawn. One that was cancelled is dropped."""
        asked = self.open.pop(key)
        self.back += 1
        if asked.future.set_running_or_notify_cancel():
            asked.future.set_result(turn_of(asked.call, rollout))

    def fail(self, error: BaseException) -> None:
        """The engine failed: its calls are told; where there are none, those that wait for the same."""
        left = list(self.open.values()) or self.waiting.drain(self.flavour)
        self.open.clear()
        logger.warning("%d calls failed with the engine: %s: %s", len(left), type(error).__name__, error)
        for asked in left:
            if asked.future.set_running_or_notify_cancel():
                asked.future.set_exception(error)

    def check_done(self) -> None:
        """RuntimeError where an engine ended the conversation without all of its turns."""
        if self.open:
            name = getattr(self.engine, "name", self.engine)
            raise RuntimeError(f"the engine {name} did not answer {len(self.open)} of its calls")

    @property
    def room(self) -> int | None:
        """Calls that the engine can decode now beside those that it has; None is no bound."""
        slots = getattr(self.engine, "slots", None)  # a caller's own engine may not say
        return None if slots is None else max(0, slots - len(self.open))

    @property
    def last(self) -> Round:
        """The callers that were served since the engine took calls, and the seconds since then."""
        return self.back, time.monotonic() - self.since

    @property
    def expected(self) -> tuple[Round, Round]:
        """Rounds that may come again, which an engine that decodes in rounds should wait a moment for: of the callers
        that may be back at once, and the widest one that was seen."""
        if self.engine is None or self.engine.name == "vllm":
            return NO_ROUND, NO_ROUND
        return self.last, max(self.before, self.widest)

    def enter(self, asked: Asked) -> Request:
        """A call as the engine takes it; of each key one at a time."""
        call = asked.call
        key = self.keys.of(call, self.number)
        if key in self.open:
            key = self.keys.new()
        self.open[key] = asked
        return Request(key, call.ids, call.params.max_tokens, asked.seed)


def turn_of(call: Call, rollout: Rollout) -> Turn:
    """A completion as the turn of its call. The version is the live policy's, that of the call's adapter, or -1 for the
    base model, which is no policy of the run."""
    usual = -1 if call.adapter is None else 0
    version = rollout.policy_version if call.adapter == LIVE else usual if call.version is None else call.version
    return Turn(call.ids, rollout.completion_ids, rollout.rollout_logprobs, rollout.finish_reason, rollout.text,
                version, rollout.cached_tokens, exact=call.params.temperature == 1 and not call.params.truncates,
                routes=rollout.routes)
