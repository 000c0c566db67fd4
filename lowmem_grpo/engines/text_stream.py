"""The text of a completion while it is sampled, for replies that are sent or printed as they come."""

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Request
from lowmem_grpo.engines.decoding import cut_at_stop, first_stop
from lowmem_grpo.types import Rollout

PART = "�"  # a tokenizer's text for bytes that are no whole character
ONE_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")  # a token of tokenizers with a byte fallback


class TextStream:
    """Decodes tokens as they come. It gives whole characters, and nothing that may become part of a stop string, so the
    pieces together are the text of the finished completion.

    The text of a token depends on the token before it, so the tokens since the last piece but one are decoded again.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams, until: frozenset[int] = frozenset(), strips: bool = False
                 ) -> None:
        """No text is given after a token of `until`, and with `strips` no white space at the end of what is given."""
        self.tokenizer, self.params, self.until, self.strips = tokenizer, params, until, strips
        self.ids: list[int] = []  # of the last piece and of what came after it
        self.known = 0  # how many of `ids` are those of the last piece
        self.held = ""  # decoded, and not given yet
        self.given = ""
        model = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__
        # True: no more text is given before the end, as after a stop string. Tokenizers that are not BPE may tidy up
        # spaces in the whole text
        self.waits = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False)) and model != "BPE"

    def add(self, ids: list[int]) -> str:
        """Return the text that these further tokens bring, as far as nothing after them can change it."""
        self.ids += ids
        self.waits = self.waits or not self.until.isdisjoint(ids)
        if self.waits or not ids or self.is_cut(text := self.decode(self.ids)):
            return ""
        before = self.decode(self.ids[: self.known])
        if len(text) > len(before):
            self.held += text[len(before):]
            self.ids, self.known = self.ids[self.known:], len(self.ids) - self.known
        return self.give(self.ready())

    def finish(self, text: str) -> str:
        """Return the rest of the completion's whole text. RuntimeError if the text does not begin as was given."""
        if not text.startswith(self.given):
            raise RuntimeError("the completion had to be sampled again, and its text does not begin as was sent")
        self.held = text[len(self.given):]
        return self.give(len(self.held))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens))

    def is_cut(self, text: str) -> bool:
        """Return whether the tokens may end inside a character."""
        return text.endswith(PART) or bool(ONE_BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(self.ids[-1]))))

    def ready(self) -> int:
        """Return how many characters of `held` are neither part of a stop string nor may become one."""
        if first_stop(self.held, self.params) is not None:
            self.waits = True
            return len(cut_at_stop(self.held, self.params))
        open_ = (size for stop in self.params.stop_strings for size in range(1, min(len(stop), len(self.held) + 1))
                 if self.held.endswith(stop[:size]))
        ready = self.held[: len(self.held) - max(open_, default=0)]
        return len(ready.rstrip() if self.strips else ready)

    def give(self, count: int) -> str:
        piece, self.held = self.held[:count], self.held[count:]
        self.given += piece
        return piece


class AnswersInOrder:
    """The `Conversation` of an engine that samples n answers to one prompt side by side. Their texts are passed to
    `say` one after the other: the first as it comes, and each later one up to where it is, and then as it comes.

    The engine waits for `say`."""

    def __init__(self, ids: list[int], params: SamplingParams, tokenizer: Any, say: Callable[[str], None]) -> None:
        seeds = params.seeds or [random.getrandbits(62) for _ in range(params.n)]
        self.ready = [Request(place, ids, params.max_tokens, seed, partial(self.hear, place))
                      for place, seed in enumerate(seeds)]
        self.streams = [TextStream(tokenizer, params) for _ in seeds]
        self.unsaid = [""] * params.n
        self.now, self.ended, self.say = 0, set[int](), say

    def next_requests(self, busy: bool) -> list[Request]:
        ready, self.ready = self.ready, []
        return ready

    def hear(self, place: int, ids: list[int], logprobs: list[float]) -> bool:
        self.put(place, self.streams[place].add(ids))
        return True

    def add_rollout(self, key: int, rollout: Rollout) -> None:
        self.put(key, self.streams[key].finish(rollout.text) + "\n")
        self.ended.add(key)
        while self.now in self.ended and self.now + 1 < len(self.unsaid):
            self.now += 1
            self.put(self.now, "")

    def put(self, place: int, text: str) -> None:
        """Pass an answer's text on if its turn has come; else keep it."""
        self.unsaid[place] += text
        if place == self.now and self.unsaid[place]:
            self.say(self.unsaid[place])
            self.unsaid[place] = ""
