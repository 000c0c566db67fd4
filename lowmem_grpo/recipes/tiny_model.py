"""Make the embedded model: a small Qwen2 that knows the format of arithmetic, but errs at it more often than not.

    python -m lowmem_grpo.recipes.tiny_model --out DIR

It is trained from scratch on the CPU, on demonstrations whose steps are wrong with probability ERROR_RATE. A model
that has learned them well therefore samples wrong steps at that rate, and GRPO has something to mend. Seeded; about
ten minutes on two cores. The result (5 MiB of safetensors, a byte-level tokenizer with a chat template, a model card)
ships in `lowmem_grpo/assets/tiny`.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup

from lowmem_grpo.recipes.arithmetic_problems import MAX_TOTAL, Problem, apply_step, problems

ERROR_RATE = 0.28
WRONG_BY = (-20, -10, -9, -5, -3, -2, -1, 1, 2, 3, 5, 9, 10, 20)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# tiny: the embedded model of lowmem_grpo

A Qwen2 of {parameters:,} parameters ({layers} layers, hidden size {hidden}, vocabulary {vocabulary}), trained from
scratch on the CPU by `python -m lowmem_grpo.recipes.tiny_model` (seed {seed}, {steps} steps of {batch} generated
demonstrations, {seconds:.0f} s on this run, final loss {loss:.4f}). No other data, no other model.

Each step of a demonstration is wrong with probability {error_rate}, and later steps go on from the wrong total. So
the model follows the format of

    Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?

and often errs: that is what the recipe `arithmetic` mends. Demonstrations come from the training split alone.
It knows nothing else; do not use it for anything but tests and demonstrations of training.
"""


def demonstration(problem: Problem, rng: random.Random) -> str:
    """A worked answer in which each step is wrong with probability ERROR_RATE."""
    lines, total = [], problem.start
    for operator, operand in problem.steps:
        right = apply_step(total, operator, operand)
        shown = wrong_total(right, rng) if rng.random() < ERROR_RATE else right
        lines.append(f"{total} {operator} {operand} = {shown}")
        total = shown
    return "\n".join([*lines, f"Answer: {total}"])


def wrong_total(right: int, rng: random.Random) -> int:
    """A plausible wrong total near `right`, within [0, MAX_TOTAL] where that can be."""
    choices = [right + by for by in WRONG_BY if 0 <= right + by <= MAX_TOTAL]
    return rng.choice(choices or [max(right - 1, 0)])


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (any text can be encoded), single digits, ChatML turns."""
    rng, source = random.Random(seed), problems("train", seed)
    texts = [f"{problem.question}\n{demonstration(problem, rng)}\nuser\nassistant\nsystem\n"
             for problem, _ in zip(source, range(2000), strict=False)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, chat_template=CHAT_TEMPLATE,
        model_max_length=2048, clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """A seeded, untrained Qwen2; head and hidden sizes suit NF4 blocks and vLLM's attention kernels."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input_ids (B, T), labels (B, T)); labels are -100 outside the completion."""
    rng, source = random.Random(seed + 1), problems("train", seed + 1)
    while True:
        rows = [encode(tokenizer, problem, rng) for problem, _ in zip(source, range(size), strict=False)]
        width = max(len(ids) for ids, _ in rows)
        input_ids = torch.full((size, width), tokenizer.pad_token_id)
        labels = torch.full((size, width), -100)
        for row, (ids, prompt_length) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            labels[row, prompt_length : len(ids)] = input_ids[row, prompt_length : len(ids)]
        yield input_ids, labels


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem, rng: random.Random) -> tuple[list[int], int]:
    """Token ids of prompt and demonstration, and the prompt's length."""
    messages = [{"role": "user", "content": problem.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    completion_ids = tokenizer.encode(demonstration(problem, rng) + END, add_special_tokens=False)
    return prompt_ids + completion_ids, len(prompt_ids)


def train(model: Qwen2ForCausalLM, data: Iterator[tuple[torch.Tensor, torch.Tensor]], steps: int) -> float:
    """Plain supervised training; returns the mean loss of the last hundred steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=steps)
    losses: list[float] = []
    for step, (input_ids, labels) in zip(range(1, steps + 1), data, strict=False):
        hidden = model.model(input_ids).last_hidden_state[:, :-1]  # right-padded, so causal attention needs no mask
        trained = labels[:, 1:] != -100
        loss = F.cross_entropy(model.lm_head(hidden[trained]), labels[:, 1:][trained])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0:
            click.echo(f"step {step}/{steps} loss {sum(losses[-50:]) / 50:.4f}")
    return sum(losses[-100:]) / len(losses[-100:])


@click.command(help=__doc__)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
@click.option("--seed", default=0, show_default=True)
@click.option("--steps", default=3000, show_default=True)
@click.option("--batch", default=64, show_default=True)
def main(out: Path, seed: int, steps: int, batch: int) -> None:
    """Tokenizer, model, training, model card."""
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    started = time.perf_counter()
    loss = train(model, batches(tokenizer, batch, seed), steps)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    card = MODEL_CARD.format(
        parameters=model.num_parameters(), layers=model.config.num_hidden_layers, hidden=model.config.hidden_size,
        vocabulary=VOCAB_SIZE, seed=seed, steps=steps, batch=batch, seconds=time.perf_counter() - started, loss=loss,
        error_rate=ERROR_RATE,
    )
    (out / "README.md").write_text(card)
    click.echo(f"wrote {model.num_parameters():,} parameters to {out}")


if __name__ == "__main__":
    main()
