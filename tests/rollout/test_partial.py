"""Sequences that a step leaves unfinished: tokens, versions, the bound on their age, checkpoints, what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_runs import TEXTS, digit_sum, load, make, moved
from transformers import PreTrainedTokenizerBase

from bench.attacks.small_run import StopAt, differences
from bench.attacks.small_run import make as small
from lowmem_grpo import GRPOConfig, GRPOTrainer
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.data.prompts import Prompt
from lowmem_grpo.engines.base import Until
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.partial import Carried, PartialRollouts, check_partial, versions_of
from lowmem_grpo.types import Rollout, RolloutGroup

pytestmark = pytest.mark.slow

PROMPTS = [[17, 40, 9], [300, 25, 77, 12], [5, 6], [100]]
PARAMS = SamplingParams(n=3, max_tokens=60, seed=3, temperature=1.5, stop_token_ids=list(range(0, 320, 17)))
SETTINGS: dict[str, Any] = {"max_completion_length": 40, "temperature": 1.5, "max_steps": 4, "seed": 3, "rows": TEXTS,
                            "shuffle_dataset": False, "learning_rate": 1e-4, "partial_rollouts": True}


def ids(groups: list[list[Rollout]]) -> list[list[list[int]]]:
    return [[one.completion_ids for one in group] for group in groups]


@pytest.mark.parametrize("guessing", [False, True])
def test_a_call_that_ends_early_and_goes_on_draws_the_same_tokens(
    tiny_policy: Policy, tokenizer: PreTrainedTokenizerBase, guessing: bool
) -> None:
    """With the same policy and numbers, in the same rows."""
    engine = TransformersEngine(tiny_policy, tokenizer, 120)
    full = engine.generate(PROMPTS, PARAMS)
    if guessing:
        engine.speculate(PARAMS)
    until = Until(3, prompts=1)
    first = engine.generate(PROMPTS, PARAMS, until=until)
    assert sum(map(bool, first)) >= 1 and len(until.left) == sum(not group for group in first) > 0
    begun = until.left
    for prompt, group in begun.items():
        assert len(group) == 3 and any(one.finish_reason == "unfinished" for one in group)
        for one, whole in zip(group, full[prompt], strict=True):
            assert one.completion_ids == whole.completion_ids[: len(one.completion_ids)]
            assert one.rollout_logprobs == pytest.approx(whole.rollout_logprobs[: len(one.completion_ids)], abs=1e-4)
    again = Until(3, begun=begun)
    second = engine.generate(PROMPTS, PARAMS, until=again)
    assert not again.left
    for prompt in begun:
        assert ids([second[prompt]]) == ids([full[prompt]])
        for one, whole in zip(second[prompt], full[prompt], strict=True):
            assert (one.finish_reason, one.text) == (whole.finish_reason, whole.text)
            assert one.rollout_logprobs == pytest.approx(whole.rollout_logprobs, abs=1e-4)


def test_a_prompt_that_must_be_finished_is_waited_for(tiny_policy: Policy, tokenizer: PreTrainedTokenizerBase) -> None:
    engine = TransformersEngine(tiny_policy, tokenizer, 120)
    for place in range(len(PROMPTS)):
        until = Until(3, prompts=1, surely=frozenset([place]))
        found = engine.generate(PROMPTS, PARAMS, until=until)
        assert len(found[place]) == 3 and place not in until.left


def test_each_token_has_the_version_that_drew_it_and_the_age_is_bounded(tmp_path: Path) -> None:
    run = make(tmp_path, model=moved(load()), **SETTINGS)
    partial = run.collector.partial
    assert partial is not None
    seen: list[float] = []
    for _ in range(4):
        known = {(id_of(one), row): rollout for one in partial.entries for row, rollout in enumerate(one.rollouts)}
        groups, version = run.rollout(), run.state.policy_version
        assert [len(group.rollouts) for group in groups] == [4, 4]
        for group in groups:
            for row, rollout in enumerate(group.rollouts):
                tags = versions_of(rollout)
                assert len(tags) == len(rollout.completion_ids) == len(rollout.rollout_logprobs)
                assert tags == sorted(tags) and version - tags[0] <= 1 and rollout.policy_version == tags[0]
                earlier = known.get((tuple(group.prompt_ids), row))
                count = 0 if earlier is None else len(earlier.completion_ids)
                assert tags[count:] == [version] * (len(tags) - count)
                assert earlier is None or rollout.rollout_logprobs[:count] == earlier.rollout_logprobs
        metrics = run.collector.metrics(groups, 1.0)
        assert metrics["sampling/partial/max_age"] <= 1
        seen.append(metrics["sampling/partial/carried_share"])
        step = run.update(groups)
        if seen[-1]:
            assert step["mismatch/corrected"] == 1.0 and "staleness/k3" in step
    assert seen[0] == 0 and max(seen[1:]) > 0


def id_of(one: Carried) -> tuple[int, ...]:
    return tuple(one.prompt.ids)


def test_oldest_groups_are_trained_first_and_too_old_ones_are_waited_for() -> None:
    asked: list[Until] = []

    def sample(prompts: list[Prompt], params: SamplingParams, until: Until) -> list[RolloutGroup]:
        asked.append(until)
        done = [*until.surely, *(place for place in range(len(prompts)) if place not in until.surely)][: until.prompts]
        until.left = {place: [Rollout([7], [-1.0], "unfinished"), Rollout([7], [-1.0], "stop")]
                      for place in range(len(prompts)) if place not in done}
        return [RolloutGroup({}, prompt.ids, [Rollout([7, 8], [-1.0, -2.0], "stop") for _ in range(2)]
                             if place in done else []) for place, prompt in enumerate(prompts)]

    numbers = iter(range(100))
    source: Any = SimpleNamespace(take=lambda count: [Prompt({}, [next(numbers)], "") for _ in range(count)])
    partial, sampler = PartialRollouts(1, 1.0), SimpleNamespace(sample=sample)
    params = SamplingParams(n=2)
    trained = [[group.prompt_ids[0] for _, group in partial.sample(source, sampler, params, 2, version)]  # type: ignore[arg-type]
               for version in range(3)]
    assert trained == [[0, 1], [2, 3], [4, 5]]
    assert [until.surely for until in asked] == [frozenset(), frozenset([0, 1]), frozenset([0, 1])]
    assert all(one.rollouts[0].versions == [2] for one in partial.entries)
    assert partial.counts["sampling/partial/carried_share"] == 0.5 and partial.drawn == 8


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    small(tmp_path / "whole", partial_rollouts=True).train()
    small(tmp_path / "parts", partial_rollouts=True, callbacks=[StopAt(3)]).train()
    state = json.loads((tmp_path / "parts" / "checkpoint-3" / "state.json").read_text())
    assert state["state"]["partial"], "something is carried over the stop"
    assert small(tmp_path / "parts", partial_rollouts=True).train(resume_from_checkpoint=True).finished
    assert differences(tmp_path / "parts", tmp_path / "whole") == []


def test_what_was_carried_is_dropped_in_words_where_the_setting_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small(tmp_path, partial_rollouts=True, callbacks=[StopAt(3)]).train()
    assert small(tmp_path).train(resume_from_checkpoint=True).finished
    assert "that were carried to the next step are dropped: partial_rollouts is off" in caplog.text


@pytest.mark.parametrize(("settings", "said"), [
    ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=False"),
    ({"extra_generations": 1}, "extra_generations=1"), ({"train_while_sampling": True}, "train_while_sampling=True"),
    ({"dynamic_sampling_rounds": 1}, "dynamic_sampling_rounds=1"), ({"replay_buffer_size": 2}, "replay_buffer_size=2"),
    ({"advantage_estimator": "remax"}, "advantage_estimator='remax'"),
    ({"score_while_sampling": True}, "score_while_sampling=True"),
    ({"num_iterations": 2}, "partial_rollouts_staleness is 1.*2 optimizer steps.*set it to 2"),
    ({"partial_rollouts_ahead": 1.5}, "partial_rollouts_ahead"), ({"partial_rollouts_staleness": 0}, "staleness"),
], ids=str)
def test_what_cannot_be_right_is_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GRPOConfig(partial_rollouts=True, **settings)


def test_engines_models_and_rows_that_cannot_carry_are_refused() -> None:
    able: Any = SimpleNamespace(name="vllm", generate=lambda prompts, params, until=None: [])
    unable: Any = SimpleNamespace(name="mine", generate=lambda prompts, params: [])
    params = SamplingParams()
    for arguments, said in (
        ((params, unable, False, False), "mine.*takes no until"), ((params, able, True, False), "experts"),
        ((params, able, False, True), "stream"), ((SamplingParams(stop="x"), able, False, False), "stop string"),
    ):
        with pytest.raises(ValueError, match=f"partial_rollouts=True: .*{said}.*leave partial_rollouts out"):
            check_partial(True, *arguments)
        check_partial(False, *arguments)
    check_partial(True, params, able, False, False)


def test_rollout_functions_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), partial_rollouts=True)
    with pytest.raises(ValueError, match="partial_rollouts is True, and the rollouts of rollout_func"):
        GRPOTrainer("no-such-model", digit_sum, config, TEXTS, rollout_func=print)
