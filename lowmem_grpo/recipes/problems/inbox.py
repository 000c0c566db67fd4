"""A generated mailbox, and questions of which one mail holds the answer. The same seed gives the same mails."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from itertools import product

from lowmem_grpo.recipes.problems.inbox_worlds import WORLDS, Kind, MailWorld
from lowmem_grpo.recipes.problems.splits import check_split, split_of

FIRST_DAY, DAYS = date(2026, 1, 5), 300


@dataclass(frozen=True)
class Mail:
    """A message; what is empty is not shown."""

    sender: str
    recipient: str
    date: str
    subject: str
    body: str


@dataclass(frozen=True)
class Question:
    """A question, and the id of the only mail that answers it."""

    text: str
    answer: str
    source: int


@dataclass(frozen=True)
class Mailbox:
    """Mails, of which the first has the id 1, and questions about them."""

    mails: tuple[Mail, ...]
    questions: tuple[Question, ...]

    def of_split(self, split: str) -> list[Question]:
        """The questions to train on ("train"), or those held out ("test")."""
        check_split(split)
        return [question for question in self.questions if split_of(question.text) == split]


@dataclass(frozen=True)
class Fact:
    """Something that one mail tells, and perhaps an older one otherwise."""

    topic: str
    kind: Kind
    value: str


@cache
def mailbox(name: str, seed: int = 0) -> Mailbox:
    """The mailbox "small" or "large" of a seed. Raises ValueError for another name."""
    check_name(name)
    world, rng = WORLDS[name], random.Random(f"{name}-{seed}")
    pairs = rng.sample(list(product(world.topics, world.kinds)), world.facts)
    facts = [Fact(topic, kind, kind.value(rng)) for topic, kind in pairs]
    mails = [*told(world, facts, rng), *((noise(world, rng), None) for _ in range(world.noise))]
    order = sorted(range(len(mails)), key=lambda place: (mails[place][0].date, rng.random()))
    questions = []
    for number, place in enumerate(order, 1):
        if (fact := mails[place][1]) is not None:
            asked = rng.choice(fact.kind.questions).format(topic=fact.topic)
            questions.append(Question(asked, fact.value, number))
    rng.shuffle(questions)
    return Mailbox(tuple(mails[place][0] for place in order), tuple(questions))


def check_name(name: str) -> None:
    """Raise ValueError for a mailbox that does not exist."""
    if name not in WORLDS:
        raise ValueError(f"mailbox is {name!r}; allowed: {', '.join(WORLDS)}")


def told(world: MailWorld, facts: list[Fact], rng: random.Random) -> Iterator[tuple[Mail, Fact | None]]:
    """A mail for each fact, with the fact; for some also an older mail that is out of date, without one."""
    for fact in facts:
        newest = rng.randrange(DAYS)
        if rng.random() < world.revised and newest:
            yield mail_of(world, fact, other_value(fact, rng), rng.randrange(newest), rng), None
        yield mail_of(world, fact, fact.value, newest, rng), fact


def other_value(fact: Fact, rng: random.Random) -> str:
    while (value := fact.kind.value(rng)) == fact.value:
        pass
    return value


def mail_of(world: MailWorld, fact: Fact, value: str, day: int, rng: random.Random) -> Mail:
    sentence = rng.choice(fact.kind.sentences).format(topic=fact.topic, value=value)
    return written(world, rng.choice(fact.kind.subjects).format(topic=fact.topic), fact.topic, [sentence], day, rng)


def noise(world: MailWorld, rng: random.Random) -> Mail:
    topic, kind = rng.choice(world.topics), rng.choice(world.kinds)
    return written(world, rng.choice(kind.subjects).format(topic=topic), topic, [], rng.randrange(DAYS), rng)


def written(world: MailWorld, subject: str, topic: str, sentences: list[str], day: int, rng: random.Random) -> Mail:
    """A mail with these sentences, and with others around them where the world has any."""
    sender, recipient = rng.sample(world.people, 2)
    if not world.fillers:
        return Mail(sender, "", "", subject, " ".join(sentences))
    around = [filler.format(person=rng.choice(world.people), topic=rng.choice((topic, rng.choice(world.topics))))
              for filler in rng.sample(world.fillers, rng.randint(2, 5))]
    place = rng.randint(0, len(around))
    text = " ".join([*around[:place], *sentences, *around[place:]])
    body = f"Dear {recipient.split()[0]},\n\n{text}\n\nBest regards\n{sender.split()[0]}"
    return Mail(sender, recipient, (FIRST_DAY + timedelta(days=day)).isoformat(), subject, body)
