"""Make the embedded model of the games: it knows the form of every game, and plays blindly.

    python -m bench.tiny_models.games_model --out DIR

It begins with the weights of the embedded model `tiny`, gets its own tokenizer, and is trained on demonstrations:
players of `guess` who listen in a share LISTENS of games, random legal moves in `tictactoe`, and answers to problems of
`calculator` that call the tool in a share CALLS of all cases and are wrong in the others. GRPO then has something to
improve. The files (2.5 MB of weights in bfloat16, a byte-level tokenizer with a chat template that knows tools, a model
card) ship in `lowmem_grpo/assets/tiny-games`.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from transformers.utils import get_json_schema

from bench.tiny_models.from_scratch import OUT, SEED, save, train
from bench.tiny_models.talks import Source, Talk, begun, called, talk_batches, talk_tokenizer
from bench.tiny_models.tiny_model import SHAPE, wrong_total
from lowmem_grpo.models.stored_model import TINY
from lowmem_grpo.recipes import guess, tictactoe
from lowmem_grpo.recipes.calculator import Sum, calculate, sums
from lowmem_grpo.recipes.eval_task import G, Player

CALLS = 0.4  # share of the demonstrations of `calculator` that call the tool
LISTENS = 0.5  # share of the demonstrations of `guess` that guess in the remaining range
TOOLS: list[Any] = [get_json_schema(calculate)]


def game_talk(game: G, player: Player[G], rng: random.Random) -> Talk:
    """Return the messages of one game that a scripted player plays."""
    talk: Talk = [{"role": "user", "content": game.reset(seed=rng.getrandbits(40))}]
    done = False
    while not done:
        talk.append({"role": "assistant", "content": player(game, rng)})
        said, _, done = game.step(talk[-1]["content"])
        talk.append({"role": "user", "content": said})
    return talk[:-1]


def guess_talk(rng: random.Random) -> Talk:
    """Return a game of `guess` whose player guesses in the remaining range (a share LISTENS), or blindly."""
    return game_talk(guess.Guess(), guess.in_range if rng.random() < LISTENS else guess.blind, rng)


def tictactoe_talk(rng: random.Random) -> Talk:
    """Return a game of random legal moves of X, against opponents of any strength."""
    return game_talk(tictactoe.TicTacToe(), tictactoe.random_move, rng)


def calculator_talk(rng: random.Random, problem: Sum) -> Talk:
    """Return a talk with a call of the tool and its result, or with a wrong answer at once."""
    talk: Talk = [{"role": "user", "content": problem.question}]
    if rng.random() >= CALLS:
        return [*talk, {"role": "assistant", "content": str(wrong_total(problem.answer, rng))}]
    result = calculate(problem.expression)
    return [*talk, called(calculate.__name__, expression=problem.expression),
            {"role": "tool", "content": result}, {"role": "assistant", "content": result}]


def demonstrations(seed: int) -> Iterator[Source]:
    """Yield sources of demonstrations without end, one game after the other."""
    rng, problems = random.Random(seed), endless_sums(seed)
    while True:
        yield lambda: (guess_talk(rng), None)
        yield lambda: (tictactoe_talk(rng), None)
        yield lambda: (calculator_talk(rng, next(problems)), TOOLS)


def endless_sums(seed: int) -> Iterator[Sum]:
    """Yield problems of the training split without end, shuffled anew in each round."""
    rng, known = random.Random(seed), list(zip(sums("train", seed), range(8000), strict=False))
    while True:
        rng.shuffle(known)
        yield from (problem for problem, _ in known)


@click.command(help=__doc__)
@OUT
@SEED
@click.option("--start", default=TINY, show_default=True, help="Model of the same shape whose weights it begins with.")
@click.option("--steps", default=400, show_default=True)
@click.option("--batch", default=32, show_default=True)
def main(out: Path, start: str, seed: int, steps: int, batch: int) -> None:
    """Make the tokenizer and the model, train, and write them."""
    tokenizer = talk_tokenizer(demonstrations(seed), SHAPE["vocab_size"])
    model = begun(start, tokenizer, seed, SHAPE)
    train(model, talk_batches(tokenizer, demonstrations(seed + 1), batch), steps)
    save(model.bfloat16(), tokenizer, out)


if __name__ == "__main__":
    main()
