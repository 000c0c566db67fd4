"""Memory that really runs out on a card: the step is made again in smaller micro-batches, with the same gradient.

tests/trainer/test_out_of_memory.py has the same on the CPU, where an error takes its place."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from card import CARD, gpu, half
from card_runs import SETTINGS, gradients
from small_models import TINY
from trainer_runs import Gradients, digit_sum, norm, same
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.memory.oom import MemoryExhaustedError
from lowmem_grpo.types import Rollout, RolloutGroup

TOKENS, LENGTH = 16384, 1024  # half of these tokens are hundreds of MiB less


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096, hidden_size=1024,
        intermediate_size=4096, num_hidden_layers=4, initializer_range=0.05, pad_token_id=0, bos_token_id=None,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def make(stored: Path, folder: Path, max_tokens: int) -> GRPOTrainer:
    bare, _ = FastLanguageModel.from_pretrained(
        str(stored), max_seq_length=2048, load_in_4bit=False, dtype=half(), device=str(CARD)
    )
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    settings = SETTINGS | {"max_tokens_per_micro_batch": max_tokens, "per_device_train_batch_size": 64}
    config = GRPOConfig(output_dir=str(folder), **settings)
    trainer = GRPOTrainer(model, digit_sum, config, [{"prompt": "Start with 1."}])
    trainer.learner.scaler = torch.amp.GradScaler("cuda", init_scale=1.0, enabled=False)
    return trainer


def random_groups() -> list[RolloutGroup]:
    """Four groups of four random completions of unequal lengths: one micro-batch of all that TOKENS allow."""
    generator = torch.Generator().manual_seed(0)

    def rollout(number: int) -> Rollout:
        ids = torch.randint(3, 380, (LENGTH - 3 * (number % 4),), generator=generator).tolist()
        return Rollout(ids, [-6.0] * len(ids), "stop", advantage=float(number % 4) - 1.5)

    return [RolloutGroup({}, list(range(5, 12 + number)), [rollout(n) for n in range(4)]) for number in range(4)]


@contextmanager
def capped(num_bytes: int) -> Iterator[None]:
    """Inside, this process can have so many bytes of the card."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(CARD).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def reserved_by(trainer: GRPOTrainer, groups: list[RolloutGroup]) -> tuple[Gradients, int]:
    """A step's gradient, and the most bytes that the process took of the card for it."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found = gradients(trainer, copy.deepcopy(groups))
    return found, torch.cuda.max_memory_reserved()


@gpu
def test_a_step_survives_a_shortage_of_memory_with_the_same_gradient(tmp_path: Path, stored: Path) -> None:
    groups, before = random_groups(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        trainer = make(stored, tmp_path, TOKENS // 2)
        gradients(trainer, copy.deepcopy(groups))  # what is made once is made
        expected, smaller = reserved_by(trainer, groups)
        trainer.args.max_tokens_per_micro_batch = TOKENS
        _, larger = reserved_by(trainer, groups)
        assert larger - smaller > 200 * 2**20
        failures = 1 if trainer.memory.train.spare is None else 2  # the first takes what the sampler keeps
        with capped((smaller + larger) // 2):
            found = gradients(trainer, copy.deepcopy(groups))
            assert trainer.memory.train.failures == failures
            assert trainer.memory.train.lowered == TOKENS // 2
            again = gradients(trainer, copy.deepcopy(groups))
        assert trainer.memory.train.failures == failures
        assert norm(expected) > 0 and same(found, expected) and same(again, expected)
    finally:
        torch.use_deterministic_algorithms(before)


@gpu
def test_a_step_that_cannot_fit_says_so_and_frees_the_card(tmp_path: Path, stored: Path) -> None:
    trainer, groups = make(stored, tmp_path, TOKENS), random_groups()
    gradients(trainer, random_groups())
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    with capped(torch.cuda.memory_reserved() + 2**20), pytest.raises(MemoryExhaustedError, match="Measured peak"):
        trainer.forward_backward(groups)
    gc.collect()
    assert torch.cuda.memory_allocated() - held <= 2**20
    assert gradients(trainer, random_groups())
