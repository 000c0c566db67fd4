"""Make the embedded model of game2048 and twenty_questions: it plays blindly, and answers questions rightly.

    python -m bench.tiny_models.talks_model --out DIR

It begins with the weights of the embedded model `tiny-inbox`, and gets a tokenizer in which each move, number and
answer is one token. It is trained on moves on boards of 2048; on players of `twenty_questions`; and on the other side
of that game, which is told a number and answers rightly whether it is above another. At first all moves are possible
ones, on boards with few of them, and all players listen, so that the model learns where to look. Then most moves and
questions are blind, so that GRPO has something to improve; the base model, which is not trained, answers them. The
files (2.5 MB of weights in bfloat16, a tokenizer, a model card) ship in `lowmem_grpo/assets/tiny-talks`.
"""

import random
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

import click

from bench.tiny_models.from_scratch import OUT, SEED, save, train
from bench.tiny_models.games_model import game_talk
from bench.tiny_models.talks import Source, Talk, begun, talk_batches, talk_tokenizer
from bench.tiny_models.tiny_model import SHAPE
from lowmem_grpo.models.stored_model import TINY_INBOX
from lowmem_grpo.recipes import game2048, twenty_questions
from lowmem_grpo.recipes.game2048 import MOVES, SIZES, Game2048, possible
from lowmem_grpo.recipes.twenty_questions import LARGEST, NUMBERS, TwentyQuestions, about, question_of, truth

LISTENS = 0.4  # share of the turns of `twenty_questions` that use the remaining range; at first all do
LOOKS = 0.4  # share of the moves of 2048 that are possible ones on purpose; at first all are
HARD = 2  # most possible moves on the first boards: with more of them, the model need not look
EARLY = 0.08  # chance of a guess before the last turn
RATE = 1e-3  # learning rate
VOCABULARY = 352
WORDS = (*MOVES, "0", *NUMBERS, "32", "64", "yes", "no")
PHRASES = (  # what stands around the words that matter, a token each
    "2048: reach ", ". Reply with a move.\n", "\nPossible: ", "I think of a number from 1 to ", ". You have ",
    ' turns: ask "Is it above N?", or reply "Guess: N".', "Is it above ", "Guess: ", " to ", " left",
    "You think of: ", ". Answer with yes or no.\n", "It is ",
)


def boards(rng: random.Random, most: int = len(MOVES)) -> Iterator[Game2048]:
    """Yield games of random moves without end, at each board on which at most `most` moves are possible."""
    game = Game2048(SIZES[3])
    while True:
        game.reset(seed=rng.getrandbits(40))
        while not game.over:
            if len(possible(game.board)) <= most:
                yield game
            game.step(game2048.random_move(game, rng))


def board_talk(game: Game2048, rng: random.Random, looks: float = LOOKS) -> Talk:
    """Return one turn of 2048; the policy never sees more."""
    move = game2048.random_move(game, rng) if rng.random() < looks else rng.choice(MOVES)
    return [{"role": "user", "content": game.shown()}, {"role": "assistant", "content": move}]


def asking_talk(rng: random.Random, listens: float = LISTENS) -> Talk:
    """Return a whole game from the asker's side. Each turn uses the remaining range with probability `listens`."""

    def asker(game: TwentyQuestions, rng: random.Random) -> str:
        if rng.random() < listens:
            return twenty_questions.listening(game, rng)
        return f"Guess: {rng.choice(NUMBERS)}" if rng.random() < EARLY else twenty_questions.blind(game, rng)

    return game_talk(twenty_questions.answered_truly(), asker, rng)


def answering_talk(rng: random.Random) -> Talk:
    """Return a question and its right answer, from the answering side."""
    number, question = rng.choice(NUMBERS), question_of(rng.randint(1, LARGEST - 1))
    return [{"role": "user", "content": about(number, question)},
            {"role": "assistant", "content": truth(number, question)}]


def demonstrations(seed: int, heeding: bool = False) -> Iterator[Source]:
    """Yield sources without end, one kind after the other; `heeding`: all moves, questions and guesses are possible."""
    rng, looks, listens = random.Random(seed), 1.0 if heeding else LOOKS, 1.0 if heeding else LISTENS
    games = boards(rng, HARD if heeding else len(MOVES))
    while True:
        for _ in range(2):
            yield lambda: (board_talk(next(games), rng, looks), None)
            yield lambda: (asking_talk(rng, listens), None)
        yield lambda: (answering_talk(rng), None)


@click.command(help=__doc__)
@OUT
@SEED
@click.option("--start", default=TINY_INBOX, show_default=True, help="Model whose weights it begins with.")
@click.option("--first", default=300, show_default=True, help="Steps of possible moves and of players who listen.")
@click.option("--steps", default=150, show_default=True, help="Steps of mostly blind ones, which come after.")
@click.option("--batch", default=32, show_default=True)
def main(out: Path, start: str, seed: int, first: int, steps: int, batch: int) -> None:
    """Make the tokenizer and the model, train, and write them."""
    tokenizer = talk_tokenizer(demonstrations(seed), VOCABULARY, WORDS, PHRASES)
    model = begun(start, tokenizer, seed, SHAPE | {"vocab_size": VOCABULARY})
    data = chain(islice(talk_batches(tokenizer, demonstrations(seed + 1, heeding=True), batch), first),
                 talk_batches(tokenizer, demonstrations(seed + 2), batch))
    train(model, data, first + steps, RATE)
    save(model.bfloat16(), tokenizer, out)


if __name__ == "__main__":
    main()
