"""E-mails to a shop, each with one question, and what the shop knows: generated, with the reply that would be perfect.

    Ines writes: "How long is the warranty of the lantern?"
    You know: the lantern costs 84 euros; the warranty of the lantern lasts 18 months; 7 pieces of the lantern are left.

A request belongs to "test" or "train" by a hash of its text alone, so that the two never share one, whatever the seeds.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

SPLITS = ("train", "test")
TEST_SHARE = 8  # one request in eight is a test request
KNOWN = 3  # facts in a request, one of which is asked for
SIGNATURE = "Best regards,\nYour shop"
NAMES = ("Ines", "Tomas", "Aisha", "Jonas", "Mei", "Pavel", "Lucia", "Omar", "Hanna", "Ravi", "Elsa", "Kofi")
THINGS = ("lantern", "tent", "kettle", "bicycle pump", "rucksack", "alarm clock", "desk lamp", "hammock", "compass",
          "thermos flask", "folding chair", "raincoat")
KINDS = (  # question, fact, keyword
    ("What does the {thing} cost?", "the {thing} costs {n} euros", "{n} euros"),
    ("How long is the warranty of the {thing}?", "the warranty of the {thing} lasts {n} months", "{n} months"),
    ("How many pieces of the {thing} do you have?", "{n} pieces of the {thing} are left", "{n} pieces"),
    ("How long does the repair of a {thing} take?", "the repair of a {thing} takes {n} days", "{n} days"),
    ("How heavy is the {thing}?", "the {thing} weighs {n} grams", "{n} grams"),
)


@dataclass(frozen=True)
class Request:
    """An e-mail and what is known about it."""

    recipient: str
    question: str
    facts: tuple[str, ...]
    fact: str
    """The one that answers the question."""
    keyword: str

    @property
    def text(self) -> str:
        return f'{self.recipient} writes: "{self.question}"\nYou know: {"; ".join(self.facts)}.'

    @property
    def ideal(self) -> str:
        """The reply that would be perfect."""
        return f"Dear {self.recipient},\n\n{self.fact[0].upper()}{self.fact[1:]}.\n\n{SIGNATURE}"

    @property
    def split(self) -> str:
        return "test" if zlib.crc32(self.text.encode()) % TEST_SHARE == 0 else "train"


def draw_request(rng: random.Random) -> Request:
    """A random question about a thing, with facts of it in a random order; no two facts are of a kind."""
    thing, numbers = rng.choice(THINGS), rng.sample(range(3, 1000), KNOWN)
    drawn = list(zip(rng.sample(KINDS, KNOWN), numbers, strict=True))
    (question, fact, keyword), n = rng.choice(drawn)
    return Request(
        rng.choice(NAMES), question.format(thing=thing),
        tuple(form.format(thing=thing, n=number) for (_, form, _), number in drawn),
        fact.format(thing=thing, n=n), keyword.format(n=n),
    )


def requests(split: str, seed: int) -> Iterator[Request]:
    """Endless distinct requests of one split ("train" or "test")."""
    if split not in SPLITS:
        raise ValueError(f'split is {split!r}; allowed are "train" and "test"')
    rng = random.Random(f"{split}-{seed}")
    seen: set[Request] = set()
    while True:
        request = draw_request(rng)
        if request.split == split and request not in seen:
            seen.add(request)
            yield request
