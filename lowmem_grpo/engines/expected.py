"""How long answers to a prompt were, so that those that will be long are begun first.

Where not all sequences have room at once, the call ends with those that were begun last. If these are long, they run
almost alone. Nothing that is drawn depends on the order.
"""

from array import array
from collections import OrderedDict
from hashlib import blake2b
from statistics import fmean

MOST_PROMPTS = 100_000  # that are remembered, at about 150 bytes each


class ExpectedLengths:
    """Mean lengths of the last answers to each prompt; prompts that were sampled longest ago are forgotten first."""

    def __init__(self, most: int = MOST_PROMPTS) -> None:
        self.most = most
        self.known: OrderedDict[bytes, float] = OrderedDict()

    def note(self, prompt: list[int], lengths: list[int]) -> None:
        """The answers to a prompt (token ids) had so many tokens."""
        key = key_of(prompt)
        self.known.pop(key, None)
        self.known[key] = fmean(lengths)
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
    """A prompt as a short key."""
    return blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
