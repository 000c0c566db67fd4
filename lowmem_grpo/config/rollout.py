"""The settings of a GRPO run about completions: how they are sampled, how many are trained together, and rewards."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lowmem_grpo import utils
from lowmem_grpo.config.loading import GPU_SHARE
from lowmem_grpo.config.sampling import Draws, SamplingParams, as_sampling_params
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.utils import COUNT, POSITIVE, TRUTH, ZERO_OR_MORE, Rule

MUST_AGREE = ("temperature", "n", "max_tokens")  # fields of vllm_sampling_params that must be GRPOConfig's own
TRLS_SHARE = 0.3  # TRL's default of vllm_gpu_memory_utilization
SEVERAL = "a whole number, 2 or more: GRPO compares completions of one prompt (8 is usual)"
GRPO_DEFAULTS: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": None}


@dataclass
class RolloutSettings(TrainSettings):
    """Fields of GRPOConfig about prompts, generations and sampling."""

    max_prompt_length: int | None = None
    """Maximum tokens of a prompt; longer rows are skipped and counted. None: the context less max_completion_length."""
    truncate_prompts: bool = False
    """Not in TRL: True cuts longer prompts to their last `max_prompt_length` tokens instead of skipping their rows, as
    TRL did until 0.25. A chat then loses its beginning, and so its system message."""
    steps_per_generation: int | None = None
    """Batches of per_device_train_batch_size completions in a generation; None: gradient_accumulation_steps."""
    generation_batch_size: int | None = None
    """Completions per generation, a multiple of per_device_train_batch_size; an alternative to steps_per_generation."""
    num_iterations: int = 1
    num_generations: int = 8

    # generation
    max_completion_length: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    vllm_sampling_params: SamplingParams | None = None
    """As in Unsloth: `stop`, `top_p`, `top_k`, `min_p` and so on. It must not contradict the fields above."""
    use_vllm: bool = False
    """True requires vLLM as the engine: a model given by name is loaded with it, and a loaded model without it is
    refused. False uses the engine that the model was loaded with."""
    vllm_mode: str = "colocate"
    """Only "colocate" is allowed: vLLM runs in this process, on the trainer's own weights."""
    vllm_gpu_memory_utilization: float | None = None
    """Share of the card's memory, in (0, 1], for vLLM if the model is given by name; None: 0.5, as in the loader."""
    vllm_max_model_length: int | None = None
    """Maximum tokens of a prompt with its completion, with any engine; None: the model's context. A model given by name
    is loaded with this context."""
    parity_steps: int = 10
    """Not in TRL: recompute sampled log-probabilities in the first step and every `parity_steps` steps; 0: never."""
    parity_bound: float | None = None
    """Not in TRL: mean difference, in nats, that stops a run; None: 0.02 in bf16, 0.01 in fp16, else 0.001."""

    RANGES: ClassVar[dict[str, Rule]] = {
        "num_generations": (SEVERAL, COUNT[1]),
        "temperature": ("1e-6 or above, as at 0 all completions of a prompt are the same (1.0 is usual)",
                        lambda value: value != 0 and utils.TEMPERATURE[1](value)),
        **dict.fromkeys(("max_prompt_length", "steps_per_generation", "num_iterations", "generation_batch_size",
                         "max_completion_length", "vllm_max_model_length"), COUNT),
        "truncate_prompts": TRUTH, "parity_steps": ZERO_OR_MORE, "parity_bound": POSITIVE,
        "vllm_gpu_memory_utilization": GPU_SHARE,
    }

    def __post_init__(self) -> None:
        self.top_p = GRPO_DEFAULTS["top_p"] if self.top_p is None else self.top_p  # TRL's own examples pass None
        if isinstance(self.vllm_sampling_params, dict):
            self.vllm_sampling_params = SamplingParams(**self.vllm_sampling_params)
        elif self.vllm_sampling_params is not None:
            self.vllm_sampling_params = as_sampling_params(self.vllm_sampling_params, self.max_completion_length)
        TrainSettings.__post_init__(self)

    def check_combinations(self) -> None:
        super().check_combinations()
        self.take_generation_size()
        self.sampling(None)
        every, together = self.gradient_accumulation_steps, self.steps_per_generation
        if together is not None and together % every and every % together:
            raise ValueError(f"steps_per_generation is {together}; it must be a multiple of "
                             f"gradient_accumulation_steps ({every}), so that whole optimizer steps share a "
                             "generation, or divide it")
        self.check_sampling_params()

    def take_generation_size(self) -> None:
        """Turn `generation_batch_size` into `steps_per_generation`; ValueError if both are set, or if it is not a
        multiple of the batch size."""
        size, batch = self.generation_batch_size, self.per_device_train_batch_size
        if size is None:
            return
        if self.steps_per_generation is not None or size % batch:
            raise ValueError(f"generation_batch_size is {size}; it must be a multiple of per_device_train_batch_size "
                             f"({batch}), and stand without steps_per_generation, which says the same")
        self.steps_per_generation, self.generation_batch_size = size // batch, None

    def check_sampling_params(self) -> None:
        """Raise ValueError if `vllm_sampling_params` contradicts the config fields of the same meaning."""
        params, defaults = self.vllm_sampling_params, SamplingParams()
        same = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
                "n": "num_generations", "max_tokens": "max_completion_length"}
        for theirs, ours in same.items():
            value = getattr(params or defaults, theirs)
            mine, default = getattr(self, ours), getattr(defaults, theirs)
            if value not in (default, mine) and (theirs in MUST_AGREE or mine != GRPO_DEFAULTS[ours]):
                raise ValueError(
                    f"vllm_sampling_params.{theirs} is {value} and {ours} of GRPOConfig is {mine}; make them agree"
                )

    @property
    def optimizer_steps_per_generation(self) -> int:
        """Optimizer steps of one pass over an engine call's completions; at least 1."""
        return max(1, (self.steps_per_generation or 0) // self.gradient_accumulation_steps)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps of all passes over the completions of one engine call."""
        return self.optimizer_steps_per_generation * self.num_iterations

    def steps_of_epoch(self, rows: int) -> int:
        """Return the optimizer steps of a pass over `rows` prompts, without a rest of fewer than `whole_prompts`."""
        used = rows - rows % self.whole_prompts or rows
        return max(1, math.ceil(used / self.prompts_per_step)) * self.num_iterations

    @property
    def whole_prompts(self) -> int:
        """Prompts of a generation in TRL, which leaves an epoch's last prompts out if they are fewer."""
        together = self.steps_per_generation or self.gradient_accumulation_steps
        if together >= self.gradient_accumulation_steps:
            return self.prompts_per_generation
        return math.ceil(self.per_device_train_batch_size * together / self.num_generations)

    @property
    def prompts_per_step(self) -> int:
        """Prompts of one optimizer step; each prompt has one group."""
        return math.ceil(self.per_device_train_batch_size * self.gradient_accumulation_steps / self.num_generations)

    @property
    def completions_per_step(self) -> int:
        """Completions of one optimizer step, rounded up to whole groups."""
        return self.prompts_per_step * self.num_generations

    @property
    def completions_per_prompt(self) -> int:
        return self.num_generations

    @property
    def prompts_per_generation(self) -> int:
        """Prompts of one call of the engine."""
        return self.prompts_per_step * self.optimizer_steps_per_generation

    def rounding(self) -> str | None:
        """Return a message for the user if the batch size was rounded up to whole groups, else None."""
        if self.batch_size == self.completions_per_step:
            return None
        return (f"per_device_train_batch_size ({self.per_device_train_batch_size}) x gradient_accumulation_steps "
                f"({self.gradient_accumulation_steps}) = {self.batch_size} completions do not make whole groups of "
                f"num_generations ({self.num_generations}); each step uses {self.completions_per_step}")

    def sampling(self, seed: int | None, n: int | None = None) -> SamplingParams:
        """Return the sampling parameters of a prompt's completions, with this seed and `n` completions."""
        own = SamplingParams(top_p=self.top_p, top_k=self.top_k, min_p=0.0 if self.min_p is None else self.min_p)
        chosen = {name: getattr(own, name) for name, usual in GRPO_DEFAULTS.items() if getattr(self, name) != usual}
        return replace(self.vllm_sampling_params or own, n=n or self.num_generations, seed=seed,
                       max_tokens=self.max_completion_length, temperature=self.temperature, **chosen)

    @property
    def draws(self) -> Draws:
        """The sampling parameters of a run's engine calls. A seed in `vllm_sampling_params` alters each call's seed."""
        params = self.sampling(getattr(self.vllm_sampling_params, "seed", None))
        return Draws(self.prompts_per_generation, params, self.seed)


@dataclass
class RewardSettings:
    """Fields of GRPOConfig about what becomes of completions: they are shown, evaluated and rewarded."""

    log_completions: bool = False
    """True prints sample completions every `logging_steps` steps; completions.jsonl has all completions anyway."""
    num_completions_to_print: int | None = None
    """Number of completions that `log_completions` prints; None: the best completion of the step's first prompt."""
    log_unique_prompts: bool = False
    """True prints only the best completion of each prompt."""
    per_device_eval_batch_size: int = 8
    num_generations_eval: int | None = None
    """Completions per prompt in an evaluation; None: num_generations, as in TRL."""

    reward_timeout: float | None = 60.0
    """Not in TRL: time limit in seconds for one call of a reward function, which scores a step's completions or, while
    others are still being sampled, some of its groups. None: no limit."""
    score_while_sampling: bool | None = None
    """Not in TRL: which reward functions score finished groups while other groups are still being sampled. None: those
    that declare that they score each group independently (`rewards.Reward` objects, such as the ready-made ones,
    except GSM8K's five, which are plain functions). True: plain functions too; each must work on some groups of a step
    at a time, and in another thread than the sampling. False: none; each is called once, with all completions of a
    step, as in TRL."""
    nothing_to_learn_steps: int = 10
    """Not in TRL: warn after this many consecutive steps in which the rewards did not differ within any group."""

    RANGES: ClassVar[dict[str, Rule]] = {
        **dict.fromkeys(("num_completions_to_print", "per_device_eval_batch_size", "num_generations_eval",
                         "nothing_to_learn_steps"), COUNT),
        "log_unique_prompts": TRUTH, "reward_timeout": POSITIVE, "score_while_sampling": TRUTH,
    }

    @property
    def reward_limit(self) -> float:
        return math.inf if self.reward_timeout is None else self.reward_timeout
