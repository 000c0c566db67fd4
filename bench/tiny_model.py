"""Make the embedded model: a small Qwen2 that knows the format of arithmetic, but is wrong more often than right.

    python -m bench.tiny_model --out DIR

It is trained from scratch on demonstrations whose steps are wrong with probability ERROR_RATE. A model that learns them
well therefore samples wrong steps at that rate, and GRPO has something to improve. This takes about ten minutes on two
CPU cores, and the result depends only on the seed. The files (5 MiB of safetensors, a byte-level tokenizer with a chat
template, a model card) ship in `lowmem_grpo/assets/tiny`.

The makers of the models that continue from it (`tiny-games`, `tiny-inbox`, `tiny-talks`) are in bench/tiny_models of
commit ffa86c4b.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lowmem_grpo.recipes.tasks.arithmetic import MAX_TOTAL, Problem, apply_step, problems

ERROR_RATE = 0.28
WRONG_BY = (-20, -10, -9, -5, -3, -2, -1, 1, 2, 3, 5, 9, 10, 20)
SHAPE = {  # sizes that suit NF4 blocks and vLLM's attention kernels
    "vocab_size": 384, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 2048
WARM_UP = 100  # steps
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Batch = tuple[torch.Tensor, torch.Tensor]  # input_ids (B, T), and labels, which are -100 where nothing is trained


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


def make_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE learned from texts, with single digits and ChatML turns. It can encode any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT, clean_up_tokenization_spaces=False,
    )


def batches(
    tokenizer: PreTrainedTokenizerFast, source: Iterator[Problem], rng: random.Random, size: int
) -> Iterator[Batch]:
    """Yield right-padded batches without end; only completions are trained.

    One problem is skipped after each batch, since `zip` takes it before it finds the batch full. The embedded model was
    made this way: another order would make another model than its card describes.
    """
    while True:
        rows = [encode(tokenizer, problem.question, demonstration(problem, rng))
                for problem, _ in zip(source, range(size), strict=False)]
        width = max(len(prompt) + len(completion) for prompt, completion in rows)
        input_ids, labels = (torch.full((size, width), fill) for fill in (tokenizer.pad_token_id, -100))
        for row, (prompt, completion) in enumerate(rows):
            end = len(prompt) + len(completion)
            input_ids[row, :end] = torch.tensor(prompt + completion)
            labels[row, len(prompt) : end] = torch.tensor(completion)
        yield input_ids, labels


def encode(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the token ids of prompt and answer."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return (tokenizer.encode(prompt, add_special_tokens=False),
            tokenizer.encode(answer + END, add_special_tokens=False))


def loss_of(model: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the labelled tokens."""
    input_ids, labels = batch
    hidden = model.model(input_ids).last_hidden_state[:, :-1]  # right-padded: causal attention needs no mask
    trained = labels[:, 1:] != -100
    return F.cross_entropy(model.lm_head(hidden[trained]).float(), labels[:, 1:][trained])


def train(
    model: Any, data: Iterator[Any], steps: int, learning_rate: float = 2e-3,
    loss_of: Callable[[Any, Any], torch.Tensor] = loss_of,
) -> None:
    """Train all weights. The learning rate rises over WARM_UP steps and falls as a cosine to 0 at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    losses: list[torch.Tensor] = []
    started = time.perf_counter()
    for step, batch in zip(range(1, steps + 1), data, strict=False):
        done = min(1.0, max(0.0, (step - 1 - WARM_UP) / (steps - WARM_UP))) if steps > WARM_UP else 0.0
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step - 1) / WARM_UP) * (1 + math.cos(math.pi * done)) / 2
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 50 == 0:
            loss, seconds = torch.stack(losses[-50:]).mean().item(), time.perf_counter() - started
            click.echo(f"step {step}/{steps} loss {loss:.4f} ({seconds:.0f} s)")


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", default=3000, show_default=True)
@click.option("--batch", default=64, show_default=True)
def main(out: Path, seed: int, steps: int, batch: int) -> None:
    """Make the tokenizer and the model, train, and write them. The model card is written by hand."""
    rng, source = random.Random(seed), problems("train", seed)
    tokenizer = make_tokenizer([f"{problem.question}\n{demonstration(problem, rng)}\nuser\nassistant\nsystem\n"
                                for problem, _ in zip(source, range(2000), strict=False)], SHAPE["vocab_size"])
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(
        **SHAPE, max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None))
    train(model, batches(tokenizer, problems("train", seed + 1), random.Random(seed + 1), batch), steps)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    click.echo(f"wrote {model.num_parameters():,} parameters to {out}")


if __name__ == "__main__":
    main()
