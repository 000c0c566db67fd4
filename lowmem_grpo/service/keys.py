"""`Keys`: by which an engine knows the conversations of a desk, over all of its sittings."""

import itertools

from lowmem_grpo.service.call import LIVE, Call

MOST = 4096  # conversations that are remembered; an engine keeps fewer


class Keys:
    """Numbers that never stand for two conversations, nor for two sets of weights, so that what an engine computed for
    one is never taken for another's."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.known: dict[tuple[object, ...], int] = {}  # by adapter, the caller's key, sitting; the latest used last

    def new(self) -> int:
        """A number of nobody's."""
        return next(self.numbers)

    def of(self, call: Call, sitting: int) -> int:
        """The number of a call's conversation. That of a saved adapter has another one in each sitting, since its
        folder may be written anew in between."""
        if call.key is None:
            return self.new()
        name = (call.adapter, call.key, None if call.adapter in (LIVE, None) else sitting)
        self.known[name] = number = self.known.pop(name) if name in self.known else self.new()
        if len(self.known) > MOST:
            del self.known[next(iter(self.known))]
        return number
