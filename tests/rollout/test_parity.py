"""The parity gate: it measures right, stops a run that has gone astray, and lets a good one be."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import load_model, noisy_model, scatter, with_adapter

from lowmem_grpo import GRPOConfig
from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.engines.transformers_engine import TransformersEngine
from lowmem_grpo.losses.off_policy import MismatchWatch
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.rollout.parity import ParityError, ParityGate
from lowmem_grpo.runs.state import TrainerState
from lowmem_grpo.types import Rollout, RolloutGroup, Turn


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


def shift(groups: list[RolloutGroup], by: float) -> None:
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.rollout_logprobs = [value - by for value in rollout.rollout_logprobs]


def gate(policy: Policy, **options: Any) -> ParityGate:
    """Of a run that has made no step yet."""
    own = {name: options.pop(name) for name in ("state", "stride", "mismatch", "cache_dtype", "correction")
           if name in options}
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
    shift(groups, 1)
    with pytest.raises(ParityError):
        gate(tiny_policy, state=state).watch(groups)


@pytest.mark.parametrize(("correction", "by", "said"), [
    (None, 0.0, "Nothing corrects it yet, as the mean k3 is at most 0.001"),
    (None, 0.1, "Tokens are weighed for it, as the mean k3 is above 0.001"),
    (True, 0.1, "Tokens are weighed for it (vllm_importance_sampling_correction=True)"),
    (False, 0.1, "Nothing corrects it (vllm_importance_sampling_correction=False)"),
])
def test_with_a_cache_in_8_bits_the_first_check_says_what_corrects_the_difference_and_changes_nothing(
    tiny_policy: Policy, groups: list[RolloutGroup], correction: bool | None, by: float, said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shift(groups, by)
    watcher = gate(tiny_policy, parity_steps=1, cache_dtype="fp8", correction=correction)
    for step in range(3):
        watcher.state.global_step = step
        assert watcher.watch(groups)["sampling/parity/mean"] == pytest.approx(by, abs=1e-4)
    (told,) = [text for text in caplog.messages if "the key-value cache is in 8 bits (fp8)" in text]
    assert said in told and 'vllm_importance_sampling_mode="token_mask"' in told
    assert watcher.correction is correction


def test_the_bound_is_wider_for_a_cache_in_8_bits_and_the_error_names_it(
    tiny_policy: Policy, groups: list[RolloutGroup]
) -> None:
    shift(groups, 0.3)
    assert gate(tiny_policy, cache_dtype="fp8_e5m2").watch(groups)
    with pytest.raises(ParityError, match=r"allowed is 0\.2 .*keys too large for 8 bits \(kv_cache_dtype is 'fp8'"):
        gate(tiny_policy, cache_dtype="fp8").watch(groups)
    with pytest.raises(ParityError, match=r"allowed is 0\.25 "):
        gate(tiny_policy, cache_dtype="fp8_e5m2", parity_bound=0.25).watch(groups)


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
    shift(groups, value)
    assert gate(tiny_policy).watch(groups) == {}


BRIDGE = [2, 6, 9, 4, 11, 6]  # what comes between two turns, as the engine sees it


@pytest.fixture(scope="module")
def played(tiny_policy: Policy, tokenizer: Any) -> list[RolloutGroup]:
    """Episodes of two turns, drawn by the policy itself."""
    engine, prompt, params = TransformersEngine(tiny_policy, tokenizer, 128), [5, 6, 7], SamplingParams(max_tokens=6)
    firsts = engine.generate([prompt], replace(params, n=4, seed=0))[0]
    asked = [[*prompt, *first.completion_ids, *BRIDGE] for first in firsts]
    seconds = [found[0] for found in engine.generate(asked, replace(params, n=1, seed=1))]
    return [RolloutGroup({}, prompt, [
        episode(BRIDGE, Turn(prompt, first.completion_ids, first.rollout_logprobs, "stop"),
                Turn(ids, second.completion_ids, second.rollout_logprobs, "stop"))
        for first, ids, second in zip(firsts, asked, seconds, strict=True)
    ])]


def episode(between: list[int], first: Turn, second: Turn) -> Rollout:
    """An episode of two turns, with these tokens between them."""
    parts = [(first.completion_ids, first.logprobs, True), (between, [0.0] * len(between), False),
             (second.completion_ids, second.logprobs, True)]
    return Rollout([one for ids, _, _ in parts for one in ids], [one for _, found, _ in parts for one in found], "stop",
                   trained=[drawn for ids, _, drawn in parts for _ in ids], turns=[first, second], ending="done")


def test_later_turns_are_checked_behind_what_came_between(tiny_policy: Policy, played: list[RolloutGroup]) -> None:
    metrics = gate(tiny_policy).check(played)
    assert metrics["sampling/parity/max"] < 1e-3 and 0 < metrics["sampling/parity/later_turns"] < 1e-4


@pytest.mark.parametrize("between", [BRIDGE[1:], [*BRIDGE, 6], [*BRIDGE[:3], *BRIDGE[4:]]], ids=str)
def test_a_token_that_was_dropped_or_doubled_between_two_turns_is_found(
    tiny_policy: Policy, played: list[RolloutGroup], between: list[int]
) -> None:
    """Even where first turns, which agree, bring the mean of all tokens within the bound."""
    wrong = RolloutGroup({}, played[0].prompt_ids, [episode(between, *one.turns) for one in played[0].rollouts])
    with pytest.raises(ParityError, match="The first turns agree, so what differs is the tokens between turns"):
        gate(tiny_policy).check([wrong])
    mean = gate(tiny_policy, parity_bound=100.0).check([wrong])["sampling/parity/mean"]
    with pytest.raises(ParityError, match=r"tokens of later turns .* The first turns agree"):
        gate(tiny_policy, parity_bound=mean * 1.01).check([wrong])


# A model that 16 bits change as much as a published one. What is right comes from plain transformers


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def noisy(request: pytest.FixtureRequest, tokenizer: Any) -> tuple[Policy, list[RolloutGroup]]:
    """A policy with an adapter that matters, and two groups of eight healthy completions."""
    policy = Policy(scatter(with_adapter(noisy_model(request.param)), 0.2))
    return policy, drawn(policy, tokenizer, seed=0)


def drawn(policy: Policy, tokenizer: Any, seed: int) -> list[RolloutGroup]:
    prompts, params = [[5, 6, 7, 30, 9], [8, 9]], SamplingParams(n=8, max_tokens=20, seed=seed, ignore_eos=True)
    found = TransformersEngine(policy, tokenizer, 128).generate(prompts, params)
    return [RolloutGroup({}, *pair) for pair in zip(prompts, found, strict=True)]


def test_a_healthy_sample_of_a_noisy_model_does_not_stop_a_run_and_the_rounding_is_told_once(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy(with_adapter(noisy_model()))
    watcher, before = gate(policy, parity_steps=1), torch.get_rng_state()
    groups = drawn(policy, tokenizer, 3)
    found = watcher.check(groups)
    assert watcher.check(groups) == found and found["sampling/parity/mean"] > 0.02  # the bound of bfloat16
    (told,) = [text for text in caplog.messages if "differ from the trainer's" in text]
    assert "That is rounding: on this model in bfloat16" in told and "Try" not in told
    assert found["sampling/parity/rounding"] > found["sampling/parity/mean"] / 1.5
    assert torch.equal(before, torch.get_rng_state())
    assert gate(policy).check(groups) == found  # as after a resume
    with pytest.raises(ParityError, match=r"allowed is 0\.001 \(parity_bound\)"):
        gate(policy, parity_bound=0.001).check(groups)


@pytest.mark.slow
def test_no_healthy_sample_of_a_noisy_model_stops_a_run(tokenizer: Any) -> None:
    policy = Policy(with_adapter(noisy_model()))
    found = [gate(policy).check(drawn(policy, tokenizer, seed)) for seed in range(8)]
    assert sum(one["sampling/parity/mean"] > 0.02 for one in found) >= 4
    assert all(one["sampling/parity/rounding"] > one["sampling/parity/mean"] / 1.5 for one in found
               if "sampling/parity/rounding" in one)


def sampled_wrongly(policy: Policy, group: RolloutGroup, fault: str) -> None:
    """Give a group the log-probabilities that plain transformers computes with a fault."""
    plain, prompt, temperature = noisy_model(policy.dtype), list(group.prompt_ids), 1.0
    if fault != "no adapter":
        plain = scatter(with_adapter(plain), 0.2, seed=2 if fault == "another adapter" else 1)
    if fault == "padding is seen":
        prompt = [0, 0, *prompt]
    if fault == "a token of the template is dropped":
        del prompt[-1]
    if fault == "merged, and rounded to 8 bits":
        plain = rounded(plain.merge_and_unload())
    if fault == "another temperature":
        temperature = 0.7
    ids = torch.tensor([prompt + one.completion_ids for one in group.rollouts])
    places = torch.arange(ids.shape[1])
    if fault == "a position is skipped":
        places = places + (places >= len(prompt))
    if fault == "positions begin anew":
        places = places - len(prompt) * (places >= len(prompt))
    mask = torch.ones_like(ids)
    if fault == "the prompt is masked":
        mask[:, : len(prompt) - 1] = 0
    with torch.no_grad():
        logits = plain(input_ids=ids, position_ids=places.expand_as(ids), attention_mask=mask).logits.float()
    found = (logits / temperature).log_softmax(-1)[:, len(prompt) - 1 : -1].gather(-1, ids[:, len(prompt) :, None])
    for one, values in zip(group.rollouts, found[..., 0].tolist(), strict=True):
        one.rollout_logprobs = values


def rounded(model: Any) -> Any:
    """The model with weights that were rounded to 8 bits: e4m3, without a scale."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.copy_(weight.to(torch.float8_e4m3fn).to(weight.dtype))
    return model


def test_a_sampler_without_a_fault_passes_although_the_model_is_noisy(
    noisy: tuple[Policy, list[RolloutGroup]]
) -> None:
    policy, groups = noisy[0], deepcopy(noisy[1])
    assert gate(policy).check(groups)
    for group in groups:
        sampled_wrongly(policy, group, "none")
    assert gate(policy).check(groups)  # plain transformers, too


@pytest.mark.parametrize("fault", [
    "padding is seen", "the prompt is masked", "a position is skipped", "positions begin anew", "no adapter",
    "another adapter", "a token of the template is dropped", "another temperature", "merged, and rounded to 8 bits",
])
def test_a_wrong_sampler_stops_the_run_although_the_model_is_noisy(
    noisy: tuple[Policy, list[RolloutGroup]], fault: str
) -> None:
    policy, groups = noisy[0], deepcopy(noisy[1])
    for group in groups:
        sampled_wrongly(policy, group, fault)
    with pytest.raises(ParityError, match="Likely causes"):
        gate(policy).check(groups)


@pytest.mark.parametrize(("engine", "dtype", "said", "unsaid"), [
    ("transformers", torch.bfloat16, "rotary embedding", "Try"),
    ("vllm", torch.float16, 'Try fast_inference="transformers"', "nothing"),
    ("vllm", torch.bfloat16, 'Try fast_inference="transformers"', "dtype="),
    ("vllm", torch.float16, "try dtype=torch.bfloat16", "nothing"),
])
def test_the_error_never_advises_what_is_set(engine: str, dtype: torch.dtype, said: str, unsaid: str) -> None:
    policy = Policy(with_adapter(load_model("shallow").to(dtype)))
    causes = ParityGate(policy, SamplingParams(), 1, None, state=TrainerState(), engine=engine).causes
    assert said in causes and unsaid not in causes
