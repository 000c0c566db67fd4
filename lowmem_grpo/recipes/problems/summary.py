"""Short reports to summarize, generated with the facts that a summary must keep.

    The harbour of Aldermouth published its figures for June. 74 ships called there, 37 more than a year before. ...

A report is a kind and its facts. Sentences that say nothing worth keeping stand between those with facts.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_grpo.recipes.problems.splits import distinct

WORDS_ALLOWED = 40
QUESTION = (
    "Sum up this report in one paragraph of at most {words} words. Keep every number and every name.\n\n{report}"
)
PLACES = ("Aldermouth", "Brackwater", "Cindervale", "Dunmarsh", "Eastholm", "Fernwick", "Greyford", "Hollowmere",
          "Ivybridge", "Kettlesham", "Larkfield", "Mossgate", "Northwold", "Otterbourne", "Pinecrest", "Ravensby")
MONTHS = ("January", "April", "June", "September", "October", "November")
GOODS = ("timber", "salt", "wool", "copper", "barley", "slate", "cement", "paper")
FILLER = ("As in other years, the figures were awaited with some interest.",
          "Opinions on what this means for the time to come differ.",
          "A longer version of this report can be read at the town hall.",
          "The weather was neither better nor worse than usual at that time of the year.",
          "Nobody wished to comment on details, which are still being looked at.",
          "Those who took part were thanked for their patience.")
KINDS = (
    ("The harbour of {place} published its figures for {month}.",
     "{a} ships called there, {b} more than a year before.",
     "They unloaded {c} tons of {goods}.", "Repairs of the northern quay cost {d} crowns."),
    ("The mill of {place} had an unusual {month}.",
     "It worked on {a} shifts and used {c} tons of {goods}.",
     "{b} machines stood still because of a broken belt.", "The new belt cost {d} crowns."),
    ("In {month} the railway opened its new line to {place}.",
     "{c} passengers travelled on it in the first week, on {a} trains.",
     "{b} of these trains were late.", "A wagon of {goods} that was lost on the way was worth {d} crowns."),
    ("The warehouse of {place} was counted in {month}.",
     "{c} sacks of {goods} were found on {a} shelves.",
     "{b} sacks were damp and had to go.", "The loss was put at {d} crowns."),
)
RANGES = {"a": (20, 99), "b": (3, 19), "c": (1100, 9900), "d": (120, 990)}  # no two facts of a report are equal


@dataclass(frozen=True)
class Report:
    """The number of its kind, and its facts."""

    kind: int
    place: str
    month: str
    goods: str
    a: int
    b: int
    c: int
    d: int

    @property
    def facts(self) -> tuple[str, ...]:
        return (self.place, self.month, self.goods, str(self.a), str(self.b), str(self.c), str(self.d))

    @property
    def text(self) -> str:
        told = [sentence.format(**vars(self)) for sentence in KINDS[self.kind]]
        rng = random.Random(repr(self))
        for sentence in rng.sample(FILLER, 3):
            told.insert(rng.randint(1, len(told)), sentence)
        return " ".join(told)

    @property
    def question(self) -> str:
        return QUESTION.format(words=WORDS_ALLOWED, report=self.text)

    @property
    def summary(self) -> str:
        """A summary that keeps every fact, in fewer words."""
        return f"{self.place}, {self.month}: {' '.join(KINDS[self.kind][1:])}".format(**vars(self))


def draw_report(rng: random.Random) -> Report:
    numbers = {name: rng.randint(*bounds) for name, bounds in RANGES.items()}
    return Report(rng.randrange(len(KINDS)), rng.choice(PLACES), rng.choice(MONTHS), rng.choice(GOODS), **numbers)


def reports(split: str, seed: int) -> Iterator[Report]:
    """Different reports of one split, without end."""
    return distinct(split, seed, draw_report, repr)


def share_kept(text: str, facts: list[str]) -> float:
    """The share of facts that stand in a text as whole words or numbers; 1,240 counts as 1240."""
    plain = re.sub(r"(?<=\d)[, ](?=\d{3}\b)", "", text).lower()
    words = set(re.findall(r"\d+|[^\W\d_]+", plain))
    return sum(fact.lower() in words for fact in facts) / len(facts)


def is_short(text: str) -> bool:
    return len(text.split()) <= WORDS_ALLOWED
