"""The parity gate: it measures right, stops a run that has gone astray, and lets a good one be."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from small_models import load_model, with_adapter

from lowmem_grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.losses.off_policy import MismatchWatch
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.parity import ParityError, ParityGate
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import RolloutGroup


def sampled(policy: Policy, tokenizer: Any, **options: Any) -> list[RolloutGroup]:
    """Two groups of four completions by the policy itself."""
    prompts = [[5, 6, 7], [8, 9]]
    params = SamplingParams(n=4, max_tokens=20, seed=0, **options)
    rollouts = TransformersEngine(policy, tokenizer, 128).generate(prompts, params)
    return [RolloutGroup({}, prompt, group) for prompt, group in zip(prompts, rollouts, strict=True)]


@pytest.fixture(scope="module")
def sampled_once(tiny_policy: Policy, tokenizer: Any) -> list[RolloutGroup]:
    return sampled(tiny_policy, tokenizer)


@pytest.fixture
def groups(sampled_once: list[RolloutGroup]) -> list[RolloutGroup]:
    """Groups of `tiny_policy` that a test may change."""
    return deepcopy(sampled_once)


def gate(policy: Policy, **options: Any) -> ParityGate:
    """Of a run that has made no step yet."""
    own = {name: options.pop(name) for name in ("state", "stride", "mismatch") if name in options}
    config = GRPOConfig(**options)
    params = config.sampling(None)
    return ParityGate(policy, params, config.parity_steps, config.parity_bound, **({"state": TrainerState()} | own))


def test_a_sampler_with_the_same_weights_passes_with_a_ratio_of_one(
    tiny_policy: Policy, groups: list[RolloutGroup]
) -> None:
    mismatch = MismatchWatch()
    metrics = gate(tiny_policy, mismatch=mismatch).watch(groups)
    assert metrics["sampling/parity/mean"] < 1e-4 and metrics["sampling/parity/max"] < 1e-3
    assert abs(metrics["sampling/parity/ratio"] - 1) < 1e-3
    assert mismatch.last_k3 == metrics["sampling/parity/k3"]  # decides on a correction
    assert gate(tiny_policy).check([]) == {}


def test_changed_weights_stop_the_run_with_a_message_that_names_causes(tokenizer: Any) -> None:
    """Dropout is off while the gate checks, and back afterwards."""
    policy = Policy(with_adapter(load_model("tiny"), lora_dropout=0.5))
    groups = sampled(policy, tokenizer)
    policy.model.train()
    assert gate(policy).check(groups)
    assert policy.model.training
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(0.05)
    with pytest.raises(ParityError, match=r"allowed is 0\.001 \(parity_bound\)\. Likely causes: the adapter"):
        gate(policy).check(groups)


def test_another_temperature_is_noticed_unless_the_users_bound_allows_it(tiny_policy: Policy, tokenizer: Any) -> None:
    groups = sampled(tiny_policy, tokenizer, temperature=0.7)
    assert gate(tiny_policy, temperature=0.7).check(groups)
    with pytest.raises(ParityError):
        gate(tiny_policy).check(groups)
    assert gate(tiny_policy, parity_bound=100.0).check(groups)["sampling/parity/mean"] > 0.001


def test_truncated_sampling_is_measured_and_not_judged(tiny_policy: Policy, tokenizer: Any) -> None:
    groups = sampled(tiny_policy, tokenizer, top_p=0.5, temperature=1.5)
    metrics = gate(tiny_policy, top_p=0.5, temperature=1.5).check(groups)
    assert metrics["sampling/parity/mean"] > 0.001


def test_checks_come_first_and_then_every_few_steps(tiny_policy: Policy, groups: list[RolloutGroup]) -> None:
    state = TrainerState()
    watcher, checked = gate(tiny_policy, parity_steps=10, state=state, stride=3), []
    for state.global_step in range(0, 32, 3):
        checked += [state.global_step] if watcher.watch(groups) else []
    assert checked == [0, 12, 21, 30]
    assert not gate(tiny_policy, parity_steps=0).watch(groups)


def test_a_resumed_run_is_checked_at_once_and_records_nothing_new(
    tiny_policy: Policy, groups: list[RolloutGroup]
) -> None:
    state, mismatch = TrainerState(global_step=7), MismatchWatch()
    assert gate(tiny_policy, state=state, mismatch=mismatch).watch(groups) == {}
    assert mismatch.last_k3 is None
    for group in groups:
        for rollout in group.rollouts:
            rollout.rollout_logprobs = [value - 1 for value in rollout.rollout_logprobs]
    with pytest.raises(ParityError):
        gate(tiny_policy, state=state).watch(groups)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_value_that_is_no_number_is_left_to_the_guard_of_the_step(
    tiny_policy: Policy, groups: list[RolloutGroup], value: float, caplog: pytest.LogCaptureFixture
) -> None:
    mismatch = MismatchWatch()
    whole = gate(tiny_policy).watch(groups)
    groups[0].rollouts[0].rollout_logprobs[0] = value
    metrics = gate(tiny_policy, mismatch=mismatch).watch(groups)
    assert metrics["sampling/parity/mean"] == pytest.approx(whole["sampling/parity/mean"], abs=1e-5)
    assert mismatch.last_k3 is not None and mismatch.last_k3 < 1e-5
    assert "left out 1 of" in caplog.text
    for group in groups:
        for rollout in group.rollouts:
            rollout.rollout_logprobs = [value] * len(rollout.rollout_logprobs)
    assert gate(tiny_policy).watch(groups) == {}
