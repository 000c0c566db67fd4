"""Memory that really runs out on a card: the step is made again in smaller micro-batches, with the same gradient.

On the CPU, where memory does not run out, an error takes its place."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from card import CARD, DEVICES, gpu, half
from card_runs import SETTINGS, gradients
from memory import Failing
from small_models import TINY
from trainer_runs import Gradients, digit_sum, norm, same
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.memory.oom import MemoryExhaustedError
from lowmem_grpo.types import Rollout, RolloutGroup

# Of a size at which half the tokens are hundreds of MiB less on a card; much smaller on the CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "tokens": 16384, "length": 1024},
    "cpu": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "tokens": 128, "length": 16},
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model for each device."""
    found = {}
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        sizes = {key: value for key, value in shape.items() if key not in ("tokens", "length")}
        config = LlamaConfig(
            vocab_size=384, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096,
            initializer_range=0.05, pad_token_id=0, bos_token_id=None, eos_token_id=2, **sizes,
        )
        found[name] = tmp_path_factory.mktemp(name)
        LlamaForCausalLM(config).save_pretrained(found[name])
        AutoTokenizer.from_pretrained(TINY).save_pretrained(found[name])
    return found


def make(stored: dict[str, Path], folder: Path, device: torch.device, max_tokens: int) -> GRPOTrainer:
    dtype = half() if device == CARD else torch.float32
    bare, _ = FastLanguageModel.from_pretrained(
        str(stored[device.type]), max_seq_length=2048, load_in_4bit=False, dtype=dtype, device=str(device)
    )
    model = FastLanguageModel.get_peft_model(bare, r=8, use_gradient_checkpointing=False)
    settings = SETTINGS | {"max_tokens_per_micro_batch": max_tokens, "per_device_train_batch_size": 64}
    config = GRPOConfig(output_dir=str(folder), **settings)
    trainer = GRPOTrainer(model, digit_sum, config, [{"prompt": "Start with 1."}])
    trainer.learner.scaler = torch.amp.GradScaler(device.type, init_scale=1.0, enabled=False)
    return trainer


def groups_for(device: torch.device) -> list[RolloutGroup]:
    """Four groups of four random completions of unequal lengths: one micro-batch of all that `tokens` allow."""
    generator = torch.Generator().manual_seed(0)
    longest = SHAPES[device.type]["length"]

    def rollout(number: int) -> Rollout:
        ids = torch.randint(3, 380, (longest - 3 * (number % 4),), generator=generator).tolist()
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


@contextmanager
def short(trainer: GRPOTrainer, smaller: int, larger: int) -> Iterator[None]:
    """Inside there is memory for the smaller micro-batches and not for the larger ones (bytes, on a card)."""
    if trainer.policy.device == CARD:
        with capped((smaller + larger) // 2):
            yield
        return
    handle = trainer.policy.backbone.norm.register_forward_hook(Failing(1))  # with gradients of a first batch
    yield
    handle.remove()


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_survives_a_shortage_of_memory_with_the_same_gradient(
    tmp_path: Path, device: torch.device, stored: dict[str, Path]
) -> None:
    tokens, groups, needed = SHAPES[device.type]["tokens"], groups_for(device), [0, 0]
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        trainer = make(stored, tmp_path, device, tokens // 2)
        gradients(trainer, copy.deepcopy(groups))  # what is made once is made
        if device == CARD:
            expected, needed[0] = reserved_by(trainer, groups)
            trainer.args.max_tokens_per_micro_batch = tokens
            _, needed[1] = reserved_by(trainer, groups)
            assert needed[1] - needed[0] > 200 * 2**20
        else:
            expected = gradients(trainer, copy.deepcopy(groups))
        trainer.args.max_tokens_per_micro_batch = tokens
        failures = 1 if trainer.memory.train.spare is None else 2  # the first takes what the sampler keeps
        with short(trainer, *needed):
            found = gradients(trainer, copy.deepcopy(groups))
            assert trainer.memory.train.failures == failures
            assert trainer.memory.train.lowered == tokens // 2
            again = gradients(trainer, copy.deepcopy(groups))
        assert trainer.memory.train.failures == failures
        assert norm(expected) > 0 and same(found, expected) and same(again, expected)
    finally:
        torch.use_deterministic_algorithms(before)


@gpu
def test_a_step_that_cannot_fit_says_so_and_frees_the_card(
    tmp_path: Path, stored: dict[str, Path]
) -> None:
    trainer, groups = make(stored, tmp_path, CARD, 16384), groups_for(CARD)
    gradients(trainer, groups_for(CARD))
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    with capped(torch.cuda.memory_reserved() + 2**20), pytest.raises(MemoryExhaustedError, match="Measured peak"):
        trainer.forward_backward(groups)
    gc.collect()
    assert torch.cuda.memory_allocated() - held <= 2**20
    assert gradients(trainer, groups_for(CARD))
