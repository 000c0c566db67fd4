"""ART's options of one call of `train`, as settings of this package: honoured, without effect here, or refused."""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from lowmem_grpo.config.loading import Fate, any_value, off
from lowmem_grpo.losses.loss_types import LOSS_TYPES

Settings = dict[str, Any]  # fields of GRPOConfig

LOSSES = {"cispo": "cispo", "ppo": "dapo"}  # ART's losses, both with the mean over the tokens of the step
LEVELS = ("token", "sequence")


class TrainConfig(BaseModel):
    """What `model.train(groups, config=TrainConfig(...))` takes; None leaves it as the run was set up."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float | None = None
    kl_penalty_coef: float | None = None
    beta: float | None = None
    """The older name of kl_penalty_coef."""
    grad_accumulation_sequences: int | None = None


ONE_STEP = "one call of train is one optimizer step; for more steps call it with fewer groups each"
RATE = "pass the learning_rate that you want"
FATES: dict[str, Fate] = {  # options without effect here, and refused where they ask for one
    **any_value("old log-probabilities are those of the trainer, as of the step's first pass", "precalculate_logprobs"),
    **any_value("logits are computed in pieces by the device's memory; logits_chunk of LocalBackend sets the size",
                "logprob_calculation_chunk_size"),
    **any_value("what a step says does not depend on it", "verbose"),
    **off(ONE_STEP, "grad_accumulation_sequences"),
    **off("name the options of the loss themselves: epsilon, epsilon_high", "loss_fn_config"),
    **off("set adam_beta1, adam_beta2, weight_decay or optim of LocalBackend", "adam_params"),
    **off("the reference is the base model, without the adapter", "kl_penalty_reference_step", "kl_ref_adapter_path"),
    **off("use an epsilon_high above epsilon, or loss_type='sapo', which treat the two signs differently",
          "advantage_balance", also=(0.0,)),
    **off("use loss_fn='cispo', which never masks, or vllm_importance_sampling_mode='token_mask'", "mask_prob_ratio"),
    **off("a KL term towards the base model is kl_penalty_coef", "kimi_k2_tau", also=(0.0,)),
    **off("nothing is trained that the policy did not draw; fine-tune on given answers with SFTTrainer",
          "allow_training_without_logprobs"),
    **off("the report of the run has pictures: lowmem-grpo report FOLDER", "plot_tensors"),
    **off(RATE, "scale_learning_rate_by_reward_std_dev", "num_trajectories_learning_rate_multiplier_power",
          also=(0.0,)),
    **off("sequences are packed without padding: max_seq_length of LocalBackend bounds a sequence, and "
          "max_tokens_per_micro_batch what is computed at a time", "packed_sequence_length"),
    **off("mixtures of experts are routed by the trainer itself", "moe_routing_replay_bundle",
          "moe_routing_replay_path", "moe_routing_replay_strict"),
}


def loss_type(value: Any, options: Settings) -> Settings:
    """The loss by ART's name, or by ours."""
    name = LOSSES.get(value, value)
    if name not in LOSS_TYPES:
        raise ValueError(f"loss_fn is {value!r}; allowed are {', '.join({**LOSSES, **LOSS_TYPES})}")
    return {"loss_type": name}


def scaled(value: Any, options: Settings) -> Settings:
    """Whether rewards are divided by the standard deviation of their group."""
    return {"scale_rewards": value if isinstance(value, str) else "group" if value else "none"}


def normalized(value: Any, options: Settings) -> Settings:
    """ART's other name of it, which wins where it is False."""
    return {} if value else {"scale_rewards": "none"}


def kl(value: Any, options: Settings) -> Settings:
    """ART lowers the advantage of a token by coef * (log pi - log ref), less its mean: the gradient of this term."""
    return {"beta": value, **({"kl_estimator": "k2", "use_bias_correction_kl": False} if value else {})}


def level(value: Any, options: Settings) -> Settings:
    """The level of importance ratios."""
    if value not in LEVELS:
        raise ValueError(f"importance_sampling_level is {value!r}; allowed are {' and '.join(map(repr, LEVELS))}")
    return {"importance_sampling_level": value}


def low(value: Any, options: Settings) -> Settings:
    """How far below 1 a ratio may fall. ART's cispo bounds it by 1 - epsilon, which from 1 on is no bound."""
    if options["loss_type"] != "cispo" or value is None:
        return {"epsilon": value}
    if value < 1:
        raise ValueError(f"epsilon is {value}, and cispo has no lower bound here; leave it out, or use loss_fn='ppo'")
    return {}


def high(value: Any, options: Settings) -> Settings:
    """How far above 1: cispo's own setting here is the bound itself."""
    return {"epsilon_high": value if value is None or options["loss_type"] != "cispo" else 1 + value}


def largest(value: Any, options: Settings) -> Settings:
    """A bound on the ratio where the advantage is negative."""
    if value and options["loss_type"] == "cispo":
        raise ValueError(f"max_negative_advantage_importance_sampling_weight is {value}, and cispo bounds all ratios "
                         "by epsilon_high; set that, or use loss_fn='ppo'")
    return {"delta": value} if value else {}


def truncated(value: Any, options: Settings) -> Settings:
    """The weight of a token for what sampler and trainer disagree on, and its bound."""
    return {} if not value else {
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": value,
    }


HONOURED: dict[str, Callable[[Any, Settings], Settings]] = {  # in this order: a later one wins
    "learning_rate": lambda value, _: {} if value is None else {"learning_rate": value},
    "loss_fn": loss_type, "ppo": lambda value, _: {"loss_type": LOSSES["ppo" if value else "cispo"]},
    "scale_rewards": scaled, "normalize_advantages": normalized, "beta": kl, "kl_penalty_coef": kl,
    "importance_sampling_level": level, "epsilon": low, "epsilon_high": high,
    "max_negative_advantage_importance_sampling_weight": largest, "truncated_importance_sampling": truncated,
}


def settings_of(options: Mapping[str, Any], usual: str, known: tuple[str, ...]) -> Settings:
    """The settings of a step. `usual` is the loss type of the run, and `known` are settings that may be given by their
    own names. Where `loss_type` is given, `epsilon_high` means what it means there.

    TypeError for an option that nobody knows; ValueError, with the fix, for one that is not supported.
    """
    for name, value in options.items():
        if name in FATES and not FATES[name].harmless(value):
            raise ValueError(f"train: {name}={value!r} is not supported; {FATES[name].why}")
        if name not in (*FATES, *HONOURED, *known):
            close = difflib.get_close_matches(name, [*FATES, *HONOURED, *known], n=2)
            raise TypeError(f"train has no option {name!r}{f'; did you mean {chr(32).join(close)}?' if close else ''}")
    own = "loss_type" in options
    found: Settings = {"loss_type": options.get("loss_type", usual)}
    for name, read in HONOURED.items():
        if name in options and not (own and name in known and name in ("epsilon", "epsilon_high")):
            found |= read(options[name], found)
    found |= {name: value for name, value in options.items() if name in known and name not in HONOURED}
    if own:
        found |= {name: options[name] for name in ("epsilon", "epsilon_high") if name in options}
    return found if found["loss_type"] != usual else {n: v for n, v in found.items() if n != "loss_type"}
