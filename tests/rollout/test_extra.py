"""Runs that sample more completions than they train on: groups, the measured bias, and what is refused."""

import json
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_runs import TEXTS, digit_sum, load, make, moved

from bench.attacks.small_run import StopAt, differences
from bench.attacks.small_run import make as small
from lowmem_grpo import GRPOConfig, GRPOTrainer
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.base import Until
from lowmem_grpo.rollout.extra import ExtraGenerations, check_extra
from lowmem_grpo.types import Rollout, RolloutGroup

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"max_completion_length": 40, "temperature": 1.5, "max_steps": 2, "seed": 3,
                            "rows": TEXTS, "shuffle_dataset": False}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_groups_have_their_size_and_the_log_says_what_was_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(tmp_path, model=moved(load()), extra_generations=2, **SETTINGS)
    assert [record.message for record in caplog.records if "extra_generations=2" in record.message] == [
        "extra_generations=2: of 6 completions of a prompt the first 4 to end are trained on. Short answers end first, "
        "so the groups are biased towards them; sampling/extra/length_bias in the log says by how many tokens at least"]
    groups = run.rollout()
    assert [len(group.rollouts) for group in groups] == [4, 4]
    extra = run.collector.extra
    metrics = run.collector.metrics(groups, 1.0)
    lengths = [len(one.completion_ids) for group in groups for one in group.rollouts]
    assert metrics["sampling/extra/dropped"] == 4 == len(extra.dropped)
    assert metrics["sampling/extra/kept_length"] == fmean(lengths)
    assert metrics["sampling/extra/length_bias"] == pytest.approx(fmean(lengths) - fmean([*lengths, *extra.dropped]))
    run.update(groups)


def test_nothing_is_logged_without_the_setting(tmp_path: Path) -> None:
    run = make(tmp_path, **SETTINGS)
    assert not [name for name in run.collector.metrics(run.rollout(), 1.0) if name.startswith("sampling/extra")]


def test_the_bias_is_that_of_what_is_known() -> None:
    extra = ExtraGenerations(2)
    params, until = extra.asked(SamplingParams(n=2))
    assert params.n == 4 and until == Until(2)
    until.dropped[0] = [6, 6]
    extra.note([RolloutGroup({}, [1], [Rollout([1] * length, [0.0] * length, "stop") for length in (2, 6)])], until)
    assert extra.metrics() == {
        "sampling/extra/dropped": 2, "sampling/extra/dropped_tokens": 12, "sampling/extra/kept_length": 4.0,
        "sampling/extra/dropped_length": 6.0, "sampling/extra/length_bias": -1.0}
    extra.begin()
    assert extra.metrics() == {}


@pytest.mark.parametrize("settings", [
    {"train_while_sampling": True, "score_while_sampling": True}, {"dynamic_sampling_rounds": 1},
    {"replay_buffer_size": 4}, {"advantage_estimator": "remax"}, {"speculation": "lookup"},
    {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": TEXTS[:2], "num_generations_eval": 3},
], ids=str)
def test_it_goes_with(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = make(tmp_path, model=moved(load()), extra_generations=1, **SETTINGS | settings | {"max_steps": 1})
    sampled: list[tuple[int, Any]] = []
    generate = run.engine.generate

    def listening(prompts: Any, params: Any, *args: Any, until: Any = None, **named: Any) -> Any:
        sampled.append((params.n, until and until.enough))
        return generate(prompts, params, *args, until=until, **named)

    run.engine.generate = listening  # type: ignore[method-assign]
    run.train()
    assert (5, 4) in sampled
    assert set(sampled) <= {(5, 4), (3, None), (1, None)}  # evaluation and greedy completions are whole
    assert all(len(group.rollouts) == 4 for group in run.sampled)
    line = next(line for line in lines(tmp_path) if "reward" in line)
    assert line["sampling/extra/length_bias"] <= 0 < line["sampling/extra/dropped"]


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    small(tmp_path / "whole", extra_generations=2).train()
    small(tmp_path / "parts", extra_generations=2, callbacks=[StopAt(3)]).train()
    assert small(tmp_path / "parts", extra_generations=2).train(resume_from_checkpoint=True).finished
    assert differences(tmp_path / "parts", tmp_path / "whole") == []


def test_an_engine_that_cannot_end_a_call_is_refused() -> None:
    engine: Any = SimpleNamespace(name="mine", generate=lambda prompts, params, on_group=None: [])
    with pytest.raises(ValueError, match=r"extra_generations is 2, and the engine mine.*takes no until.*leave"):
        check_extra(2, 4, engine)
    check_extra(0, 4, engine)


def test_episodes_and_rollout_functions_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: the other
        """
        return a + b

    config = GRPOConfig(output_dir=str(tmp_path), extra_generations=2)
    for given, said in (({"tools": [add]}, "episodes of several turns"), ({"rollout_func": print}, "rollout_func")):
        with pytest.raises(ValueError, match=f"extra_generations is 2, and .*{said}.*leave extra_generations out"):
            GRPOTrainer("no-such-model", digit_sum, config, TEXTS, **given)


def test_the_plan_counts_what_is_sampled_at_once() -> None:
    config = GRPOConfig(num_generations=4, extra_generations=3)
    assert (config.sampled_per_prompt, config.completions_per_prompt, config.draws.extra) == (7, 4, 3)
