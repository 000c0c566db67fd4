"""A GRPO step of the embedded model on a card as on the CPU: gradients, scales, optimizers, memory."""

import copy
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from card import CARD, CPU, DEVICES, gpu, half
from card_runs import gradients, make, plain_gradients, plain_logprobs, plain_twin, sample
from safetensors.torch import load_file
from trainer_runs import Gradients, adapter, relative, same

from lowmem_grpo import GRPOTrainer
from lowmem_grpo.runs.records import read_lines
from lowmem_grpo.trainer.nonfinite import FILE
from lowmem_grpo.types import TOKEN_FIELDS, RolloutGroup
from tests.attacks.small_run import StopAt

TOKENS = 160  # of a micro-batch: the groups make at least three of them
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
slow = pytest.mark.slow
PRECISIONS = [torch.float32, *(pytest.param(dtype, marks=slow) for dtype in (torch.bfloat16, torch.float16))]

on_both = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> list[RolloutGroup]:
    """The same rollouts for every device."""
    return sample(tmp_path_factory.mktemp("sampled"))


@contextmanager
def deterministic() -> Iterator[None]:
    """Inside, torch takes the algorithms that give the same bits every time, and refuses what has none."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(before)


# The gradient of a step


@on_both
@pytest.mark.parametrize(("dtype", "four_bit", "checkpointing"), [
    (torch.float32, False, False), (torch.bfloat16, True, "offload"),
    *(pytest.param(*case, marks=slow) for case in (
        (torch.bfloat16, False, "offload"), (torch.float16, False, False), (torch.bfloat16, True, False),
        (torch.float16, True, "offload"))),
])
@pytest.mark.every(4)
def test_the_gradient_is_as_near_to_float64_as_that_of_plain_transformers(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, four_bit: bool, checkpointing: Any,
    sampled: list[RolloutGroup],
) -> None:
    lora = {"four_bit": four_bit, "use_gradient_checkpointing": checkpointing}
    trainer = make(tmp_path, device, dtype, lora, max_tokens_per_micro_batch=TOKENS)
    truth = plain_gradients(plain_twin(trainer, torch.float64, CPU), sampled)
    reference = plain_gradients(plain_twin(trainer, dtype, device), sampled, scale=256.0)
    ours = gradients(trainer, copy.deepcopy(sampled))
    # through six layers other roundings add up to other errors: those of the same size are meant
    assert relative(ours, truth) <= 3 * relative(reference, truth) + 2 * ROUNDING[dtype] < 0.6


@on_both
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_log_probabilities_are_as_near_to_float64_as_those_of_plain_transformers(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, sampled: list[RolloutGroup]
) -> None:
    trainer, groups = make(tmp_path, device, dtype, max_tokens_per_micro_batch=TOKENS), copy.deepcopy(sampled)
    trainer.learner.fill_fields(groups, TOKEN_FIELDS["old_logprobs"])
    twins = plain_twin(trainer, torch.float64, CPU), plain_twin(trainer, dtype, device)
    errors: list[tuple[float, float]] = []
    for group in groups:
        for rollout in group.rollouts:
            with torch.no_grad():
                truth, plain = (plain_logprobs(t, group.prompt_ids, rollout.completion_ids).cpu() for t in twins)
            found = (rollout.old_logprobs, plain)
            errors.append(tuple((values.double() - truth).abs().mean().item() for values in found))
    ours, reference = (sum(column) / len(column) for column in zip(*errors, strict=True))
    assert ours <= 2 * reference + ROUNDING[dtype]


@on_both
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_the_same_rollouts_give_the_same_bits_however_they_are_packed(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, sampled: list[RolloutGroup]
) -> None:
    trainer = make(tmp_path, device, dtype)
    with deterministic():
        whole = gradients(trainer, copy.deepcopy(sampled))
        assert same(gradients(trainer, copy.deepcopy(sampled)), whole)
        trainer.args.max_tokens_per_micro_batch = TOKENS
        split = gradients(trainer, copy.deepcopy(sampled))
        assert same(gradients(trainer, copy.deepcopy(sampled)), split)
    rounding = 20 * ROUNDING[dtype]
    if device == CARD:  # its libraries add up in another order for other sizes: then as far apart as plain transformers
        truth, reference = (plain_gradients(plain_twin(trainer, *how), sampled, scale=256.0)
                            for how in ((torch.float64, CPU), (dtype, device)))
        rounding += 2 * relative(reference, truth)
    assert relative(split, whole) < rounding


# Numbers that are none


def spoil(trainer: GRPOTrainer, value: float) -> tuple[str, Any]:
    """From now on one adapter's gradient has this value in one row; its name, and a handle to end it."""
    name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if "layers.1.mlp.up_proj.lora_A" in n)
    row = torch.tensor([1], device=parameter.device)
    return name, parameter.register_hook(lambda gradient: gradient.index_fill(0, row, value))


def settle(trainer: GRPOTrainer, groups: list[RolloutGroup]) -> None:
    """Steps until one is made: in float16 the scale of the loss comes down first."""
    for _ in range(16):
        if not trainer.update(copy.deepcopy(groups))["optimizer/skipped"]:
            return
    raise AssertionError("no step was made")


@on_both
@pytest.mark.parametrize("value", [math.inf, pytest.param(math.nan, marks=slow)])
@pytest.mark.slow
def test_an_overflow_in_float16_lowers_the_scale_and_is_neither_trained_on_nor_counted(
    tmp_path: Path, device: torch.device, sampled: list[RolloutGroup], value: float
) -> None:
    trainer = make(tmp_path, device, torch.float16, max_steps=40)
    settle(trainer, sampled)
    before, scale = adapter(trainer), trainer.learner.scaler.get_scale()
    assert scale > 1
    _, handle = spoil(trainer, value)
    metrics = trainer.update(copy.deepcopy(sampled))
    handle.remove()
    assert same(adapter(trainer), before)
    assert trainer.learner.scaler.get_scale() == scale / 2
    assert (metrics["optimizer/skipped"], metrics["nonfinite/steps"]) == (1, 0)
    assert not (tmp_path / FILE).exists()
    assert trainer.update(copy.deepcopy(sampled))["optimizer/skipped"] == 0
    assert not same(adapter(trainer), before)


@slow
@on_both
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_gradient_that_is_no_number_is_named_and_not_trained_on(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, sampled: list[RolloutGroup]
) -> None:
    trainer = make(tmp_path, device, dtype)
    settle(trainer, sampled)
    before = adapter(trainer)
    name, _ = spoil(trainer, math.nan)
    metrics = trainer.update(copy.deepcopy(sampled))
    assert same(adapter(trainer), before)
    assert (metrics["optimizer/skipped"], metrics["nonfinite/steps"]) == (1, 1)
    assert all(line["parameters"] == [name] for line in read_lines(tmp_path / FILE))


# Optimizers


@on_both
@pytest.mark.parametrize("optim", [
    "adamw_8bit", *(pytest.param(name, marks=slow) for name in ("adamw_torch_fused", "paged_adamw_8bit")),
])
@pytest.mark.slow
def test_every_optimizer_goes_where_adam_in_32_bits_goes(
    tmp_path: Path, device: torch.device, optim: str, sampled: list[RolloutGroup]
) -> None:
    if optim == "paged_adamw_8bit" and device == CPU:
        pytest.skip("paged memory is a card's")
    moves: list[Gradients] = []
    for name in ("adamw_torch", optim):
        # enough numbers in each tensor for bitsandbytes to keep their states in 8 bits
        trainer = make(tmp_path, device, lora={"r": 64}, optim=name, max_steps=100)
        start = adapter(trainer)
        for _ in range(3):
            trainer.update(copy.deepcopy(sampled))
        moves.append({key: (value - start[key]).cpu() for key, value in adapter(trainer).items()})
    assert relative(moves[1], moves[0]) < (1e-3 if optim == "adamw_torch_fused" else 0.2)
    if "8bit" in optim:
        states = list(trainer.learner.optimizer.state.values())
        assert {state["state1"].dtype for state in states} == {torch.uint8}
        paged = {state["state1"].numel(): getattr(state["state1"], "is_paged", False) for state in states}
        # bitsandbytes pages no state of fewer than 100,000 numbers
        assert paged == {size: optim.startswith("paged") and size >= 100_000 for size in paged}


@slow
@on_both
@pytest.mark.parametrize(("dtype", "optim"), [
    (torch.float32, "adamw_torch"), (torch.bfloat16, "adamw_8bit"), (torch.float16, "adamw_torch"),
    pytest.param(torch.bfloat16, "paged_adamw_8bit", id="paged"),
])
def test_a_resumed_run_is_the_undisturbed_one(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, optim: str
) -> None:
    if optim == "paged_adamw_8bit" and device == CPU:
        pytest.skip("paged memory is a card's")
    settings: dict[str, Any] = {"optim": optim, "beta": 0.02, "save_strategy": "steps", "save_steps": 100}
    lora = {"lora_dropout": 0.1, "r": 64}
    with deterministic():
        make(tmp_path / "whole", device, dtype, lora, **settings).train()
        make(tmp_path / "parts", device, dtype, lora, [StopAt(2)], **settings).train()
        done = make(tmp_path / "parts", device, dtype, lora, **settings).train(resume_from_checkpoint=True)
    assert done.finished
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("whole", "parts")]
    assert same(load_file(files[0]), load_file(files[1]))
    completions = [read_lines(tmp_path / name / "completions.jsonl") for name in ("whole", "parts")]
    assert completions[0] == completions[1] != []


# Memory


def bytes_held(device: torch.device) -> int:
    """On a card all that is allocated; on the CPU all tensors that Python can reach."""
    gc.collect()
    if device == CARD:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    found = [value.untyped_storage() for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


@on_both
@pytest.mark.parametrize("checkpointing", ["offload", *(pytest.param(value, marks=slow) for value in (False, True))])
@pytest.mark.slow
def test_a_step_leaves_no_memory_behind(
    tmp_path: Path, device: torch.device, sampled: list[RolloutGroup], checkpointing: Any
) -> None:
    lora = {"use_gradient_checkpointing": checkpointing}
    dtype = half() if device == CARD else torch.float32  # 16 bits are slow on many CPUs
    trainer = make(tmp_path, device, dtype, lora, max_steps=100, max_tokens_per_micro_batch=TOKENS)
    groups = copy.deepcopy(sampled)
    settle(trainer, groups)  # optimizer, libraries
    trainer.update(groups)  # the first step whose copy of the optimizer holds its states: that buffer is used again
    before = bytes_held(device)
    for _ in range(2):
        trainer.update(groups)
        assert abs(bytes_held(device) - before) <= 4096  # a few numbers that were measured
    trainer.learner.optimizer.zero_grad()
    del trainer
    # the model, its adapter and all that came with them, of which the embedding alone would be seen
    assert before - bytes_held(device) >= 384 * 128 * dtype.itemsize


@gpu
def test_later_steps_and_more_micro_batches_take_no_more_memory(tmp_path: Path, sampled: list[RolloutGroup]) -> None:
    trainer = make(tmp_path, CARD, half(), max_steps=100, max_tokens_per_micro_batch=TOKENS)
    settle(trainer, sampled)
    peaks = []
    for times in (1, 1, 4):
        groups = [copy.deepcopy(group) for _ in range(times) for group in sampled]
        trainer.forward_backward(groups)  # adds to gradients that are there from now on
        before = bytes_held(CARD)
        torch.cuda.reset_peak_memory_stats()
        trainer.forward_backward(groups)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        trainer.learner.optimizer.zero_grad(set_to_none=True)
    assert max(peaks) <= 1.02 * min(peaks)


# A run


@on_both
@pytest.mark.parametrize(("dtype", "four_bit"), [
    (torch.bfloat16, True), pytest.param(torch.float16, False, marks=slow)])
@pytest.mark.slow
def test_a_run_samples_scores_trains_saves_and_tells_what_it_measured(
    tmp_path: Path, device: torch.device, dtype: torch.dtype, four_bit: bool
) -> None:
    lora = {"four_bit": four_bit, "use_gradient_checkpointing": "offload"}
    trainer = make(
        tmp_path, device, dtype, lora, max_steps=2, parity_steps=1, beta=0.05, num_iterations=2,
        max_completion_length=12,
    )
    start = adapter(trainer)
    done = trainer.train()
    assert done.finished
    lines = read_lines(tmp_path / "metrics.jsonl")
    assert lines[-1]["step"] == 2
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[0].get("sampling/parity/mean", math.inf) < (0.02 if dtype == torch.bfloat16 else 0.01)
    assert dtype == torch.float16 or not same(adapter(trainer), start)  # in float16 the first steps may be skipped
    if device == CARD:
        assert lines[-1]["memory/peak_bytes"] >= lines[-1]["memory/train_bytes"] > 0
        assert lines[-1]["memory/generate_bytes"] > 0 and lines[-1]["memory/planned_train_bytes"] > 0
