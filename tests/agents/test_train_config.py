"""ART's options of a step: what each becomes here, and that the loss then is ART's."""

from typing import Any

import pytest
import torch
from tables import every_row

from lowmem_grpo import GRPOConfig
from lowmem_grpo.agents.train_config import FATES, HONOURED, TrainConfig, settings_of
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.trainer.trajectories import PER_STEP

DEFAULTS: dict[str, Any] = {  # what LocalBackend.train of openpipe-art 0.5.18 takes by name
    "learning_rate": 5e-6, "loss_fn": "cispo", "loss_fn_config": None, "normalize_advantages": True,
    "adam_params": None, "kl_penalty_coef": 0.0, "kl_penalty_reference_step": None, "kl_ref_adapter_path": None,
    "epsilon": None, "epsilon_high": None, "advantage_balance": 0.0, "scale_rewards": True,
    "importance_sampling_level": "token", "max_negative_advantage_importance_sampling_weight": None,
    "mask_prob_ratio": False, "kimi_k2_tau": None, "precalculate_logprobs": False,
    "allow_training_without_logprobs": False, "plot_tensors": False, "truncated_importance_sampling": None,
    "scale_learning_rate_by_reward_std_dev": False, "logprob_calculation_chunk_size": 1024,
    "packed_sequence_length": None, "num_trajectories_learning_rate_multiplier_power": 0.0, "verbose": False,
}


def test_every_option_of_arts_has_one_meaning_and_its_defaults_are_accepted() -> None:
    assert {*DEFAULTS} <= {*FATES, *HONOURED} and not {*FATES} & {*HONOURED}
    found = settings_of(DEFAULTS, "dapo", PER_STEP)
    assert found == {"learning_rate": 5e-6, "loss_type": "cispo", "scale_rewards": "group", "beta": 0.0,
                     "importance_sampling_level": "token", "epsilon": None, "epsilon_high": None}
    GRPOConfig(**found)


@every_row(("options", "settings"), [
    ({"loss_fn": "ppo", "epsilon": 0.1, "epsilon_high": 0.3},
     {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.3}),
    ({"epsilon": 1.0, "epsilon_high": 3.0}, {"epsilon_high": 4.0}),
    ({"loss_type": "cispo", "epsilon_high": 3.0}, {"epsilon_high": 3.0}),
    ({"loss_type": "gspo", "epsilon": 1e-3}, {"loss_type": "gspo", "epsilon": 1e-3}),
    ({"normalize_advantages": False}, {"scale_rewards": "none"}),
    ({"scale_rewards": False}, {"scale_rewards": "none"}),
    ({"kl_penalty_coef": 0.1}, {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": False}),
    ({"loss_fn": "ppo", "max_negative_advantage_importance_sampling_weight": 2.0}, {"loss_type": "dapo", "delta": 2.0}),
    ({"truncated_importance_sampling": 3.0}, {
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 3.0}),
    ({"turn_discount": 0.5, "num_iterations": 2}, {"turn_discount": 0.5, "num_iterations": 2}),
    (TrainConfig(learning_rate=1e-5).model_dump(exclude_none=True), {"learning_rate": 1e-5}),
])
def test_options_become_settings(options: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(options, "cispo", PER_STEP) == settings
    GRPOConfig(**{"loss_type": "cispo"} | settings)


@every_row(("options", "match"), [
    ({"epsilon": 0.2}, "no lower bound"), ({"importance_sampling_level": "average"}, "'token' or 'sequence'"),
    ({"max_negative_advantage_importance_sampling_weight": 2.0}, "epsilon_high"),
    ({"adam_params": object()}, "adam_beta1"), ({"mask_prob_ratio": True}, "token_mask"),
    ({"allow_training_without_logprobs": True}, "SFTTrainer"), ({"grad_accumulation_sequences": 2}, "fewer groups"),
    ({"beta": 0.1, "kl_penalty_coef": 0.2}, "kl_penalty_coef is 0.2 and beta, its older name, is 0.1"),
    ({"packed_sequence_length": 4096}, "max_seq_length"), ({"advantage_balance": 0.5}, "epsilon_high"),
])
def test_what_is_not_supported_is_refused_with_the_fix(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        settings_of(options, "cispo", PER_STEP)


def by_art(loss_fn: str, logprobs: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantages: torch.Tensor,
           coef: float) -> torch.Tensor:
    """ART's loss (loss.py of 0.5.18), written down anew: its defaults, the mean over the tokens."""
    low, high = (0.8, 1.2) if loss_fn == "ppo" else (0.0, 5.0)
    kl = (logprobs - ref).detach()
    lowered = advantages + coef * (kl.mean() - kl)
    ratio = (logprobs - old).exp()
    if loss_fn == "ppo":
        return -torch.min(ratio * lowered, ratio.clamp(low, high) * lowered).mean()
    return -(ratio.detach().clamp(low, high) * lowered * logprobs).mean()


@pytest.mark.parametrize("loss_fn", ["cispo", "ppo"])
def test_the_gradient_is_arts(loss_fn: str) -> None:
    generator = torch.Generator().manual_seed(0)
    old, ref = (-torch.rand(64, generator=generator, dtype=torch.float64) - 0.5 for _ in range(2))
    logprobs = (old + 0.4 * torch.randn(64, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages, ids = torch.randn(4, generator=generator, dtype=torch.float64)[torch.arange(64) // 16], \
        torch.arange(64) // 16
    settings = GRPOConfig(**settings_of({"loss_fn": loss_fn}, "dapo", PER_STEP))
    out = grpo_loss(logprobs, advantages, ids, settings=settings, old_logprobs=old, num_sequences_in_step=4,
                    num_tokens_in_step=64)
    found, = torch.autograd.grad(out.loss, logprobs)
    expected, = torch.autograd.grad(by_art(loss_fn, logprobs, old, ref, advantages, 0.0), logprobs)
    torch.testing.assert_close(found, expected)


def test_the_gradient_of_the_kl_term_is_arts_but_for_its_mean() -> None:
    """On-policy: ART takes the mean of the KL as a baseline, which moves no gradient in expectation."""
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(32, generator=generator, dtype=torch.float64)).requires_grad_()
    ref = -torch.rand(32, generator=generator, dtype=torch.float64)
    settings = GRPOConfig(**settings_of({"loss_fn": "cispo", "kl_penalty_coef": 0.1}, "dapo", PER_STEP))
    out = grpo_loss(logprobs, torch.zeros(32, dtype=torch.float64), torch.arange(32) // 8, settings=settings,
                    ref_logprobs=ref, num_sequences_in_step=4, num_tokens_in_step=32)
    found, = torch.autograd.grad(out.loss, logprobs)
    mean = 0.1 * (logprobs - ref).detach().mean() / 32
    loss = by_art("cispo", logprobs, logprobs.detach(), ref, torch.zeros_like(ref), 0.1)
    expected, = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(found, expected + mean)
