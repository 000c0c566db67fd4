"""E-mails to a shop, each with one question and what the shop knows, generated with an ideal reply.

    Ines writes: "How long is the warranty of the lantern?"
    You know: the lantern costs 84 euros; the warranty of the lantern lasts 18 months; 7 pieces of the lantern are left.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_grpo.recipes.problems.splits import distinct, split_of

KNOWN = 3  # facts in a request; the question is about one of them
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
    """An e-mail, and what the shop knows."""

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
        """The perfect reply."""
        return f"Dear {self.recipient},\n\n{self.fact[0].upper()}{self.fact[1:]}.\n\n{SIGNATURE}"

    @property
    def split(self) -> str:
        return split_of(self.text)


def draw_request(rng: random.Random) -> Request:
    """A random question about a thing, with different kinds of facts about it in a random order."""
    thing, numbers = rng.choice(THINGS), rng.sample(range(3, 1000), KNOWN)
    drawn = list(zip(rng.sample(KINDS, KNOWN), numbers, strict=True))
    (question, fact, keyword), n = rng.choice(drawn)
    return Request(
        rng.choice(NAMES), question.format(thing=thing),
        tuple(form.format(thing=thing, n=number) for (_, form, _), number in drawn),
        fact.format(thing=thing, n=n), keyword.format(n=n),
    )


def requests(split: str, seed: int) -> Iterator[Request]:
    """Different requests of one split."""
    return distinct(split, seed, draw_request)
