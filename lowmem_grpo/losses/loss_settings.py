"""The options of the loss, under TRL's names: which loss type uses which, and which contradict each other."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.losses.off_policy import CORRECTIONS, Bounds
from lowmem_grpo.losses.regularization import KL_ESTIMATORS
from lowmem_grpo.utils import POSITIVE, ZERO_OR_MORE, Rule, check_ranges, number, one_of

LEVELS = ("token", "sequence", "sequence_token")
OF_TYPES = tuple(dict.fromkeys(name for kind in LOSS_TYPES.values() for name in kind.options))
OF_TRL = {  # TRL's defaults of the options that only some of its loss types use
    "epsilon": 0.2, "sapo_temperature_neg": 1.05, "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}
ABOVE_ZERO = number("above 0", lambda value: value > 0)
ADAPTIVE = {"entropy_coef_min": 0.0, "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2}


@dataclass(kw_only=True)
class LossSettings:
    """Options of `grpo_loss`. None takes the loss type's default; an option that the type does not use must be None."""

    loss_type: str = "dapo"
    epsilon: float | None = None
    """How far below 1 a ratio may fall before its gradient is cut: 0.2 for most types."""
    epsilon_high: float | None = None
    """How far above 1; None is the given epsilon. For cispo the bound on the ratio itself, 5 by default."""
    delta: float | None = None
    """A bound on the ratio where A < 0 too (two-sided clipping, INTELLECT-2)."""
    importance_sampling_level: str | None = None
    """"token", or "sequence" for one ratio per completion (GSPO), "sequence_token" for its token form."""
    sapo_temperature_neg: float | None = None
    sapo_temperature_pos: float | None = None
    vespo_k_pos: float | None = None
    vespo_lambda_pos: float | None = None
    vespo_k_neg: float | None = None
    vespo_lambda_neg: float | None = None
    max_completion_length: int | None = None
    """The length that dr_grpo divides by."""

    beta: float = 0.0
    """Strength of the KL term against the reference, which a trainer's `kl_reference` chooses."""
    kl_estimator: str | None = None
    """Not in TRL: "k1", "k2" or "k3" (None: k3, TRL's)."""
    use_bias_correction_kl: bool = True
    """The KL term is multiplied by the importance weight, so that its gradient is the KL's own."""

    top_entropy_quantile: float = 1.0
    """Share of tokens, those of the highest entropy in the step, whose policy term counts."""
    entropy_coef: float = 0.0
    use_adaptive_entropy: bool = False
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    entropy_coef_delta: float = 0.005
    entropy_target: float = 0.2

    off_policy_mask_threshold: float | None = None
    """Leave out bad completions that the policy has moved away from by more than this (DeepSeek-V3.2)."""
    vllm_importance_sampling_correction: bool | None = field(default=None, metadata={"nargs": "?", "const": True})
    """Weight tokens by the mismatch of sampler and trainer, for any sampler. None: only while they disagree."""
    vllm_importance_sampling_mode: str = "token_truncate"
    vllm_importance_sampling_clip_max: float | None = 2.0
    vllm_importance_sampling_clip_min: float | None = None

    RANGES: ClassVar[dict[str, Rule]] = {
        "loss_type": one_of(*LOSS_TYPES), "kl_estimator": one_of(*KL_ESTIMATORS),
        "vllm_importance_sampling_mode": one_of(*CORRECTIONS),
        **dict.fromkeys((*OF_TYPES, "beta", "entropy_coef", "entropy_coef_delta", "entropy_target"), ZERO_OR_MORE),
        "importance_sampling_level": one_of(*LEVELS), "sapo_temperature_neg": POSITIVE,
        "sapo_temperature_pos": POSITIVE, "off_policy_mask_threshold": ABOVE_ZERO,
        "top_entropy_quantile": number("in (0, 1]", lambda value: 0 < value <= 1),
        "vllm_importance_sampling_clip_max": ABOVE_ZERO, "vllm_importance_sampling_clip_min": ABOVE_ZERO,
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        self.check_loss_options()

    def check_loss_options(self) -> None:
        """Raise ValueError for the first option that the loss type does not use, or that contradicts another."""
        self.check_used()
        self.check_clipping()
        self.check_entropy()
        self.check_correction()

    def chosen(self) -> dict[str, Any]:
        """Return the loss type's options: the values that are set, and its own defaults for the others."""
        defaults = LOSS_TYPES[self.loss_type].options
        options = {name: getattr(self, name) for name in defaults}
        if options.get("epsilon") is not None:
            defaults = {**defaults, "epsilon_high": None}  # None stands for epsilon
        return {name: default if options[name] is None else options[name] for name, default in defaults.items()}

    @property
    def level(self) -> str:
        """The level of the ratio: "token", "sequence", "sequence_token" or "sequence_sum"."""
        return str(self.chosen().get("importance_sampling_level", LOSS_TYPES[self.loss_type].level))

    @property
    def correction_bounds(self) -> Bounds:
        return self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max

    def check_used(self) -> None:
        """Raise ValueError for an option that the loss type does not use. An option at TRL's default is allowed."""
        kind = LOSS_TYPES[self.loss_type]
        used = kind.options
        asks_nothing: dict[str, Any] = {"importance_sampling_level": kind.level, **(OF_TRL if kind.in_trl else {})}
        for name in OF_TYPES:
            if getattr(self, name) not in (None, asks_nothing.get(name)) and name not in used:
                raise ValueError(f"{name} is {getattr(self, name)}, and loss_type {self.loss_type!r} does not use it; "
                                 f"it uses {', '.join(used) or 'no option of its own'}. Leave {name} out, or choose "
                                 "another loss_type")
        if self.kl_estimator is not None and not self.beta:
            raise ValueError(f"kl_estimator is {self.kl_estimator!r}, and beta is 0: there is no KL term; set beta")

    def check_clipping(self) -> None:
        """Raise ValueError for bounds that would cut every gradient, or contradict each other."""
        options = self.chosen()
        if self.loss_type == "cispo" and options["epsilon_high"] < 1:
            raise ValueError(f"epsilon_high is {options['epsilon_high']}, and cispo bounds the ratio itself by it: "
                             "below 1 it would shrink every gradient, on-policy too. 5.0 is usual")
        if options.get("delta") is not None:
            upper = 1 + (options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"])
            if not options["delta"] > upper:
                raise ValueError(f"delta is {options['delta']}; it must be above 1 + epsilon_high = {upper}")

    def check_entropy(self) -> None:
        """Raise ValueError for entropy options without effect, and for a token mask if a completion has one ratio."""
        if self.top_entropy_quantile < 1 and self.whole_sequences:
            raise ValueError(f"top_entropy_quantile is {self.top_entropy_quantile}, and {self.whole_sequences} has one "
                             "ratio for all tokens of a completion, which a mask over tokens would break up; use "
                             "loss_type='gspo_token'")
        if not self.use_adaptive_entropy:
            for name, default in ADAPTIVE.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name} is {getattr(self, name)}, which only use_adaptive_entropy=True uses")
        elif not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ValueError(f"entropy_coef is {self.entropy_coef}; it must be between entropy_coef_min "
                             f"({self.entropy_coef_min}) and entropy_coef_max ({self.entropy_coef_max})")

    @property
    def whole_sequences(self) -> str:
        """The setting, in words, that makes tokens of a completion share one ratio; "" if there is none."""
        if self.loss_type in ("gspo", "gmpo", "rloo"):
            return f"loss_type {self.loss_type!r}"
        return "importance_sampling_level 'sequence'" if self.level == "sequence" else ""

    def check_correction(self) -> None:
        """Raise ValueError for bounds that do not fit the mode of the correction."""
        mode, (low, high) = self.vllm_importance_sampling_mode, self.correction_bounds
        name = "vllm_importance_sampling"
        if low is not None and high is not None and low >= high:
            raise ValueError(f"{name}_clip_min is {low}; it must be below {name}_clip_max, which is {high}")
        if low is None and high is None:
            raise ValueError(f"{name}_mode is {mode!r} without any bound; set {name}_clip_max, 2.0 is usual")
        if self.vllm_importance_sampling_correction is False and (mode, low, high) != ("token_truncate", None, 2.0):
            raise ValueError(f"{name}_correction is False, and its mode or bounds are set; leave one of them out")
        if mode == "token_mask" and self.whole_sequences:
            raise ValueError(f"{name}_mode is 'token_mask', and {self.whole_sequences} has one ratio for all tokens of "
                             "a completion; use 'token_truncate', or 'geometric_mask' to leave out whole completions")
        if mode == "geometric_mask" and (low is None or high is None):
            raise ValueError(f"'geometric_mask' needs {name}_clip_min and _clip_max, such as 0.95 and 1.05")
        if mode == "k3_mask" and low is not None:
            raise ValueError(f"'k3_mask' has no lower bound, and {name}_clip_min is {low}; leave it out")
        if mode == "k3_mask" and (high is None or high > 0.5):
            raise ValueError(f"'k3_mask' bounds a mean k3: {name}_clip_max is {high}; 0.01 is usual")
