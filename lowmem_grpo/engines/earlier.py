"""Answers of earlier epochs, for guesses of the next ones to the same prompt."""

from array import array
from collections import OrderedDict
from hashlib import blake2b

OF_A_PROMPT = 16_384  # tokens that are kept of the answers to one prompt, the newest answers
OF_ALL = 4_000_000  # tokens that are kept in all, of 4 bytes each


class EarlierAnswers:
    """Answers by their prompt; those to the prompts that were sampled longest ago are dropped first."""

    def __init__(self, of_a_prompt: int = OF_A_PROMPT, of_all: int = OF_ALL) -> None:
        self.of_a_prompt, self.of_all = of_a_prompt, of_all
        self.known: OrderedDict[bytes, list[array[int]]] = OrderedDict()
        self.tokens = 0  # that are kept

    def of(self, prompt: list[int]) -> list[list[int]]:
        """The answers that are kept of a prompt, the oldest first."""
        return [answer.tolist() for answer in self.known.get(key_of(prompt), [])]

    def add(self, prompt: list[int], answers: list[list[int]]) -> None:
        """Keep the newest answers, with the older ones that there is room for."""
        key = key_of(prompt)
        before = self.known.pop(key, [])
        kept: list[array[int]] = []
        room = self.of_a_prompt
        for answer in [*(array("i", ids) for ids in reversed(answers)), *reversed(before)]:
            if len(answer) > room:
                break
            kept.insert(0, answer)
            room -= len(answer)
        self.tokens += sum(map(len, kept)) - sum(map(len, before))
        self.known[key] = kept
        while self.tokens > self.of_all:
            _, oldest = self.known.popitem(last=False)
            self.tokens -= sum(map(len, oldest))


def key_of(prompt: list[int]) -> bytes:
    """A prompt as a short key."""
    return blake2b(array("i", prompt).tobytes(), digest_size=16).digest()
