"""GRPO's objective between steps: when a correction is due, what it learns from a step, what it remembers."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.losses.objective import PolicyOutputs, Reducer, StepTotals
from lowmem_grpo.losses.off_policy import k3_bound
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.trainer.grpo_objective import GRPOObjective
from lowmem_grpo.types import Rollout, RolloutGroup, Turn

FAR = torch.tensor([1.4, 0.7])  # ratios of trainer to sampler, of mean k3 0.06


def rollouts(*versions: int) -> list[Rollout]:
    return [Rollout([1, 2], [-1.0, -1.0], "stop", policy_version=version) for version in versions]


def step(objective: GRPOObjective, versions: tuple[int, ...], now: int, ratios: torch.Tensor) -> dict[str, float]:
    """One update on rollouts of these versions, with these ratios to the sampler; its metrics."""
    objective.start_update(rollouts(*versions), now)
    reducer = Reducer()
    reducer.keep({"mismatch": ratios, "ratio": torch.ones(2)})
    return objective.measured(reducer)


def test_what_a_stale_step_shows_is_not_taken_for_a_mismatch_of_the_sampler() -> None:
    objective = GRPOObjective(GRPOConfig())
    metrics = step(objective, (3, 4), 4, FAR)
    assert metrics["mismatch/corrected"] == 1 and metrics["staleness/k3"] > 1e-3 and "mismatch/k3" not in metrics
    assert step(objective, (5, 5), 5, torch.ones(2))["mismatch/corrected"] == 0


def test_a_mismatch_is_corrected_from_the_step_after_it_for_as_long_as_it_lasts() -> None:
    objective = GRPOObjective(GRPOConfig())
    ratios = [FAR, FAR, torch.ones(2), FAR]
    found = [step(objective, (number,), number, ratio)["mismatch/corrected"] for number, ratio in enumerate(ratios)]
    assert found == [0, 1, 1, 0]


def test_dropout_is_not_taken_for_a_mismatch_of_the_sampler() -> None:
    objective = GRPOObjective(GRPOConfig(), exact=False)
    metrics = [step(objective, (number,), number, FAR) for number in range(3)]
    assert not any(line["mismatch/corrected"] or "mismatch/k3" in line for line in metrics)
    objective.mismatch.last_k3 = 0.01  # what the parity check found
    assert step(objective, (3,), 3, FAR)["mismatch/corrected"] == 1


@pytest.mark.parametrize(("choice", "corrected"), [(True, 1.0), (False, 0.0)])
def test_a_choice_of_the_user_holds(choice: bool, corrected: float) -> None:
    objective = GRPOObjective(GRPOConfig(vllm_importance_sampling_correction=choice))
    assert step(objective, (0,), 0, torch.ones(2))["mismatch/corrected"] == corrected
    assert step(objective, (0,), 5, FAR)["mismatch/corrected"] == corrected


def test_a_correction_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    objective = GRPOObjective(GRPOConfig())
    with caplog.at_level(logging.WARNING):
        for number in range(1, 5):
            step(objective, (0,), number, FAR)
            step(objective, (number,), number, FAR)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "of an older policy" in said[0] and "mean k3" in said[1]
    assert all("token_truncate" in line for line in said)


def test_what_was_measured_is_kept_when_a_run_is_resumed() -> None:
    config = GRPOConfig(use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=1.0)
    objective, resumed = GRPOObjective(config), GRPOObjective(config)
    step(objective, (0,), 0, FAR)
    objective.entropy.update(0.5)
    resumed.restore(objective.state())
    assert resumed.state() == objective.state() and resumed.entropy.applied == objective.entropy.applied > 0
    resumed.start_update(rollouts(1), 1)
    assert resumed.correct_mismatch


def ratios_of(k3: float) -> torch.Tensor:
    """Two ratios whose mean of rho - log rho - 1 is about `k3`: for small d, it is d^2 / 2."""
    size = (2 * k3) ** 0.5
    return torch.tensor([size, -size]).exp()


def test_healthy_k3s_of_bfloat16_never_switch_the_correction_on_and_one_that_is_on_does_not_flicker(
    caplog: pytest.LogCaptureFixture
) -> None:
    """The values were measured on a published model at lr 0: with one bound of 0.001 they gave 0 1 1 0 1. A resume in
    the middle goes on as the run would have."""
    objective = GRPOObjective(GRPOConfig())
    objective.mismatch.bound = k3_bound(torch.bfloat16)
    for number, k3 in enumerate((0.0011, 0.0023, 0.00095, 0.0012)):
        assert step(objective, (number,), number, ratios_of(k3))["mismatch/corrected"] == 0
    assert caplog.messages == []
    found = []
    for number, k3 in enumerate((0.007, 0.004, 0.006, 0.003, 0.002, 0.004)):
        resumed = GRPOObjective(GRPOConfig())
        resumed.mismatch.bound = objective.mismatch.bound
        resumed.restore(objective.state())
        found.append(step(objective, (number,), number, ratios_of(k3))["mismatch/corrected"])
        assert step(resumed, (number,), number, ratios_of(k3))["mismatch/corrected"] == found[-1]
    assert found == [0, 1, 1, 1, 1, 0]
    assert any("sampler and trainer agree again" in line for line in caplog.messages)


def outputs_of(logprobs: Tensor) -> PolicyOutputs:
    scores = logprobs, torch.ones_like(logprobs), logprobs
    return PolicyOutputs(logprobs[:, None], torch.zeros(len(logprobs)).long(), lambda *_: scores, lambda *_: logprobs)


@pytest.mark.parametrize(("settings", "name"), [
    ({"vllm_importance_sampling_mode": "geometric_mask", "vllm_importance_sampling_clip_min": 0.99,
      "vllm_importance_sampling_clip_max": 1.01}, "vllm_importance_sampling_mode='geometric_mask'"),
    ({"vllm_importance_sampling_mode": "k3_mask", "vllm_importance_sampling_clip_max": 1e-4},
     "vllm_importance_sampling_mode='k3_mask'"),
    ({"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.99,
      "vllm_importance_sampling_clip_max": 1.01}, "vllm_importance_sampling_mode='token_mask'"),
    ({"off_policy_mask_threshold": 0.01}, "off_policy_mask_threshold=0.01"),
])
def test_a_mask_that_drops_much_of_the_current_policy_is_named_once_with_the_share(
    settings: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four completions of two tokens, one is 0.05 off on each token: a quarter of the tokens."""
    config = GRPOConfig(vllm_importance_sampling_correction=True, **settings)
    for stale, off, said in ((False, 0.05, 1), (True, 0.05, 0), (False, 0.0, 0)):
        caplog.clear()
        objective = GRPOObjective(config)
        own = [Rollout([1, 2], [-1.0 + off * (number == 0)] * 2, "stop", advantage=-1.0) for number in range(4)]
        group = RolloutGroup({}, [5, 6], own)
        for _ in range(2):
            objective.start_update(own, int(stale))
            batch, reducer = collate([(group, one) for one in own]), Reducer()
            logprobs = torch.full((8,), -1.0, requires_grad=True)
            out = objective.loss(batch, outputs_of(logprobs), StepTotals(4, 8, 8))
            reducer.add(out.metrics, 8, out.counts)
            reducer.keep(out.samples)
            objective.measured(reducer)
        told = [line for line in caplog.messages if "leaves out 25% of the tokens" in line and name in line]
        assert len(told) == said, (stale, off, caplog.messages)


def test_a_kl_term_in_the_reward_leaves_no_place_for_states_which_is_said_with_the_fix() -> None:
    turn = Turn([1], [1, 2], [-1.0, -1.0], "stop", state="start")
    played = Rollout([1, 2], [-1.0, -1.0], "stop", reward=1.0, turns=[turn], ref_logprobs=torch.zeros(2))
    settings: dict[str, Any] = {"advantage_estimator": "reinforce++", "beta": 0.1}
    with pytest.raises(ValueError, match="no place for the comparison of turns in the same state; set state_weight=0"):
        GRPOObjective(GRPOConfig(**settings)).prepared([played])
    GRPOObjective(GRPOConfig(**settings, state_weight=0)).prepared([played])
    assert played.token_advantages is not None


WAITED_FOR = ("aten.nonzero", "aten.masked_select", "aten._local_scalar_dense", "aten.bincount")


class Waits(TorchDispatchMode):
    """Counts the operations whose result has a size, or is a number, that a card has to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masks = name.startswith("aten.index.") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masks or name.startswith(WAITED_FOR):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_log_probabilities_and_the_loss_never_wait_for_a_card(tiny_policy: Policy) -> None:
    group = RolloutGroup({}, [5, 6, 7], [Rollout([8, 9], [-1.0, -2.0], "stop", advantage=a) for a in (1.0, -1.0)])
    batch = collate([(group, rollout) for rollout in group.rollouts])
    objective = GRPOObjective(GRPOConfig())
    objective.start_update(group.rollouts, 0)
    with Waits() as waits:
        outputs = PolicyOutputs(*tiny_policy.at_trained(batch), tiny_policy.at_head, tiny_policy.head.logits_of)
        objective.loss(batch, outputs, StepTotals(2, 4, 4)).loss.backward()
    assert waits.found == []
