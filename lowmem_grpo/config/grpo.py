"""The settings of a run, under TRL's field names and meanings (TRL 1.16's GRPOConfig)."""

import difflib
import inspect
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.config.strategies import StrategySettings
from lowmem_grpo.config.unsupported import FIXED, RENAMED, Fixed
from lowmem_grpo.losses.advantages import AdvantageSettings
from lowmem_grpo.losses.loss_settings import LossSettings

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup")
SINKS = ("none", "wandb", "tensorboard")
STRATEGIES = ("no", "steps")

MAY_BE_NONE = ("steps_per_generation", "eval_steps", "max_prompt_length", "save_total_limit", "num_generations_eval",
               "max_tokens_per_micro_batch", "logits_chunk")
MUST_AGREE = ("temperature", "n", "max_tokens")  # of vllm_sampling_params: the trainer needs GRPOConfig's own
GRPO_DEFAULTS: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": None}

Rule = tuple[str, Callable[[float], bool]]
ZERO_OR_MORE: Rule = ("0 or above", lambda value: 0 <= value < math.inf)
POSITIVE: Rule = ("above 0", lambda value: 0 < value < math.inf)
SHARE: Rule = ("a share, from 0 to 1", lambda value: 0 <= value <= 1)
DECAY: Rule = ("at least 0 and below 1", lambda value: 0 <= value < 1)
RANGES: dict[str, Rule] = {
    "learning_rate": ZERO_OR_MORE, "weight_decay": ZERO_OR_MORE, "warmup_steps": ZERO_OR_MORE,
    "warmup_ratio": SHARE, "adam_beta1": DECAY, "adam_beta2": DECAY, "adam_epsilon": ZERO_OR_MORE,
    "max_grad_norm": POSITIVE,
    "temperature": ZERO_OR_MORE, "reward_timeout": POSITIVE, "num_train_epochs": POSITIVE,
    "parity_steps": ZERO_OR_MORE, "parity_bound": POSITIVE,
}


def field_names(cls: type) -> set[str]:
    """The annotated names of a class and its bases."""
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}


class CheckedCall(type):
    """Makes `GRPOConfig(...)` refuse options by name, with what to do instead, before the dataclass sees them.

    A class may have its own table, `unsupported`.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fixed = getattr(cls, "unsupported", FIXED)
        return super().__call__(*args, **refuse_unsupported(kwargs, field_names(cls), fixed, cls.__name__))


def refuse_unsupported(
    options: dict[str, Any], known: set[str], fixed: dict[str, Fixed], owner: str
) -> dict[str, Any]:
    """The options that are fields. Raises TypeError for one that nobody knows, ValueError for one we cannot honour."""
    kept: dict[str, Any] = {}
    for given, value in options.items():
        name = RENAMED.get(given, given)
        if name != given and name in options:
            raise TypeError(f"{owner} got {given!r} and {name!r}, which are the same option; give one of them")
        if name in known:
            kept[name] = value
        elif name not in fixed:
            close = difflib.get_close_matches(name, [*known, *fixed], n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise TypeError(f"{owner} has no option {name!r}{hint}")
        elif value not in fixed[name].allowed:
            allowed = " or ".join(repr(choice) for choice in fixed[name].allowed)
            raise ValueError(f"{name}={value!r} is not supported (allowed: {allowed}). {fixed[name].advice}")
    return kept


@dataclass
class GRPOConfig(LossSettings, AdvantageSettings, StrategySettings, metaclass=CheckedCall):
    """Every field means what it means in TRL; fields that TRL does not have say so.

    One optimizer step uses `per_device_train_batch_size * gradient_accumulation_steps` completions, rounded up to
    whole groups (`completions_per_step`). On a card the memory plan alone cuts them into micro-batches, of at most
    `max_tokens_per_micro_batch` tokens. Where there is no plan (on the CPU, or for a model that none can be made for),
    a micro-batch also holds at most `per_device_train_batch_size` completions. The gradient depends on neither.
    """

    output_dir: str = "outputs"
    overwrite_output_dir: bool = False
    run_name: str | None = None
    seed: int = 42

    # data
    max_prompt_length: int | None = None
    """Rows with a longer prompt are skipped and counted; None leaves the context as the only bound."""
    shuffle_dataset: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    # how much
    max_steps: int = -1
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    num_iterations: int = 1
    num_generations: int = 8
    max_tokens_per_micro_batch: int | None = None
    """Not in TRL: your own bound on a micro-batch, in tokens. None takes the memory plan's, where there is one."""
    logits_chunk: int | None = None
    """Not in TRL: tokens whose logits exist at a time; None chooses by the device's memory."""

    # generation
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    vllm_sampling_params: SamplingParams | None = None
    """Unsloth's name: stop strings, top_p, top_k, min_p. It must not contradict the fields above."""
    use_vllm: bool = False
    """True insists that the model was loaded with vLLM as its engine; False takes whichever it was loaded with."""
    parity_steps: int = 10
    """Not in TRL: recompute sampled log-probabilities every so many steps, and in the first; 0 is never."""
    parity_bound: float | None = None
    """Not in TRL: stop where they differ by more, on average; None is 0.02 in bf16, 0.01 in fp16, 0.001 in fp32."""

    # which groups are trained on: the fields of StrategySettings

    # loss: the fields of LossSettings and AdvantageSettings, and
    mask_truncated_completions: bool = False

    # optimizer
    learning_rate: float = 1e-6
    optim: str = "adamw_torch"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    """Steps; below 1 a share of all steps, as in transformers 5."""
    warmup_ratio: float = 0.0

    # precision and memory
    bf16: bool | None = None
    fp16: bool | None = None
    gradient_checkpointing: bool | None = None
    """None keeps what get_peft_model set up."""

    # records
    logging_steps: int = 1
    report_to: Any = "none"  # str | list[str]; a list once checked
    log_completions: bool = False
    """Print a sample with each log; completions.jsonl holds them all in any case."""
    disable_tqdm: bool | None = None
    """True turns the live view off."""
    preflight: bool = True
    """Not in TRL: look for what a run would stumble over before its first step (docs/preflight.md), and say after the
    first two how rewards and pace look. False checks nothing and says nothing."""
    save_strategy: str = "steps"
    save_steps: int = 100
    save_total_limit: int | None = 3
    eval_strategy: str = "no"
    eval_steps: int | None = None
    per_device_eval_batch_size: int = 8
    num_generations_eval: int | None = None

    # rewards
    reward_timeout: float = 60.0
    """Not in TRL: seconds that one call of a reward function may take: for a step's completions, or for those that it
    gets at once while others are sampled."""
    score_while_sampling: bool | None = None
    """Not in TRL: which reward functions are called on finished groups while other groups are still sampled. None:
    those that say of themselves that they look at each group alone (`rewards.Reward` objects, as the ready-made ones
    are, but not GSM8K's five, which are plain functions). True: plain functions too, which is a promise that they can
    be called on some groups of a step at a time, in another thread than the one that samples. False: none; each is
    called once, on all of a step's completions, as in TRL."""
    nothing_to_learn_steps: int = 10
    """Not in TRL: warn after this many steps in a row in which no group had any spread of rewards."""
    nonfinite_steps: int = 3
    """Not in TRL: stop after this many steps in a row that were skipped for NaN or infinity in rewards,
    log-probabilities or gradients. Their rollouts are in nonfinite.jsonl."""

    def __post_init__(self) -> None:
        self.report_to = [self.report_to] if isinstance(self.report_to, str) else list(self.report_to or ["none"])
        if isinstance(self.vllm_sampling_params, dict):
            self.vllm_sampling_params = SamplingParams(**self.vllm_sampling_params)
        self.lr_scheduler_type = str(getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type))
        self.optim = str(getattr(self.optim, "value", self.optim))
        self.check_loss_options()
        self.check_advantage_options()
        self.check_strategies()
        self.check_choices()
        self.check_ranges()
        self.check_combinations()

    def check_choices(self) -> None:
        """Each named choice is one of those we have."""
        choices = {
            "optim": OPTIMIZERS, "lr_scheduler_type": SCHEDULERS, "save_strategy": STRATEGIES,
            "eval_strategy": STRATEGIES,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(allowed)}")
        if self.score_while_sampling not in (None, True, False):
            raise ValueError(f"score_while_sampling is {self.score_while_sampling!r}; allowed are None, True and False")
        for sink in self.report_to:
            if sink not in SINKS:
                raise ValueError(f"report_to names {sink!r}; allowed are {', '.join(SINKS)}")

    def check_ranges(self) -> None:
        """Each number lies where it makes sense."""
        generations = self.num_generations
        if generations is None or generations < 2 or generations != int(generations):
            raise ValueError(
                f"num_generations is {self.num_generations}; GRPO compares completions of one prompt, so it must be a "
                "whole number, 2 or more (8 is usual)"
            )
        at_least_one = (
            "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "max_completion_length",
            "logging_steps", "save_steps", "steps_per_generation", "eval_steps", "max_prompt_length",
            "save_total_limit", "per_device_eval_batch_size", "num_generations_eval", "max_tokens_per_micro_batch",
            "logits_chunk",
            "nothing_to_learn_steps", "nonfinite_steps",
        )
        for name in at_least_one:
            value = getattr(self, name)
            if value is None and name not in MAY_BE_NONE:
                raise ValueError(f"{name} is None; it must be a whole number, at least 1")
            if value is not None and (value < 1 or value != int(value)):
                raise ValueError(f"{name} is {value}; it must be a whole number, at least 1")
        for name, (rule, holds) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not holds(value):
                raise ValueError(f"{name} is {value}; it must be {rule}")
        self.sampling(None)

    def check_combinations(self) -> None:
        """Settings that contradict each other are refused, never mended in silence."""
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 are both set; set one of them")
        if self.warmup_ratio and self.warmup_steps:
            raise ValueError("warmup_ratio and warmup_steps are both set; set one of them")
        if self.max_steps == 0 or self.max_steps < -1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be above 0, or -1 to go by num_train_epochs")
        if self.temperature == 0:
            raise ValueError("temperature is 0: all completions of a prompt would be the same; 1.0 is usual")
        if self.pass_at_k is not None and not 1 <= self.pass_at_k < self.num_generations:
            raise ValueError(
                f"pass_at_k is {self.pass_at_k}; it must be at least 1 and below num_generations "
                f"({self.num_generations})"
            )
        every = self.gradient_accumulation_steps
        if self.steps_per_generation is not None and self.steps_per_generation % every:
            raise ValueError(
                f"steps_per_generation is {self.steps_per_generation}; it must be a multiple of "
                f"gradient_accumulation_steps ({every}), so that whole optimizer steps share a generation"
            )
        if self.replay_buffer_size and self.vllm_importance_sampling_correction is False:
            raise ValueError(
                f"replay_buffer_size is {self.replay_buffer_size} and vllm_importance_sampling_correction is False: "
                "replayed completions are of an older policy, and would be trained on as if they were of this one; "
                "leave one of them out"
            )
        self.check_sampling_params()
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = self.logging_steps  # transformers' rule

    def check_sampling_params(self) -> None:
        """`vllm_sampling_params` does not contradict the fields that say the same."""
        given, defaults = self.vllm_sampling_params, SamplingParams()
        same = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                "n": "num_generations", "max_tokens": "max_completion_length"}
        for theirs, ours in same.items():
            value = getattr(given or defaults, theirs)
            mine, default = getattr(self, ours), getattr(defaults, theirs)
            if value not in (default, mine) and (theirs in MUST_AGREE or mine != GRPO_DEFAULTS[ours]):
                raise ValueError(
                    f"vllm_sampling_params.{theirs} is {value} and {ours} of GRPOConfig is {mine}; make them agree"
                )

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL term is part of the advantages and not of the loss."""
        return bool(self.beta) and self.advantage_estimator == "reinforce++"

    @property
    def optimizer_steps_per_generation(self) -> int:
        """Optimizer steps that share one generation, each pass over it counted once."""
        return (self.steps_per_generation or self.gradient_accumulation_steps) // self.gradient_accumulation_steps

    @property
    def prompts_per_step(self) -> int:
        """Prompts behind one optimizer step."""
        wanted = self.per_device_train_batch_size * self.gradient_accumulation_steps
        return math.ceil(wanted / self.num_generations)

    @property
    def completions_per_step(self) -> int:
        """Completions behind one optimizer step, rounded up to whole groups."""
        return self.prompts_per_step * self.num_generations

    @property
    def prompts_per_generation(self) -> int:
        """Prompts of one call of the engine."""
        return self.prompts_per_step * self.optimizer_steps_per_generation

    def rounding(self) -> str | None:
        """What was rounded up, for the user to see; None where everything divides."""
        wanted = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if wanted == self.completions_per_step:
            return None
        return (
            f"per_device_train_batch_size ({self.per_device_train_batch_size}) x gradient_accumulation_steps "
            f"({self.gradient_accumulation_steps}) = {wanted} completions do not make whole groups of num_generations "
            f"({self.num_generations}); each step uses {self.completions_per_step}"
        )

    def sampling(self, seed: int | None, n: int | None = None) -> SamplingParams:
        """How completions are drawn in training."""
        given = self.vllm_sampling_params or SamplingParams(top_p=self.top_p, top_k=self.top_k, min_p=self.min_p or 0.0)
        return replace(
            given, n=n or self.num_generations, max_tokens=self.max_completion_length, seed=seed,
            temperature=self.temperature,
        )

    def rollout_seed(self, step: int, extra_round: int = 0) -> int:
        """The sampler's seed at a step: from `seed`, and from that of `vllm_sampling_params` where it has one. Each
        extra round of dynamic sampling has its own."""
        extra = self.vllm_sampling_params.seed if self.vllm_sampling_params else None
        again = f"-{extra_round}" if extra_round else ""
        return random.Random(f"{self.seed}-{extra}-{step}{again}").getrandbits(62)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records and checkpoints."""
        return asdict(self)


def steps_per_rollout(config: GRPOConfig) -> int:
    """Optimizer steps of one update."""
    return config.optimizer_steps_per_generation * config.num_iterations
