"""One learning run of a setting and a seed, through the visible loop. Prints its rewards step by step as JSON."""

import json
import sys
import time
from collections import deque
from pathlib import Path

import click
import torch

from bench.learning.settings import BY_NAME, COMMON, Setting
from lowmem_grpo.recipes.arithmetic import PRESETS, ArithmeticOptions, make_lesson
from lowmem_grpo.recipes.lesson import load
from lowmem_grpo.recipes.presets import prepare
from lowmem_grpo.types import RolloutGroup

LOGGED = {"trained_early": "train_while_sampling/share"}


def run(setting: Setting, seed: int, steps: int, folder: Path) -> dict[str, list[float]]:
    """Return mean reward, share of right answers and mean length of each step's samples, and the share of completions
    that were trained before all were sampled, where some were."""
    config = {**COMMON, **setting.config, "seed": seed, "max_steps": steps, "output_dir": str(folder)}
    options = ArithmeticOptions(engine=setting.engine, load_in_4bit=setting.four_bit, config=config)
    _, trainer = load(prepare(options, {}, PRESETS), make_lesson(options, seed))
    torch.manual_seed(seed)
    waiting: deque[list[RolloutGroup]] = deque()
    rewards, right, lengths = [], [], []
    logged: dict[str, list[float]] = {}
    while trainer.state.global_step < steps:
        groups = trainer.rollout()
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards.append(sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts))
        right.append(sum(rollout.rewards["correct_answer"] or 0.0 for rollout in rollouts) / len(rollouts))
        lengths.append(sum(len(rollout.completion_ids) for rollout in rollouts) / len(rollouts))
        metrics = trainer.collector.metrics(groups, 1.0)
        waiting.append(groups)
        if len(waiting) > setting.stale:
            metrics |= trainer.update(waiting.popleft())
        for short, name in LOGGED.items():
            if name in metrics:
                logged.setdefault(short, []).append(metrics[name])
    return {"rewards": rewards, "right": right, "lengths": lengths, **logged}


@click.command()
@click.argument("name")
@click.argument("seed", type=int)
@click.argument("steps", type=int)
@click.argument("folder", type=click.Path(path_type=Path))
def main(name: str, seed: int, steps: int, folder: Path) -> None:
    started = time.perf_counter()
    found = run(BY_NAME[name], seed, steps, folder)
    print(json.dumps(found | {"seconds": time.perf_counter() - started}), file=sys.stdout)


if __name__ == "__main__":
    main()
