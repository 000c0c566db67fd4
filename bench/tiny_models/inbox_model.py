"""Make the embedded model of the recipe `inbox`: it knows the form of every call, and searches badly.

    python -m bench.tiny_models.inbox_model --out DIR

It begins with the weights of the embedded model `tiny-games`, gets a tokenizer in which each name and number is one
token, and is trained first to copy, and then on demonstrations of a clerk who mostly searches for the wrong words, and
often answers without reading. GRPO then has something to improve. The mails come from other seeds than a recipe's,
and the questions only from the training split. The files (2.5 MB of weights in bfloat16, a tokenizer, a model card)
ship in `lowmem_grpo/assets/tiny-inbox`.
"""

import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import click
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from bench.tiny_models.from_scratch import OUT, SEED, Batch, save, train
from bench.tiny_models.talks import Source, Talk, begun, called, talk_batches, talk_tokenizer
from bench.tiny_models.tiny_model import SHAPE
from lowmem_grpo.models.stored_model import TINY_GAMES
from lowmem_grpo.recipes.tasks.inbox import Inbox
from lowmem_grpo.recipes.tasks.mailbox import FIRST_NAMES, SHORT_NAMES, SHORT_THINGS, Question, mailbox

MAILBOXES = 32  # from which demonstrations are drawn, so that no answer can be learned by heart
FIRST_SEED = 1_000_000  # seed of the first of these
BOTH, NAME, THING, OTHER = 0.3, 0.35, 0.25, 0.1  # shares of searches: for both words, for one, for another name
AGAIN = 0.15  # share of demonstrations that search twice
READS = 0.6  # share of demonstrations that read a result before they answer
DOUBTS = 0.1  # share of the answers that are "unknown"
LESSON, PERIODS = 32, (3, 12)  # tokens of a lesson, and the range of its period
LESSONS = 64  # per batch
VOCABULARY = 864
TOOLS = [get_json_schema(getattr(Inbox(), name)) for name in ("answer", "read", "search")]
NUMBERS = [str(number) for number in range(len(SHORT_NAMES) * len(SHORT_THINGS) + 1)]  # ids, and values among them
WORDS = (*FIRST_NAMES, *SHORT_NAMES, *SHORT_THINGS, "unknown", "nothing found", *NUMBERS)
PHRASES = (  # the scaffold of a call and of a mail, a token each: what is left to write are names and numbers
    "Tools: answer(text, sources) read(id) search(words)", '\n{"name": "search", "arguments": {"words": "',
    '\n{"name": "read", "arguments": {"id": ', '\n{"name": "answer", "arguments": {"text": "', '", "sources": [',
    '"}}\n', "}}\n", "]}}\n", "What is the ", " of ", " | ", "From: ", "\nSubject: ", "\n\nIt is ",
)


def clerk_talk(question: Question, seed: int, rng: random.Random) -> Talk:
    """Return a talk in which a bad clerk answers a question about the small mailbox of a seed."""
    inbox, talk = Inbox(), [{"role": "user", "content": question.text}]
    inbox.reset("small", seed, question.answer, question.source)
    shown: list[str] = []
    for _ in range(1 + (rng.random() < AGAIN)):
        shown = results(use(inbox, talk, "search", words=searched(question, rng))) or shown
    chosen, value = int(rng.choice(shown)) if shown else None, str(rng.randint(10, 99))
    if chosen is not None and rng.random() < READS:
        value = use(inbox, talk, "read", id=chosen).split()[-1].rstrip(".")
    doubts = chosen is None or rng.random() < DOUBTS
    use(inbox, talk, "answer", text="unknown" if doubts else value, sources=[] if doubts else [chosen])
    return talk[:-1]


def use(inbox: Inbox, talk: Talk, name: str, **arguments: object) -> str:
    """Call a tool, append the call and its result to the talk, and return the result."""
    result = str(getattr(inbox, name)(**arguments))
    talk += [called(name, **arguments), {"role": "tool", "content": result}]
    return result


def results(found: str) -> list[str]:
    """Return the ids that a search gave."""
    return [line.partition(" | ")[0] for line in found.splitlines() if " | " in line]


def searched(question: Question, rng: random.Random) -> str:
    """Return the words that the clerk searches for: those of the question, one of them, or others."""
    *_, thing, _, name = question.text.rstrip("?").split()
    other = rng.choice(SHORT_NAMES)
    return rng.choices((f"{thing} {name}", name, thing, f"{thing} {other}"), (BOTH, NAME, THING, OTHER))[0]


def demonstrations(seed: int) -> Iterator[Source]:
    """Yield sources of demonstrations without end, about mailboxes of other seeds than a recipe's."""
    rng = random.Random(seed)

    def demonstration() -> tuple[Talk, list[dict[str, object]]]:
        number = FIRST_SEED + rng.randrange(MAILBOXES)
        return clerk_talk(rng.choice(mailbox("small", number).of_split("train")), number, rng), TOOLS

    while True:
        yield demonstration


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int, size: int) -> Iterator[Batch]:
    """Yield (input_ids (B, T), labels (B, T)) without end: words and numbers that repeat, so that the model must copy.
    Demonstrations alone hardly teach that, because few of their tokens are copies."""
    vocabulary = tokenizer.get_vocab()
    rng, known = random.Random(seed), [vocabulary[word] for word in WORDS]
    while True:
        rows, labels = [], []
        for _ in range(size):
            period = rng.randint(*PERIODS)
            ids = (rng.sample(known, period) * LESSON)[:LESSON]
            rows.append(ids)
            labels.append([-100] * period + ids[period:])
        yield torch.tensor(rows), torch.tensor(labels)


@click.command(help=__doc__)
@OUT
@SEED
@click.option("--start", default=TINY_GAMES, show_default=True, help="Model whose weights it begins with.")
@click.option("--copying", default=300, show_default=True, help="Steps of lessons in copying, which come first.")
@click.option("--steps", default=400, show_default=True, help="Steps of demonstrations.")
@click.option("--batch", default=16, show_default=True)
def main(out: Path, start: str, seed: int, copying: int, steps: int, batch: int) -> None:
    """Make the tokenizer and the model, train, and write them."""
    tokenizer = talk_tokenizer(demonstrations(seed), VOCABULARY, WORDS, PHRASES, 2000)
    model = begun(start, tokenizer, seed, SHAPE | {"vocab_size": VOCABULARY})
    data = chain(islice(lessons(tokenizer, seed + 5, LESSONS), copying),
                 talk_batches(tokenizer, demonstrations(seed + 1), batch))
    train(model, data, copying + steps)
    save(model.bfloat16(), tokenizer, out)


if __name__ == "__main__":
    main()
