"""The settings of a GRPO run, under TRL's field names and meanings (TRL 1.16's GRPOConfig)."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lowmem_grpo import utils
from lowmem_grpo.config.loading import GPU_SHARE
from lowmem_grpo.config.sampling import Draws, EpisodeSettings, SamplingParams, StrategySettings, as_sampling_params
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.losses.advantages import COMPARING, AdvantageSettings
from lowmem_grpo.losses.loss_settings import LossSettings
from lowmem_grpo.utils import COUNT, POSITIVE, SHARE, TRUTH, ZERO_OR_MORE, Rule, at_least, count_text, one_of

MUST_AGREE = ("temperature", "n", "max_tokens")  # fields of vllm_sampling_params that must be GRPOConfig's own
TRLS_SHARE = 0.3  # TRL's default of vllm_gpu_memory_utilization
GRPO_DEFAULTS: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": None}


@dataclass
class GRPOConfig(LossSettings, AdvantageSettings, StrategySettings, EpisodeSettings, TrainSettings):
    """Every field means what it means in TRL; fields that TRL does not have say so.

    One optimizer step uses `per_device_train_batch_size * gradient_accumulation_steps` completions, rounded up to whole
    groups (`completions_per_step`). On a card only the memory plan cuts them into micro-batches, of at most
    `max_tokens_per_micro_batch` tokens. Without a plan (on the CPU, or for a model that cannot be planned), a
    micro-batch also holds at most `per_device_train_batch_size` completions. Neither limit changes the gradient.
    """

    evaluated: ClassVar[str] = "reward"
    READ_ONCE: ClassVar[tuple[str, ...]] = (
        *TrainSettings.READ_ONCE, "num_generations", "steps_per_generation", "max_prompt_length", "truncate_prompts",
        "max_completion_length", "temperature", "top_p", "top_k", "min_p", "vllm_sampling_params", "reward_weights",
        "entropy_coef")

    # Inherited fields: TrainSettings; StrategySettings, how groups are chosen, and training while sampling;
    # EpisodeSettings, episodes of several turns; LossSettings and AdvantageSettings, the loss.

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

    kl_reference: str = "start"
    """Not in TRL: the reference of the KL term (`beta`). "start", as in TRL: the policy at the start of training, so
    that a run that continues an adapter stays near what it has learned. "base": the model without any adapter."""
    sync_ref_model: bool = False
    """True moves the reference toward the policy: every `ref_model_sync_steps` steps, its adapter weights become
    ref_model_mixup_alpha * policy + (1 - ref_model_mixup_alpha) * reference."""
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    mask_truncated_completions: bool = False
    log_completions: bool = False
    """True prints sample completions every `logging_steps` steps; completions.jsonl has all completions anyway."""
    num_completions_to_print: int | None = None
    """Number of completions that `log_completions` prints; None: the best completion of the step's first prompt."""
    log_unique_prompts: bool = False
    """True prints only the best completion of each prompt."""
    per_device_eval_batch_size: int = 8
    num_generations_eval: int | None = None
    """Completions per prompt in an evaluation; None: num_generations, as in TRL."""

    # rewards
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
        "num_generations": ("a whole number, 2 or more: GRPO compares completions of one prompt (8 is usual)",
                            at_least(2)[1]),
        "temperature": ("1e-6 or above, as at 0 all completions of a prompt are the same (1.0 is usual)",
                        lambda value: value != 0 and utils.TEMPERATURE[1](value)),
        "max_prompt_length": COUNT, "steps_per_generation": COUNT, "num_iterations": COUNT,
        "generation_batch_size": COUNT,
        "truncate_prompts": TRUTH,
        "max_completion_length": COUNT, "parity_steps": ZERO_OR_MORE, "parity_bound": POSITIVE,
        "num_completions_to_print": COUNT, "log_unique_prompts": TRUTH, "sync_ref_model": TRUTH,
        "ref_model_mixup_alpha": SHARE, "ref_model_sync_steps": COUNT,
        "per_device_eval_batch_size": COUNT, "num_generations_eval": COUNT, "reward_timeout": POSITIVE,
        "vllm_gpu_memory_utilization": GPU_SHARE, "vllm_max_model_length": COUNT,
        "kl_reference": one_of("start", "base"), "score_while_sampling": TRUTH, "nothing_to_learn_steps": COUNT,
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
        self.check_step()
        self.check_replay()
        self.check_overlap()
        self.turn_limit  # noqa: B018  (refuses a contradiction)
        self.sampling(None)
        every, together = self.gradient_accumulation_steps, self.steps_per_generation
        if together is not None and together % every and every % together:
            raise ValueError(f"steps_per_generation is {together}; it must be a multiple of "
                             f"gradient_accumulation_steps ({every}), so that whole optimizer steps share a "
                             "generation, or divide it")
        if self.replay_buffer_size and self.vllm_importance_sampling_correction is False:
            raise ValueError(f"replay_buffer_size is {self.replay_buffer_size} and "
                             "vllm_importance_sampling_correction is False: replayed completions are of an older "
                             "policy, and would be trained on as if they were of this one; leave one of them out")
        self.check_sampling_params()

    def check_step(self) -> None:
        """Raise ValueError if settings that may differ from step to step contradict each other or other settings."""
        self.check_loss_options()
        self.check_advantage_options()
        self.check_credit()
        if self.sync_ref_model and not self.beta:
            raise ValueError("sync_ref_model=True, and beta is 0.0: nothing is compared with the reference. Set beta, "
                             "or leave sync_ref_model out")
        if self.sync_ref_model and self.kl_reference == "base":
            raise ValueError("sync_ref_model=True, and kl_reference is 'base', which stays as it is; leave one of them "
                             "out")
        if self.pass_at_k is not None and not 1 <= self.pass_at_k < self.num_generations:
            raise ValueError(f"pass_at_k is {self.pass_at_k}; it must be at least 1 and below num_generations "
                             f"({self.num_generations})")

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

    def check_credit(self) -> None:
        """Raise ValueError if `turn_discount` is set, and the advantages do not compare turns with the group's mean."""
        name = self.advantage_estimator
        if self.multi_objective_aggregation == "normalize_then_sum":
            name = "normalize_then_sum (GDPO)"
        if self.turn_discount is not None and name not in COMPARING:
            raise ValueError(f"turn_discount is {self.turn_discount}, which compares turns with the mean of their "
                             f"group, and the advantages are those of {name}; take "
                             f"advantage_estimator={' or '.join(map(repr, COMPARING))}, or leave turn_discount out")
        if self.turn_discount is not None and self.kl_in_reward:
            raise ValueError(f"turn_discount is {self.turn_discount}, and with loss_type 'rloo' and beta {self.beta} "
                             "the KL term is part of the reward of a whole completion; set beta=0, or leave "
                             "turn_discount out")

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
    def reward_limit(self) -> float:
        return math.inf if self.reward_timeout is None else self.reward_timeout

    @property
    def kl_in_reward(self) -> bool:
        """True if the KL term is part of the advantages and not of the loss."""
        rloo = self.advantage_estimator == self.loss_type == "rloo"
        return bool(self.beta) and (rloo or self.advantage_estimator == "reinforce++")

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
        return math.ceil(self.batch_size / self.num_generations)

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

    def doubts(self) -> list[str]:
        """Return TRL's warnings about settings that differ from those of a method's paper."""
        doubts = []
        if self.loss_type == "luspo" and self.level != "sequence":
            doubts.append("loss_type is 'luspo' and importance_sampling_level 'token'; its paper has 'sequence'")
        if self.level == "sequence" and self.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
            doubts.append(f"importance_sampling_level is 'sequence', and loss_type {self.loss_type!r} sums over "
                          "tokens, which weights each sequence by its completion length. GSPO's paper has loss_type "
                          "'grpo'")
        return doubts

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


def check_weights(weights: list[float] | None, names: list[str]) -> None:
    """Raise ValueError unless there is one weight for each of these reward functions, or `weights` is None."""
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"reward_weights has {count_text(len(weights), 'number')} for "
                         f"{count_text(len(names), 'reward function')} ({', '.join(names)}); give one for each")


@dataclass
class RLOOConfig(GRPOConfig):
    """TRL's RLOOConfig: a completion is one action, compared with the others of its prompt, and the KL term is part of
    its reward. The options are those of TRL's class, and those of GRPOConfig that do not concern the loss."""

    num_generations: int = 2
    beta: float = 0.05
    advantage_estimator: str = "rloo"
    loss_type: str = "rloo"
