"""A generated mailbox, and questions that exactly one of its mails answers. The same seed gives the same mails."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cache
from itertools import product

from lowmem_grpo.recipes.tasks import check_split, split_of

FIRST_NAMES = ("Ines", "Tomas", "Aisha", "Jonas", "Mei", "Pavel", "Lucia", "Omar", "Hanna", "Ravi", "Elsa", "Kofi",
               "Clara", "Yusuf", "Marta", "Henrik")
LAST_NAMES = ("Weber", "Rossi", "Okafor", "Lindgren", "Tanaka", "Novak", "Moreau", "Silva", "Haddad", "Kowalski",
              "Brandt", "Fischer", "Ivers", "Castell", "Duarte", "Eriksen")
COLOURS = ("Silver", "Amber", "Copper", "Crimson", "Violet", "Golden", "Ivory", "Scarlet", "Cobalt", "Emerald",
           "Indigo", "Russet", "Maroon", "Olive", "Pearl", "Onyx")
PLACES = ("Harbour", "Meadow", "Bridge", "Summit", "Lantern", "Orchard", "Canyon", "Glacier", "Island", "Forest",
          "Valley", "Beacon", "Delta", "Prairie", "Quarry", "Fjord")
COMPANIES = ("Nordwind", "Almeida Tools", "Hexagon Parts", "Brightwell", "Kestrel Supply", "Tallinn Works",
             "Orion Freight", "Maple Instruments", "Quintar", "Zephyr Metals", "Lakeside Printing", "Ostra Cables")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")
# for the small mailbox: short, because a small model must copy them
SHORT_NAMES = ("Falcon", "Harbor", "Cedar", "Comet", "Ember", "Garnet", "Heron", "Jasper", "Kite", "Lotus", "Maple",
               "Nova", "Pearl", "Quartz", "Raven", "Tulip", "Viper", "Willow", "Yarrow", "Acorn")
SHORT_THINGS = ("budget", "price", "weight", "length", "height", "score", "team", "room", "floor", "desk", "rent",
                "debt", "profit", "stock", "volume", "speed", "rate", "limit", "target", "width", "depth", "margin",
                "bonus", "fee", "tax")


@dataclass(frozen=True)
class Kind:
    """A kind of fact: how it is asked for, how a mail states it, and its values."""

    questions: tuple[str, ...]  # with {topic}
    subjects: tuple[str, ...]  # with {topic}
    sentences: tuple[str, ...]  # with {topic} and {value}
    value: Callable[[random.Random], str]


@dataclass(frozen=True)
class MailWorld:
    """The contents of a mailbox: its topics, its people, and the number of its mails."""

    topics: tuple[str, ...]
    kinds: tuple[Kind, ...]
    people: tuple[str, ...]
    facts: int  # number of (topic, kind) pairs that have a fact
    noise: int = 0  # mails without a fact that anyone asks for
    revised: float = 0.0  # share of the facts that an older mail contradicts
    fillers: tuple[str, ...] = field(default=())  # sentences around a fact; without them mails have no date either
    calls: int = 4  # tool calls allowed for a question
    results: int = 3  # per search
    snippet: int = 0  # words of a mail in a search result


def amount(rng: random.Random) -> str:
    return f"{50 * rng.randint(21, 1999):,} euros"


def day(rng: random.Random) -> str:
    return f"{rng.randint(1, 28)} {rng.choice(MONTHS)}"


def clock(rng: random.Random) -> str:
    return f"{rng.randint(8, 17)}:{rng.choice(('00', '15', '30', '45'))}"


def person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def number(low: int, high: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randint(low, high))


KINDS = (
    Kind(("How much money may be spent on {topic}?", "What is the budget of {topic}?"),
         ("Budget of {topic}", "{topic}: money"),
         ("The budget of {topic} is {value}.", "For {topic} the board approved a budget of {value}."), amount),
    Kind(("By which day must {topic} be finished?", "What is the deadline of {topic}?"),
         ("Deadline of {topic}", "{topic}: schedule"),
         ("The deadline of {topic} is {value}.", "{topic} has to be finished by {value}, that is the deadline."), day),
    Kind(("Who leads {topic}?", "Who is responsible for {topic}?"), ("Lead of {topic}", "{topic}: who does what"),
         ("From now on {value} leads {topic}.", "{value} is responsible for {topic} and leads the team."), person),
    Kind(("In which room does the team of {topic} meet?", "Where is the meeting about {topic}?"),
         ("Meeting about {topic}", "{topic}: room"),
         ("The meeting about {topic} is in room {value}.", "Room {value} is booked for the meeting about {topic}."),
         lambda rng: f"{rng.randint(1, 9)}.{rng.randint(10, 59)}"),
    Kind(("When does the weekly call about {topic} begin?", "At what time is the weekly call about {topic}?"),
         ("Weekly call about {topic}", "{topic}: call"),
         ("The weekly call about {topic} begins at {value}.", "Please join the weekly call about {topic} at {value}."),
         clock),
    Kind(("Which company supplies the parts for {topic}?", "Who is the supplier of {topic}?"),
         ("Supplier of {topic}", "{topic}: parts"),
         ("{value} is the supplier of {topic}.", "The parts for {topic} come from {value}, our new supplier."),
         lambda rng: rng.choice(COMPANIES)),
    Kind(("What is the number of the invoice for {topic}?", "Which number does the invoice for {topic} have?"),
         ("Invoice for {topic}", "{topic}: invoice"),
         ("The invoice for {topic} has the number {value}.", "Please pay invoice {value}, it is for {topic}."),
         number(10000, 99999)),
    Kind(("How many people take part in the workshop about {topic}?", "How many seats does {topic}'s workshop need?"),
         ("Workshop about {topic}", "{topic}: seats"),
         ("{value} people take part in the workshop about {topic}.", "The workshop on {topic} needs {value} seats."),
         number(3, 90)),
    Kind(("How many hours did the team work on {topic} last month?", "How many hours were booked on {topic}?"),
         ("Hours of {topic}", "{topic}: time sheet"),
         ("The team booked {value} hours on {topic} last month.", "Last month {value} hours went into {topic}."),
         number(11, 990)),
)
FILLERS = (
    "I hope that you had a good weekend.", "Thank you for your notes of yesterday.", "The printer works again.",
    "We can talk about the rest at lunch.", "Sorry for the late reply.", "Nothing else has changed since last week.",
    "{person} knows more about {topic}.", "Please tell {person} as well.", "I will be out of the office on Friday.",
    "Let us speak about {topic} next week.", "My train was late again this morning.",
    "Has anybody heard about the budget of {topic}?", "Nobody knows the deadline of {topic} yet, by the way.",
    "I asked {person} who the supplier of {topic} is, without an answer so far.",
    "There was no meeting about {topic} this week.", "The invoice for {topic} has not come yet.",
)


WORLDS = {
    "small": MailWorld(SHORT_NAMES, tuple(  # in as few words as possible
        Kind((f"What is the {thing} of {{topic}}?",), (f"{thing} {{topic}}",), ("It is {value}.",), number(10, 99))
        for thing in SHORT_THINGS), FIRST_NAMES, facts=len(SHORT_NAMES) * len(SHORT_THINGS)),
    "large": MailWorld(tuple(f"{colour} {place}" for colour in COLOURS for place in PLACES), KINDS,
                   tuple(f"{first} {last}" for first in FIRST_NAMES for last in LAST_NAMES),
                   facts=1600, noise=2400, revised=0.25, fillers=FILLERS, calls=10, results=8, snippet=12),
}


FIRST_DAY, DAYS = date(2026, 1, 5), 300


@dataclass(frozen=True)
class Mail:
    """A message; empty fields are not shown."""

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
    """Mails with the ids 1, 2, 3, ..., and questions about them."""

    mails: tuple[Mail, ...]
    questions: tuple[Question, ...]

    def of_split(self, split: str) -> list[Question]:
        """Return the questions to train on ("train"), or those held out ("test")."""
        check_split(split)
        return [question for question in self.questions if split_of(question.text) == split]


@dataclass(frozen=True)
class Fact:
    """A fact that one mail states, and that an older mail may contradict."""

    topic: str
    kind: Kind
    value: str


@cache
def mailbox(name: str, seed: int = 0) -> Mailbox:
    """Return the mailbox "small" or "large" of a seed. Raises ValueError for another name."""
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
    """Raise ValueError for an unknown mailbox."""
    if name not in WORLDS:
        raise ValueError(f"mailbox is {name!r}; allowed: {', '.join(WORLDS)}")


def told(world: MailWorld, facts: list[Fact], rng: random.Random) -> Iterator[tuple[Mail, Fact | None]]:
    """Yield (mail, fact) for each fact; before some facts also (an older mail that is out of date, None)."""
    for fact in facts:
        newest = rng.randrange(DAYS)
        if rng.random() < world.revised and newest:
            while (outdated := fact.kind.value(rng)) == fact.value:
                pass
            yield mail_of(world, fact, outdated, rng.randrange(newest), rng), None
        yield mail_of(world, fact, fact.value, newest, rng), fact


def mail_of(world: MailWorld, fact: Fact, value: str, day: int, rng: random.Random) -> Mail:
    sentence = rng.choice(fact.kind.sentences).format(topic=fact.topic, value=value)
    return written(world, rng.choice(fact.kind.subjects).format(topic=fact.topic), fact.topic, [sentence], day, rng)


def noise(world: MailWorld, rng: random.Random) -> Mail:
    topic, kind = rng.choice(world.topics), rng.choice(world.kinds)
    return written(world, rng.choice(kind.subjects).format(topic=topic), topic, [], rng.randrange(DAYS), rng)


def written(world: MailWorld, subject: str, topic: str, sentences: list[str], day: int, rng: random.Random) -> Mail:
    """Return a mail with these sentences, among filler sentences if the world has any."""
    sender, recipient = rng.sample(world.people, 2)
    if not world.fillers:
        return Mail(sender, "", "", subject, " ".join(sentences))
    around = [filler.format(person=rng.choice(world.people), topic=rng.choice((topic, rng.choice(world.topics))))
              for filler in rng.sample(world.fillers, rng.randint(2, 5))]
    place = rng.randint(0, len(around))
    text = " ".join([*around[:place], *sentences, *around[place:]])
    body = f"Dear {recipient.split()[0]},\n\n{text}\n\nBest regards\n{sender.split()[0]}"
    return Mail(sender, recipient, (FIRST_DAY + timedelta(days=day)).isoformat(), subject, body)
