"""Options of the loss: each is used by its loss type or refused by name, and contradictions are told."""

import itertools
import math
from typing import Any

import pytest
from tables import not_refused

from lowmem_grpo.losses.loss_settings import ADAPTIVE, OF_TYPES, LossSettings
from lowmem_grpo.losses.loss_types import LOSS_TYPES

GOOD: dict[str, Any] = {  # a value that every loss type which has the option takes
    "epsilon": 0.25, "epsilon_high": 1.5, "delta": 3.0, "importance_sampling_level": "sequence",
    "sapo_temperature_neg": 1.3, "sapo_temperature_pos": 1.2, "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.1,
    "vespo_k_neg": 1.2, "vespo_lambda_neg": 1.3,
}
MODE, MIN, MAX = (f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max"))
CORRECTION = "vllm_importance_sampling_correction"
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "ppo"}, f"loss_type is 'ppo'; it must be one of {', '.join(LOSS_TYPES)}"),
    ({"importance_sampling_level": "word"}, "level is 'word'; it must be one of token, sequence, sequence_token"),
    ({"kl_estimator": "k4"}, "kl_estimator is 'k4'; it must be one of k1, k2, k3"),
    ({MODE: "none"}, f"{MODE} is 'none'; it must be one of token_truncate, token_mask, sequence_truncate, sequence_m"),
    ({"kl_estimator": "k2"}, "kl_estimator is 'k2', and beta is 0: there is no KL term; set beta"),
    ({"epsilon": -0.1}, "epsilon is -0.1; it must be 0 or above"),
    ({"epsilon": math.nan}, "epsilon is nan; it must be 0 or above"),
    ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg is 0.0; it must be above 0"),
    ({"loss_type": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos is -1.0; it must be 0 or above"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high is 0.28, and cispo bounds the ratio itself by it"),
    ({"delta": 1.2}, "delta is 1.2; it must be above 1 + epsilon_high = 1.2"),
    ({"delta": 1.5, "epsilon_high": 0.5}, "delta is 1.5; it must be above 1 + epsilon_high = 1.5"),
    ({"top_entropy_quantile": 0.0}, "top_entropy_quantile is 0.0; it must be in (0, 1]"),
    ({"top_entropy_quantile": math.nan}, "top_entropy_quantile is nan; it must be in (0, 1]"),
    *[({"loss_type": name, "top_entropy_quantile": 0.2}, f"loss_type {name!r} has one ratio for all tokens of a "
       "completion, which a mask over tokens would break up; use loss_type='gspo_token'") for name in ("gspo", "gmpo")],
    ({"loss_type": "luspo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.2},
     "importance_sampling_level 'sequence' has one ratio for all tokens"),
    *[({name: 0.15}, f"{name} is 0.15, which only use_adaptive_entropy=True uses") for name in ADAPTIVE],
    ({"use_adaptive_entropy": True, "entropy_coef": 0.3, "entropy_coef_max": 0.2},
     "entropy_coef is 0.3; it must be between entropy_coef_min (0.0) and entropy_coef_max (0.2)"),
    ({"use_adaptive_entropy": True, "entropy_coef_min": 0.1}, "entropy_coef is 0.0; it must be between"),
    ({MIN: 2.0}, f"{MIN} is 2.0; it must be below {MAX}, which is 2.0"),
    *[({MODE: mode, MAX: None}, f"{MODE} is {mode!r} without any bound; set {MAX}, 2.0 is usual")
      for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")],
    *[({CORRECTION: False} | more, f"{CORRECTION} is False, and its mode or bounds are set; leave one of them out")
      for more in ({MODE: "token_mask"}, {MAX: 3.0}, {MIN: 0.5})],
    ({"loss_type": "gspo", MODE: "token_mask"}, "loss_type 'gspo' has one ratio for all tokens of a completion; use "
     "'token_truncate', or 'geometric_mask'"),
    ({"loss_type": "grpo", "importance_sampling_level": "sequence", MODE: "token_mask"},
     "importance_sampling_level 'sequence' has one ratio"),
    ({MODE: "geometric_mask"}, f"'geometric_mask' needs {MIN} and _clip_max, such as 0.95 and 1.05"),
    ({MODE: "geometric_mask", MIN: 0.99, MAX: None}, f"'geometric_mask' needs {MIN} and _clip_max"),
    ({"beta": math.nan}, "beta is nan"), ({"entropy_coef": -0.1}, "entropy_coef is -0.1; it must be 0 or above"),
    ({"epsilon": math.inf}, "epsilon is inf; it must be 0 or above"),
    ({"use_adaptive_entropy": True, "entropy_target": math.nan}, "entropy_target is nan"),
    ({"off_policy_mask_threshold": -1.0}, "off_policy_mask_threshold is -1.0; it must be above 0"),
    ({MAX: math.nan}, "clip_max is nan; it must be above 0, or None"),
    ({MIN: 0.0}, "clip_min is 0.0; it must be above 0, or None"),
    ({MODE: "k3_mask", MAX: 0.01, MIN: 0.001}, "'k3_mask' has no lower bound"),
    ({MODE: "k3_mask"}, f"'k3_mask' bounds a mean k3: {MAX} is 2.0; 0.01 is usual"),
]
ACCEPTED: list[dict[str, Any]] = [
    {"loss_type": "gspo_token", "top_entropy_quantile": 0.2}, {"loss_type": "gspo_token", MODE: "token_mask"},
    {"loss_type": "vespo", "top_entropy_quantile": 0.2}, {"beta": 0.1, "kl_estimator": "k1"},
    {"importance_sampling_level": "sequence_token", "top_entropy_quantile": 0.2}, {"delta": 1.21}, {"epsilon": 0.0},
    {CORRECTION: False}, {CORRECTION: True, MODE: "token_mask", MIN: 0.5, MAX: 5.0},
    {MODE: "geometric_mask", MIN: 0.99, MAX: 1.01}, {MODE: "k3_mask", MAX: 0.01}, {MIN: 0.5, MAX: None},
    {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_min": 0.1, "entropy_target": 0.5},
    {"loss_type": "cispo", "epsilon_high": 1.0}, {"entropy_coef": 0.01}, {"use_bias_correction_kl": False},
]
USED = [(kind, name) for kind in LOSS_TYPES for name in LOSS_TYPES[kind].options]
UNUSED = sorted(set(itertools.product(LOSS_TYPES, OF_TYPES)) - set(USED))
OF_TRL = {"epsilon": 0.2, "epsilon_high": None, "delta": None, "importance_sampling_level": "token",
          "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0,
          "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}  # the defaults of TRL's GRPOConfig


def test_an_option_without_effect_is_refused_and_those_with_one_are_named() -> None:
    assert {*OF_TYPES} == {*GOOD}, "give a new option of a loss type a valid value in GOOD, at the top of this file"
    rows = [
        ({"loss_type": loss_type, option: GOOD[option]},
         (f"{option} is {GOOD[option]}, and loss_type {loss_type!r} does not use it",
          f"it uses {', '.join(LOSS_TYPES[loss_type].options) or 'no option of its own'}."))
        for loss_type, option in UNUSED if GOOD[option] != LOSS_TYPES[loss_type].level
    ]
    assert not_refused(lambda given: LossSettings(**given), rows) == []


def test_trls_defaults_written_out_change_nothing() -> None:
    """With every loss type of TRL, and as the whole of them, as scripts that list all options write them."""
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"):
        for name, value in OF_TRL.items():
            given = LossSettings(loss_type=loss_type, **{name: value}).chosen()
            assert given == LossSettings(loss_type=loss_type).chosen(), (loss_type, name)
    assert LossSettings(loss_type="vespo", **OF_TRL).chosen() == LossSettings(loss_type="vespo").chosen()
    with pytest.raises(ValueError, match=r"epsilon is 0.3, and loss_type 'cispo' does not use it"):
        LossSettings(loss_type="cispo", epsilon=0.3)
    with pytest.raises(ValueError, match="importance_sampling_level is token, and loss_type 'gspo' does not use it"):
        LossSettings(loss_type="gspo", importance_sampling_level="token")


def test_an_option_of_a_loss_type_is_chosen() -> None:
    for loss_type, option in USED:
        chosen = LossSettings(loss_type=loss_type, **{option: GOOD[option]}).chosen()
        follows = {"epsilon_high": None} if option == "epsilon" else {}
        assert chosen == dict(LOSS_TYPES[loss_type].options) | follows | {option: GOOD[option]}, loss_type


def test_defaults_are_the_loss_types_own() -> None:
    """As the papers and TRL have them."""
    clipped = {"epsilon": 0.2, "epsilon_high": None, "delta": None, "importance_sampling_level": "token"}
    narrow = {"epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None}
    assert {name: LossSettings(loss_type=name).chosen() for name in LOSS_TYPES} == {
        **dict.fromkeys(("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), clipped),
        **dict.fromkeys(("gspo", "gspo_token"), narrow),
        "cispo": {"epsilon_high": 5.0, "importance_sampling_level": "token"},
        "sapo": {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "importance_sampling_level": "token"},
        "vespo": {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
        "gmpo": {"epsilon": 0.4, "epsilon_high": None}, "reinforce": {},
        "rloo": {"epsilon": 0.2, "epsilon_high": None, "delta": None},
    }, "write the defaults of a new loss type here"


def test_a_given_epsilon_is_the_bound_above_too_and_zero_is_given() -> None:
    assert LossSettings(loss_type="gspo", epsilon=0.1).chosen() == {"epsilon": 0.1, "epsilon_high": None, "delta": None}
    assert LossSettings(loss_type="gspo", epsilon=0.1, epsilon_high=0.2).chosen()["epsilon_high"] == 0.2
    assert LossSettings(epsilon=0.0).chosen()["epsilon"] == 0.0


def test_unknown_names_and_contradictions_are_refused() -> None:
    assert not_refused(lambda given: LossSettings(**given), CONTRADICTIONS) == []


def test_options_that_go_together_are_accepted() -> None:
    for options in ACCEPTED:
        settings = LossSettings(**options)
        assert all(getattr(settings, name) == value for name, value in options.items()), options
