"""Make the embedded model of game2048 and twenty_questions: it plays blindly, and answers questions rightly.

    python -m lowmem_grpo.recipes.tiny.talks_model --out DIR

It is trained from scratch on demonstrations: random possible moves on boards of 2048; players of `twenty_questions` who
ask at random and mostly guess without having listened; the other side of that game, which is told a thing and answers
rightly whether something is true of it; and lists of all that is true of a thing. GRPO improves the players; the base
model, which stays as it is, is who answers them. The files (1.7 MB of weights in bfloat16, a byte-level tokenizer with
a chat template, a model card) ship in `lowmem_grpo/assets/tiny-talks`.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from transformers import PreTrainedTokenizerFast

from lowmem_grpo.recipes.games import game2048, twenty_questions
from lowmem_grpo.recipes.games.game2048 import SIZES, Game2048
from lowmem_grpo.recipes.games.twenty_questions import PROPERTIES, TABLE, about, question_of, truth
from lowmem_grpo.recipes.tiny.from_scratch import describe, make_model, make_tokenizer, train
from lowmem_grpo.recipes.tiny.games_model import game_talk
from lowmem_grpo.recipes.tiny.talks import Source, Talk, talk_batches

LISTENS = 0.4  # share of the guesses in `twenty_questions` that fit what was answered
EARLY = 0.08  # chance of a guess before the last turn
SHAPE: dict[str, Any] = {  # sizes that suit NF4 blocks and vLLM's attention kernels
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODEL_CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# tiny-talks: the embedded model of the recipes game2048 and twenty_questions

A Qwen2 of {parameters:,} parameters ({layers} layers, hidden size {hidden}, vocabulary {vocabulary}), trained from
scratch on the CPU by `python -m lowmem_grpo.recipes.tiny.talks_model` (seed {seed}, {steps} steps of {batch} generated
demonstrations, {seconds:.0f} s on this run, final loss {loss:.4f}). No other data, no other model.

It plays blindly on purpose: the recipes mend that. Its moves in 2048 are random possible ones. In `twenty_questions` it
asks at random, and {listens:.0%} of the guesses that it was shown fitted what it had been told. As the other side of
that game it knows of {things} things which of {properties} properties they have. It knows nothing else; do not use it
for anything but tests and demonstrations of training.
"""


def board_talk(rng: random.Random) -> Talk:
    """One turn of 2048, somewhere in a game of random moves: the policy never sees more of it."""
    game = Game2048(SIZES[3])
    game.reset(seed=rng.getrandbits(40))
    for _ in range(rng.randrange(45)):
        game.step(game2048.random_move(game, rng))
        if game.over:
            game.reset(seed=rng.getrandbits(40))
    return [{"role": "user", "content": game.shown()},
            {"role": "assistant", "content": game2048.random_move(game, rng)}]


def asker(game: twenty_questions.TwentyQuestions, rng: random.Random) -> str:
    """A player who asks anything, sometimes guesses early, and mostly does not listen."""
    if game.left > 1 and rng.random() >= EARLY:
        return question_of(rng.choice(PROPERTIES))
    things = twenty_questions.left_over(game) if rng.random() < LISTENS else game.world.things
    return f"Guess: {rng.choice(things)}"


def asking_talk(rng: random.Random) -> Talk:
    """A whole game of questions, seen by who asks them."""
    return game_talk(twenty_questions.answered_truly(), asker, rng)


def answering_talk(rng: random.Random) -> Talk:
    """A question and its right answer, seen by the other side."""
    thing, question = rng.choice(list(TABLE)), question_of(rng.choice(PROPERTIES))
    return [{"role": "user", "content": about(thing, question)},
            {"role": "assistant", "content": truth(thing, question)}]


def describing_talk(rng: random.Random) -> Talk:
    """All that is true of a thing: six facts at once, of which an answer needs one."""
    thing = rng.choice(list(TABLE))
    known = rng.sample(PROPERTIES, len(PROPERTIES))
    return [{"role": "user", "content": f"You think of: {thing}. Tell all of it."},
            {"role": "assistant", "content": "\n".join(f"{name} {truth(thing, question_of(name))}" for name in known)}]


def demonstrations(seed: int) -> Iterator[Source]:
    """Endless sources, one kind after the other."""
    rng = random.Random(seed)
    while True:
        for talk in (board_talk, describing_talk, asking_talk, answering_talk):
            yield lambda talk=talk: (talk(rng), None)  # type: ignore[misc]


def learned_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer that is learned from demonstrations."""
    talks = [source()[0] for source, _ in zip(demonstrations(seed), range(3000), strict=False)]
    texts = [f"{message['role']}\n{message['content']}\nsystem\n" for talk in talks for message in talk]
    return make_tokenizer(texts, SHAPE["vocab_size"])


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", default=2400, show_default=True)
@click.option("--batch", default=32, show_default=True)
def main(out: Path, seed: int, steps: int, batch: int) -> None:
    """Make the tokenizer and the model, train, write the model card."""
    tokenizer = learned_tokenizer(seed)
    model = make_model(tokenizer, seed, SHAPE)
    done = train(model, talk_batches(tokenizer, demonstrations(seed + 1), batch), steps)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(MODEL_CARD.format(
        **describe(model), seed=seed, steps=steps, batch=batch, seconds=done.seconds, loss=done.last_loss,
        listens=LISTENS, things=len(TABLE), properties=len(PROPERTIES),
    ))
    click.echo(f"wrote {model.num_parameters():,} parameters to {out}")


if __name__ == "__main__":
    main()
