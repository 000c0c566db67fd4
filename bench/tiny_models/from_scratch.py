"""Make a small chat model from scratch: tokenizer, Qwen2, batches of demonstrations, training of all weights."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTEXT = 2048
WARM_UP = 100  # steps
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Batch = tuple[torch.Tensor, torch.Tensor]  # input_ids (B, T), and labels, which are -100 where nothing is trained
Row = tuple[list[int], list[bool]]  # token ids, and which of them are trained


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


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, shape: dict[str, Any]) -> Qwen2ForCausalLM:
    """Return a seeded, untrained Qwen2 with tied embeddings; `shape` gives sizes of Qwen2Config and the vocabulary."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        **shape, max_position_embeddings=CONTEXT, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def batches(
    tokenizer: PreTrainedTokenizerFast, source: Iterator[Any], demonstrate: Callable[[Any], str], size: int
) -> Iterator[Batch]:
    """Yield batches without end; only completions are trained.

    One problem is skipped after each batch, since `zip` takes it before it finds the batch full. The embedded model was
    made this way: another order would make another model than its card describes.
    """
    while True:
        rows = [encode(tokenizer, problem.question, demonstrate(problem))
                for problem, _ in zip(source, range(size), strict=False)]
        yield padded(tokenizer, rows)


def padded(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> Batch:
    """Return rows as one right-padded batch."""
    width = max(len(ids) for ids, _ in rows)
    input_ids, labels = (torch.full((len(rows), width), fill) for fill in (tokenizer.pad_token_id, -100))
    for row, (ids, own) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor(ids).where(torch.tensor(own), -100)
    return input_ids, labels


def encode(tokenizer: PreTrainedTokenizerFast, question: str, answer: str) -> Row:
    """Return the token ids of prompt and answer, and which of them are the answer's."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    completion_ids = tokenizer.encode(answer + END, add_special_tokens=False)
    return prompt_ids + completion_ids, [False] * len(prompt_ids) + [True] * len(completion_ids)


def loss_of(model: Qwen2ForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the labelled tokens."""
    input_ids, labels = batch
    hidden = model.model(input_ids).last_hidden_state[:, :-1]  # right-padded: causal attention needs no mask
    trained = labels[:, 1:] != -100
    return F.cross_entropy(model.lm_head(hidden[trained]).float(), labels[:, 1:][trained])


def train(model: Qwen2ForCausalLM, data: Iterator[Batch], steps: int, learning_rate: float = 2e-3) -> None:
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


def save(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write model and tokenizer. The model card is written by hand."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    click.echo(f"wrote {model.num_parameters():,} parameters to {out}")


OUT = click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the model.")
SEED = click.option("--seed", default=0, show_default=True)
