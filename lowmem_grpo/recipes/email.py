"""Recipe `email`: replies to e-mails, with one reward for each criterion of a good reply (`rewards.email_rewards`).

    lowmem-grpo run email                           # model and settings fit the card, or gpu=24
    lowmem-grpo run email longest_words=25          # shorter replies

A reply is right if it names the recipient, contains the keyword, is short enough and ends in the signature. A reply
that equals the ideal reply earns more. On a CPU the recipe uses the embedded tiny model, which cannot learn this task:
the run then only shows in a minute that everything works.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from lowmem_grpo.recipes.eval_task import Exam
from lowmem_grpo.recipes.lesson import Lesson, teach
from lowmem_grpo.recipes.options import RecipeOptions
from lowmem_grpo.recipes.presets import USUAL, Preset, Presets, on_cards, prepare
from lowmem_grpo.recipes.tasks import distinct, take
from lowmem_grpo.rewards.ready.mail import email_rewards
from lowmem_grpo.utils import at_least

DEFAULTS = USUAL | {"output_dir": "runs/email", "max_steps": 100, "max_completion_length": 192, "warmup_ratio": 0.05}
PRESETS: Presets = {
    "cpu": Preset("tiny", 1024, 32, 64,
                  {"max_steps": 5, "max_completion_length": 48, "gradient_accumulation_steps": 2}),
} | on_cards(1024)
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
SYSTEM = ("You answer e-mails of a shop's customers. Greet the customer by name, answer the question with what you "
          f"know and nothing else, and end with these two lines:\n{SIGNATURE}")
LONGEST_WORDS = 40


@dataclass
class EmailOptions(RecipeOptions):
    train_size: int = 2048
    """The number of training e-mails."""
    eval_problems: int = 128
    """The number of held-out e-mails in each evaluation."""
    longest_words: int = LONGEST_WORDS
    """The most words of a reply; a longer reply loses 1."""

    RANGES = RecipeOptions.RANGES | {"longest_words": at_least(0)}


OPTIONS = EmailOptions


@dataclass(frozen=True)
class EmailRequest:
    """A customer's e-mail, and the facts that the shop knows."""

    recipient: str
    question: str
    facts: tuple[str, ...]
    fact: str  # the one that answers the question
    keyword: str

    @property
    def text(self) -> str:
        return f'{self.recipient} writes: "{self.question}"\nYou know: {"; ".join(self.facts)}.'

    @property
    def ideal(self) -> str:
        return f"Dear {self.recipient},\n\n{self.fact[0].upper()}{self.fact[1:]}.\n\n{SIGNATURE}"


def draw_request(rng: random.Random) -> EmailRequest:
    """Return a request: a random thing, several facts about it in random order, and a question about one of them."""
    thing, numbers = rng.choice(THINGS), rng.sample(range(3, 1000), KNOWN)
    drawn = list(zip(rng.sample(KINDS, KNOWN), numbers, strict=True))
    (question, fact, keyword), n = rng.choice(drawn)
    return EmailRequest(rng.choice(NAMES), question.format(thing=thing),
                        tuple(form.format(thing=thing, n=number) for (_, form, _), number in drawn),
                        fact.format(thing=thing, n=n), keyword.format(n=n))


def make_dataset(split: str, size: int, seed: int = 0) -> Dataset:
    """Return `size` different requests of a split, with `prompt`, `answer` and the columns that the rewards read."""
    return Dataset.from_list([
        {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": request.text}],
         "recipient": request.recipient, "keyword": request.keyword, "ideal": request.ideal, "answer": request.ideal}
        for request in take(distinct(split, seed, draw_request, lambda request: request.text), size)
    ])


def good_reply(longest_words: int = LONGEST_WORDS) -> Callable[..., list[float]]:
    """Return a reward function: 1 for a reply that meets all criteria, even if it is not the ideal reply; else 0."""
    keyword, _, length, recipient, signature = email_rewards(SIGNATURE, longest_words)

    def right(completions: list[Any], **columns: Any) -> list[float]:
        met = [reward(completions=completions, **columns) for reward in (keyword, recipient, signature, length)]
        return [float(paid == (1.0, 1.0, 1.0, 0.0)) for paid in zip(*met, strict=True)]

    return right


EXAM = Exam(lambda size, seed, source: make_dataset("test", size, seed), good_reply(), max_tokens=192, size=128,
            of_options=lambda options, tiny: {"right": good_reply(options.longest_words)})


def run(options: EmailOptions) -> None:
    setup = prepare(options, DEFAULTS, PRESETS)
    teach(setup, Lesson("email", make_dataset("train", options.train_size, setup.config.seed),
                        email_rewards(SIGNATURE, options.longest_words),
                        make_dataset("test", options.eval_problems, setup.config.seed),
                        good_reply(options.longest_words), note=setup.tiny_note("cannot write e-mails")))
