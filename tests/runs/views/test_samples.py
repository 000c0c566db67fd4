"""Samples of a run that goes on: in bounded memory, over the whole run, and its newest."""

import json
from typing import Any

from lowmem_grpo.runs.views.samples import LONGEST, Reservoir, commonest, shown_sample


def filled(samples: Reservoir, steps: int, each: int = 2) -> Reservoir:
    for step in range(1, steps + 1):
        for place in range(each):
            samples.add_sample({"step": step, "place": place})
    return samples


def test_few_are_all_kept_and_many_are_spread_over_the_run_in_whole_steps_with_the_newest() -> None:
    assert [sample["step"] for sample in filled(Reservoir(100, 10), 30).samples()] == sorted([*range(1, 31)] * 2)
    kept = filled(Reservoir(100, 10), 5000).samples()
    steps = sorted({sample["step"] for sample in kept})
    assert len(kept) <= 110 and steps[0] < 500 and steps[-1] == 5000
    assert {4996, 4997, 4998, 4999, 5000} <= set(steps)
    assert all([sample["place"] for sample in kept if sample["step"] == step] == [0, 1] for step in steps)


def test_a_step_with_very_many_samples_and_steps_without_order_are_bounded() -> None:
    assert 50 <= len(filled(Reservoir(100), 1, each=5000).samples()) <= 100
    mixed = Reservoir(100)
    for place in range(5000):
        mixed.add_sample({"step": place * 7919 % 64 * 1024})
    assert 50 <= len(mixed.samples()) <= 100


def test_whatever_a_line_holds_a_sample_is_small() -> None:
    long = "x" * 20_000
    turn = {"text": long, "calls": [{"name": long, "arguments": {long: long}}] * 100,
            "replies": [{"role": long, "name": long, "content": long}] * 100}
    sample = shown_sample({"step": 1, "prompt": [{"role": "user", "content": long}], "completion": long, "ending": long,
                           "rewards": {f"{place}{long}": 1.0 for place in range(100)}, "turns": [turn] * 500})
    assert len(json.dumps(sample)) < 110 * LONGEST and len(sample["turns"]) <= 40


def test_the_commonest_completions_of_the_last_steps_are_hidden() -> None:
    samples: list[dict[str, Any]] = [{"step": step, "completion": "early", "reward": 1.0} for step in (1, 1, 1)]
    samples += [{"step": step, "completion": text, "reward": reward} for step in range(2, 7) for text, reward in (
        ("DONE DONE", 1.0), ("DONE DONE", 0.5), (f"answer {step}", None), ("same", None))]
    assert commonest(samples) == {"total": 20, "steps": 5, "rows": [
        {"text": "DONE DONE", "count": 10, "reward": 0.75}, {"text": "same", "count": 5, "reward": None}]}
    assert commonest([sample for sample in samples if sample["completion"].startswith("answer")]) is None
    assert commonest([{"step": 1, "turns": []}] * 2) is None and commonest([]) is None
