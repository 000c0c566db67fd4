"""Run one setting with one seed through the visible loop, in a process of its own."""

import time
from collections import defaultdict, deque
from statistics import fmean
from typing import Any

import torch

from bench.learning.settings import BY_NAME, COMMON
from lowmem_grpo.recipes.arithmetic import PRESETS, ArithmeticOptions, make_lesson
from lowmem_grpo.recipes.lesson import load
from lowmem_grpo.recipes.presets import prepare
from lowmem_grpo.types import RolloutGroup


def run(name: str, seed: int, steps: int, folder: str) -> dict[str, Any]:
    """Return mean reward, share of right answers and mean length of each step's samples, the share of completions that
    were trained before all were sampled, if there were any, and the seconds of the whole run."""
    started, setting = time.perf_counter(), BY_NAME[name]
    config = {**COMMON, **setting.config, "seed": seed, "max_steps": steps, "output_dir": folder}
    options = ArithmeticOptions(engine=setting.engine, load_in_4bit=setting.four_bit, config=config)
    _, trainer = load(prepare(options, {}, PRESETS), make_lesson(options, seed))
    torch.manual_seed(seed)
    waiting: deque[list[RolloutGroup]] = deque()
    curves: dict[str, list[float]] = defaultdict(list)
    while trainer.state.global_step < steps:
        groups = trainer.rollout()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        curves["rewards"].append(fmean(rollout.reward or 0.0 for rollout in rollouts))
        curves["right"].append(fmean(rollout.rewards["correct_answer"] or 0.0 for rollout in rollouts))
        curves["lengths"].append(fmean(len(rollout.completion_ids) for rollout in rollouts))
        metrics = trainer.collector.metrics(groups, 1.0)
        waiting.append(groups)
        if len(waiting) > setting.stale:
            metrics |= trainer.update(waiting.popleft())
        if (early := metrics.get("train_while_sampling/share")) is not None:
            curves["trained_early"].append(early)
    return curves | {"seconds": time.perf_counter() - started}
