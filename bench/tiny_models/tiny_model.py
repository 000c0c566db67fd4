"""Make the embedded model: a small Qwen2 that knows the format of arithmetic, but is wrong more often than right.

    python -m bench.tiny_models.tiny_model --out DIR

It is trained from scratch on demonstrations whose steps are wrong with probability ERROR_RATE. A model that learns them
well therefore samples wrong steps at that rate, and GRPO has something to improve. This takes about ten minutes on two
CPU cores, and the result depends only on the seed. The files (5 MiB of safetensors, a byte-level tokenizer with a chat
template, a model card) ship in `lowmem_grpo/assets/tiny`.
"""

import random
from pathlib import Path

import click

from bench.tiny_models.from_scratch import OUT, SEED, batches, make_model, make_tokenizer, save, train
from lowmem_grpo.recipes.tasks.arithmetic import MAX_TOTAL, Problem, apply_step, problems

ERROR_RATE = 0.28
WRONG_BY = (-20, -10, -9, -5, -3, -2, -1, 1, 2, 3, 5, 9, 10, 20)
SHAPE = {  # sizes that suit NF4 blocks and vLLM's attention kernels
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def demonstration(problem: Problem, rng: random.Random) -> str:
    """Return a worked answer in which each step is wrong with probability ERROR_RATE."""
    lines, total = [], problem.start
    for operator, operand in problem.steps:
        right = apply_step(total, (operator, operand))
        shown = wrong_total(right, rng) if rng.random() < ERROR_RATE else right
        lines.append(f"{total} {operator} {operand} = {shown}")
        total = shown
    return "\n".join([*lines, f"Answer: {total}"])


def wrong_total(right: int, rng: random.Random) -> int:
    """Return a plausible wrong total near `right`, within [0, MAX_TOTAL] if possible."""
    choices = [right + by for by in WRONG_BY if 0 <= right + by <= MAX_TOTAL]
    return rng.choice(choices or [max(right - 1, 0)])


def sample_texts(seed: int) -> list[str]:
    """Return the texts from which the tokenizer is learned."""
    rng, source = random.Random(seed), problems("train", seed)
    return [f"{problem.question}\n{demonstration(problem, rng)}\nuser\nassistant\nsystem\n"
            for problem, _ in zip(source, range(2000), strict=False)]


@click.command(help=__doc__)
@OUT
@SEED
@click.option("--steps", default=3000, show_default=True)
@click.option("--batch", default=64, show_default=True)
def main(out: Path, seed: int, steps: int, batch: int) -> None:
    """Make the tokenizer and the model, train, and write them."""
    tokenizer = make_tokenizer(sample_texts(seed), SHAPE["vocab_size"])
    model = make_model(tokenizer, seed, SHAPE)
    rng = random.Random(seed + 1)
    data = batches(tokenizer, problems("train", seed + 1), lambda problem: demonstration(problem, rng), batch)
    train(model, data, steps)
    save(model, tokenizer, out)


if __name__ == "__main__":
    main()
