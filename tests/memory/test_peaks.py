"""Bytes that tensors take: what is made, freed, aliased and held before is counted once, and a real step stands
beside its plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowmem_grpo import FastLanguageModel, GRPOConfig, GRPOTrainer
from lowmem_grpo.fast_model import FastPeftModel
from lowmem_grpo.memory import training_step
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.cutting import SPREAD
from lowmem_grpo.memory.offload import pages
from lowmem_grpo.memory.peaks import LiveBytes, peak_memory, update_peak
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.recipes.arithmetic import make_dataset
from lowmem_grpo.trainer.run_memory import settings_of


def test_the_peak_is_of_what_lives_together() -> None:
    with LiveBytes() as live:
        first = torch.zeros(1000)
        del first
        second = torch.zeros(600)
        third = second + 1
    assert (live.peak, live.now) == (4 * 1200, 4 * 1200)
    del third
    assert live.now == 4 * 600


def test_views_and_changes_in_place_take_nothing() -> None:
    outside = torch.zeros(100)
    with LiveBytes() as live:
        outside.add_(1)
        kept = outside[10:].view(9, 10)
    assert (live.peak, len(kept)) == (0, 9)


def test_what_was_there_before_counts_once_however_often_it_is_named() -> None:
    held = torch.zeros(100)
    with LiveBytes([held, held[:10]]) as live:
        made = torch.ones(50)
    assert live.peak == 4 * (100 + len(made))


def test_several_tensors_of_one_operation_count_each_and_empty_ones_not_at_all() -> None:
    with LiveBytes([torch.zeros(0)]) as live:
        empty = torch.zeros(0)
        kept = [torch.ones(5), *torch.zeros(6).sort()]
    assert (live.now, len(kept), len(empty)) == (4 * 5 + 4 * 6 + 8 * 6, 3, 0)


def loaded(checkpointing: bool, four_bit: bool = False) -> FastPeftModel:
    model, _ = FastLanguageModel.from_pretrained("tiny", max_seq_length=128, load_in_4bit=four_bit, dtype="bfloat16")
    return FastLanguageModel.get_peft_model(
        model, r=16, use_gradient_checkpointing=checkpointing, mlp_tile=128 if checkpointing else None
    )


def test_weights_in_4_bit_count_with_their_scales() -> None:
    model = loaded(True, four_bit=True)
    found = LiveBytes(model.state_dict().values()).now
    expected = plan(model.config, settings_of(model, GRPOConfig(), "transformers", 128), device("16GiB"))
    wanted = sum(row.train for row in expected.rows if row.name in ("weights", "embedding", "head", "adapters"))
    assert 0.95 < found / wanted < 1.05


@pytest.mark.slow
def test_a_real_step_stands_beside_its_plan_and_checkpointing_is_seen(tmp_path: Path) -> None:
    """The plan is of a card: on the CPU 32-bit copies of 16-bit matrices come on top, up to a third here."""
    peaks = {}
    for checkpointing in (False, True):
        args = GRPOConfig(output_dir=str(tmp_path), max_completion_length=64, logits_chunk=128, parity_steps=0,
                          per_device_train_batch_size=8, max_tokens_per_micro_batch=256)
        model = loaded(checkpointing)
        trainer = GRPOTrainer(model, [lambda completions, **kwargs: [0.0, 1.0] * 4], args, make_dataset("train", 16))
        trainer.update(trainer.rollout())
        settings = replace(settings_of(model, args, "transformers", 128), spread=SPREAD)  # as it is without a plan
        expected = plan(model.config, settings, device("16GiB")).train_allocated
        peaks[checkpointing] = update_peak(trainer, trainer.rollout())
        assert 0.9 < peaks[checkpointing] / expected < 1.33
    assert peaks[True] < 0.8 * peaks[False]


def test_a_plan_counts_host_memory_in_the_pages_that_layer_inputs_lie_in() -> None:
    assert training_step.PAGE_BYTES == pages.PAGE_BYTES


def test_peak_memory_of_this_process_is_bytes_and_not_kilobytes() -> None:
    peak = peak_memory(torch.device("cpu"))["memory/peak_bytes"]
    assert 50 * 2**20 < peak < 2**40  # torch alone needs more than 50 MiB
