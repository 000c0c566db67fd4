"""ART's options of one `train` call, mapped to this package's settings: honoured, without effect, or refused."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from lowmem_grpo.config.unsupported import Table, any_value, off, only, refuse
from lowmem_grpo.losses.loss_types import LOSS_TYPES

Settings = dict[str, Any]  # fields of GRPOConfig

LOSSES = {"cispo": "cispo", "ppo": "dapo"}  # ART's losses, both averaged over the tokens of the step


class TrainConfig(BaseModel):
    """The options of `model.train(groups, config=TrainConfig(...))`; None keeps the run's setting."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float | None = None
    kl_penalty_coef: float | None = None
    beta: float | None = None
    """The older name of kl_penalty_coef."""
    grad_accumulation_sequences: int | None = None
    kl_penalty_source: str | None = None
    optimizer_save_interval: int | None = None
    final_training_step: int | None = None


FATES: Table = {  # options without effect here; some are refused if they ask for one
    **any_value("precalculate_logprobs"),  # old log-probabilities are those of the trainer's first pass of the step
    **any_value("logprob_calculation_chunk_size", "verbose"),  # logits_chunk of LocalBackend sets the size
    **off("One call of train is one optimizer step; for more steps call it with fewer groups each.",
          "grad_accumulation_sequences"),
    **off("Name the options of the loss themselves: epsilon, epsilon_high.", "loss_fn_config"),
    **off("Set adam_beta1, adam_beta2, weight_decay or optim of LocalBackend.", "adam_params"),
    **off("The reference is the base model, without the adapter.", "kl_penalty_reference_step", "kl_ref_adapter_path"),
    **off("Use an epsilon_high above epsilon, or loss_type='sapo', which treat the two signs differently.",
          "advantage_balance", also=(0.0,)),
    **off("Use loss_fn='cispo', which never masks, or vllm_importance_sampling_mode='token_mask'.", "mask_prob_ratio"),
    **off("A KL term towards the base model is kl_penalty_coef.", "kimi_k2_tau", also=(0.0,)),
    **only("The KL term is of the policy as it is while it is trained.", kl_penalty_source=("current_learner",)),
    **any_value("optimizer_save_interval", "final_training_step"),  # each step is saved with its optimizer
    **off("Nothing is trained that the policy did not draw; fine-tune on given answers with SFTTrainer.",
          "allow_training_without_logprobs"),
    **off("The report of the run has pictures: lowmem-grpo report FOLDER.", "plot_tensors"),
    **off("Pass the learning_rate that you want.", "scale_learning_rate_by_reward_std_dev",
          "num_trajectories_learning_rate_multiplier_power", also=(0.0,)),
    **off("Sequences are packed without padding: max_seq_length of LocalBackend bounds a sequence, and "
          "max_tokens_per_micro_batch what is computed at a time.", "packed_sequence_length"),
    **off("Mixtures of experts are routed by the trainer itself.", "moe_routing_replay_bundle",
          "moe_routing_replay_path", "moe_routing_replay_strict"),
    **only("It is what a ratio is of.", importance_sampling_level=("token", "sequence")),
}


def loss_type(value: Any, settings: Settings) -> Settings:
    name = LOSSES.get(value, value)
    if name not in LOSS_TYPES:
        raise ValueError(f"loss_fn is {value!r}; allowed are {', '.join({**LOSSES, **LOSS_TYPES})}")
    return {"loss_type": name}


def kl(value: Any, settings: Settings) -> Settings:
    """Return a KL term with ART's gradient: an advantage falls by coef * (d - mean of d), d = log pi - log ref."""
    return {"beta": value, **({"kl_estimator": "k2", "use_bias_correction_kl": False} if value else {})}


def low(value: Any, settings: Settings) -> Settings:
    """Return the lower clip range of the ratio. ART's cispo clips at 1 - epsilon: no bound if epsilon is 1 or more."""
    if settings["loss_type"] != "cispo" or value is None:
        return {"epsilon": value}
    if value < 1:
        raise ValueError(f"epsilon is {value}, and cispo has no lower bound here; leave it out, or use loss_fn='ppo'")
    return {}


def high(value: Any, settings: Settings) -> Settings:
    """Return the upper clip range of the ratio. For cispo, the setting here is the bound itself: return 1 + value."""
    return {"epsilon_high": value if value is None or settings["loss_type"] != "cispo" else 1 + value}


def largest(value: Any, settings: Settings) -> Settings:
    """Return the bound on the ratio for negative advantages. ValueError for cispo, which bounds all ratios."""
    if value and settings["loss_type"] == "cispo":
        raise ValueError(f"max_negative_advantage_importance_sampling_weight is {value}, and cispo bounds all ratios "
                         "by epsilon_high; set that, or use loss_fn='ppo'")
    return {"delta": value} if value else {}


HONOURED: dict[str, Callable[[Any, Settings], Settings]] = {  # read in this order; later options win
    "learning_rate": lambda value, _: {} if value is None else {"learning_rate": value},
    "loss_fn": loss_type, "ppo": lambda value, _: {"loss_type": LOSSES["ppo" if value else "cispo"]},
    "scale_rewards": lambda value, _: {
        "scale_rewards": value if isinstance(value, str) else "group" if value else "none"},
    "normalize_advantages": lambda value, _: {} if value else {"scale_rewards": "none"},
    "beta": kl, "kl_penalty_coef": kl, "epsilon": low, "epsilon_high": high,
    "max_negative_advantage_importance_sampling_weight": largest,
    "truncated_importance_sampling": lambda value, _: {} if not value else {  # for a mismatch of sampler and trainer
        "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": value},
}


def settings_of(options: Mapping[str, Any], usual: str, known: tuple[str, ...]) -> Settings:
    """Return the settings of a step. `usual` is the run's loss type, and `known` are this package's settings, passed on
    unchanged. With a `loss_type` in the options, `epsilon` and `epsilon_high` have this package's meaning. TypeError
    for an unknown option; ValueError, with the fix, for one that is not supported."""
    if others := {name: value for name, value in options.items() if name in FATES or name not in (*HONOURED, *known)}:
        refuse(others, FATES, {*HONOURED, *known}, "train")
    coef, beta = options.get("kl_penalty_coef"), options.get("beta")
    if coef is not None and beta and coef != beta:
        raise ValueError(f"kl_penalty_coef is {coef} and beta, its older name, is {beta}: pass only kl_penalty_coef")
    settings: Settings = {"loss_type": options.get("loss_type", usual)}
    own = {"epsilon", "epsilon_high"} if "loss_type" in options else set()
    for name, read in HONOURED.items():
        if name in options and name not in own:
            settings |= read(options[name], settings)
    settings |= {name: options[name] for name in options if name in own or (name in known and name not in HONOURED)}
    return {name: value for name, value in settings.items() if (name, value) != ("loss_type", usual)}
