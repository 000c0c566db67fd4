"""Make the embedded model of the games: it knows the form of every game, and plays blindly.

    python -m lowmem_grpo.recipes.tiny.games_model --out DIR

It begins with the weights of the embedded model `tiny`, gets a tokenizer of its own, and is trained on demonstrations:
players of `guess` who mostly do not listen, random legal moves in `tictactoe`, and answers to problems of `calculator`
that call the tool in CALLS of all cases and are wrong in the others. GRPO then has something to improve. The files (2.5
MB of weights in bfloat16, a byte-level tokenizer with a chat template that knows tools, a model card) ship in
`lowmem_grpo/assets/tiny-games`.
"""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers.utils import get_json_schema

from lowmem_grpo.models.named import TINY, resolve
from lowmem_grpo.recipes.games import guess, tictactoe
from lowmem_grpo.recipes.games.calculator import Sum, calculate, sums
from lowmem_grpo.recipes.games.playing import G, Player
from lowmem_grpo.recipes.tiny.from_scratch import Batch, describe, make_model, make_tokenizer, train
from lowmem_grpo.recipes.tiny.tiny_model import SHAPE, wrong_total

CALLS = 0.4  # share of the demonstrations of `calculator` that call the tool
LISTENS = 0.5  # share of the demonstrations of `guess` that guess what is still possible
TOOL_MARKS = ["<tool_call>", "</tool_call>"]  # tokens of their own, as in the models that call tools
TOOLS: list[Any] = [get_json_schema(calculate)]
CHAT_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}{% set it = tool.function or tool %} {{ it.name }}"
    "({{ it.parameters.properties.keys() | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{% set it = call.function or call %}<tool_call>\n"
    '{"name": "{{ it.name }}", "arguments": {{ it.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# tiny-games: the embedded model of the recipes guess, calculator and tictactoe

A Qwen2 of {parameters:,} parameters ({layers} layers, hidden size {hidden}, vocabulary {vocabulary}), trained on the
CPU by `python -m lowmem_grpo.recipes.tiny.games_model` (seed {seed}, {steps} steps of {batch} generated demonstrations,
{seconds:.0f} s on this run, final loss {loss:.4f}), from the weights of `{start}`. No other data, no other model.

It plays blindly on purpose: the recipes mend that. In `guess` {listens:.0%} of the demonstrations listened to what the
game said, in `calculator` {calls:.0%} called the tool and the others were wrong, and in `tictactoe` all moves were
random legal ones. It knows nothing else; do not use it for anything but tests and demonstrations of training.
"""
Talk = list[dict[str, Any]]  # messages


def game_talk(game: G, player: Player[G], rng: random.Random) -> Talk:
    """The messages of one game that a scripted player plays."""
    talk: Talk = [{"role": "user", "content": game.reset(seed=rng.getrandbits(40))}]
    done = False
    while not done:
        talk.append({"role": "assistant", "content": player(game, rng)})
        said, _, done = game.step(talk[-1]["content"])
        talk.append({"role": "user", "content": said})
    return talk[:-1]


def guess_talk(rng: random.Random) -> Talk:
    """Most players guess blindly, and some what is still possible."""
    return game_talk(guess.Guess(), guess.in_range if rng.random() < LISTENS else guess.blind, rng)


def tictactoe_talk(rng: random.Random) -> Talk:
    """Random legal moves of X, against opponents of any strength."""
    return game_talk(tictactoe.TicTacToe(), tictactoe.random_move, rng)


def calculator_talk(rng: random.Random, problem: Sum) -> Talk:
    """A call of the tool and its result, or a wrong answer at once."""
    talk: Talk = [{"role": "user", "content": problem.question}]
    if rng.random() >= CALLS:
        return [*talk, {"role": "assistant", "content": str(wrong_total(problem.answer, rng))}]
    call = {"name": calculate.__name__, "arguments": {"expression": problem.expression}}
    result = calculate(problem.expression)
    return [*talk, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": result}, {"role": "assistant", "content": result}]


def demonstrations(seed: int) -> Iterator[Callable[[], tuple[Talk, bool]]]:
    """Endless sources of (messages, whether there are tools), one game after the other."""
    rng, problems = random.Random(seed), endless_sums(seed)
    while True:
        yield lambda: (guess_talk(rng), False)
        yield lambda: (tictactoe_talk(rng), False)
        yield lambda: (calculator_talk(rng, next(problems)), True)


def endless_sums(seed: int) -> Iterator[Sum]:
    """Problems of the training split, shuffled anew in each round."""
    rng, known = random.Random(seed), list(zip(sums("train", seed), range(8000), strict=False))
    while True:
        rng.shuffle(known)
        yield from (problem for problem, _ in known)


def game_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer that is learned from demonstrations."""
    talks = [source() for source, _ in zip(demonstrations(seed), range(3000), strict=False)]
    texts = [f"{message['role']}\n{message['content']}\n{json.dumps(message.get('tool_calls', ''))}\nsystem\nTools: "
             for talk, _ in talks for message in talk]
    tokenizer = make_tokenizer(texts, SHAPE["vocab_size"] - len(TOOL_MARKS))
    tokenizer.add_tokens(TOOL_MARKS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def encode_talk(tokenizer: PreTrainedTokenizerFast, talk: Talk, with_tools: bool) -> tuple[list[int], list[bool]]:
    """Ids of a whole conversation, and which of them the assistant wrote."""
    ids: list[int] = []
    own: list[bool] = []
    for place, message in enumerate(talk):
        if message["role"] == "assistant":
            for end, mine in ((place, False), (place + 1, True)):
                text = str(tokenizer.apply_chat_template(
                    talk[:end], tools=TOOLS if with_tools else None, tokenize=False, add_generation_prompt=not mine,
                ))
                new = tokenizer.encode(text.removesuffix("\n") if mine else text, add_special_tokens=False)[len(ids):]
                ids += new
                own += [mine] * len(new)
    return ids, own


def talk_batches(tokenizer: PreTrainedTokenizerFast, seed: int, size: int) -> Iterator[Batch]:
    """Endless (input_ids (B, T), labels (B, T)) of one game each; labels are -100 outside the assistant's turns."""
    for source in demonstrations(seed):
        rows = [encode_talk(tokenizer, *source()) for _ in range(size)]
        width = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((size, width), tokenizer.pad_token_id)
        labels = torch.full((size, width), -100)
        for row, (ids, own) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids)] = torch.tensor(ids).where(torch.tensor(own), -100)
        yield input_ids, labels


def begun(start: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """The model `start` with embeddings for another tokenizer: tokens that both have keep theirs."""
    folder = resolve(start)
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    known = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()
    model = make_model(tokenizer, seed, SHAPE)
    new = model.model.embed_tokens.weight.detach().clone()
    for token, place in tokenizer.get_vocab().items():
        if token in known:
            new[place] = old.model.embed_tokens.weight[known[token]]
    model.load_state_dict(old.state_dict())
    model.model.embed_tokens.weight.data.copy_(new)
    return model


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
@click.option("--seed", default=0, show_default=True)
@click.option("--start", default=TINY, show_default=True, help="Model of the same shape whose weights it begins with.")
@click.option("--steps", default=400, show_default=True)
@click.option("--batch", default=32, show_default=True)
def main(out: Path, start: str, seed: int, steps: int, batch: int) -> None:
    """Make the tokenizer and the model, train, write the model card."""
    tokenizer = game_tokenizer(seed)
    model = begun(start, tokenizer, seed)
    done = train(model, talk_batches(tokenizer, seed + 1, batch), steps)
    model.bfloat16().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(MODEL_CARD.format(
        **describe(model), seed=seed, steps=steps, batch=batch, seconds=done.seconds, loss=done.last_loss, calls=CALLS,
        listens=LISTENS, start=start,
    ))
    click.echo(f"wrote {model.num_parameters():,} parameters to {out}")


if __name__ == "__main__":
    main()
