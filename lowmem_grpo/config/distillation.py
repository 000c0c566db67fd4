"""The settings of runs whose teacher is the point, under the names and defaults of TRL 1.16's configs."""

from dataclasses import dataclass
from typing import ClassVar

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.shared import JsonDict, of_json
from lowmem_grpo.config.teacher import BASE, EMA, FULL, OF_MODEL, TOP_K
from lowmem_grpo.config.unsupported import OF_GRPO, Table, any_value, only
from lowmem_grpo.utils import (
    COUNT,
    OF_KINDS,
    SHARE,
    TRUTH,
    ZERO_OR_MORE,
    Rule,
    check_given,
    check_template,
    number,
    one_of,
)

OTHER_TEXTS = "All completions are sampled from the student here; train on other texts with SFTTrainer."
OF_TEACHER: Table = OF_GRPO | {
    **only(OTHER_TEXTS, lmbda=1.0, seq_kd=False, generate_from_teacher=False),
    **only("A teacher behind a URL is given as teacher=URL.", use_teacher_server=False),
    **any_value("diagnostics_warning_interval", "diagnostics_flat_tolerance"),  # of warnings
}


@dataclass
class DistillationConfig(GRPOConfig):
    """TRL's DistillationConfig: a student learns a teacher's distribution at each token that it samples itself. `beta`
    is the divergence's (0: forward KL, 1: reverse KL, between: Jensen-Shannon), not that of a KL term."""

    num_generations: int = 1
    beta: float = 1.0
    distillation_weight: float = 1.0
    distillation_mode: str = FULL
    distillation_is_clip: float | None = None
    scale_rewards: str | None = "none"
    teacher_model_name_or_path: str | None = None
    """The teacher, unless the trainer is given one: TRL's scripts read it from their command line."""
    teacher_model_revision: str | None = None
    teacher_model_init_kwargs: JsonDict | None = None
    """Options for loading a teacher that is given by name, as in model_init_kwargs."""

    unsupported = OF_TEACHER
    RANGES: ClassVar[dict[str, Rule]] = {"num_generations": COUNT, "beta": SHARE}
    evaluated: ClassVar[str] = "loss"
    needs_teacher: ClassVar[bool] = True

    def check_combinations(self) -> None:
        if self.distillation_alpha != 1:
            raise ValueError(f"distillation_alpha is {self.distillation_alpha}; DistillationConfig calls it beta, as "
                             f"TRL does: set beta={self.distillation_alpha}")
        self.teacher_model_init_kwargs = of_json(self.teacher_model_init_kwargs)
        check_given(vars(self), {"teacher_model_init_kwargs": OF_KINDS[dict]})
        super().check_combinations()

    @property
    def divergence(self) -> float:
        return self.beta

    @property
    def kl_weight(self) -> float:
        return 0.0


@dataclass
class SelfDistillationConfig(GRPOConfig):
    """The fields that TRL's SDPOConfig and SDFTConfig share: the teacher is the trained model, and reads more. A longer
    prompt than the context has room for is left out; TRL cuts prompts to 512 tokens."""

    max_completion_length: int = 256
    learning_rate: float = 5e-5
    distillation_weight: float = 1.0
    disable_dropout: bool = True
    teacher_model_kind: str | None = None
    """TRL's name of `teacher`, "base", "ema" or "live". None: as `teacher` says."""

    unsupported = OF_TEACHER
    RANGES: ClassVar[dict[str, Rule]] = {"num_generations": COUNT, "teacher_model_kind": one_of(*OF_MODEL)}
    privileged: ClassVar[bool] = True
    by_sequence: ClassVar[bool] = True
    needs_teacher: ClassVar[bool] = True


@dataclass
class SDPOConfig(SelfDistillationConfig):
    """TRL's SDPOConfig (arXiv 2601.20802): the teacher reads a successful completion of the same prompt, or feedback
    from the column `privileged_context`, in the prompt."""

    teacher: str | None = EMA
    use_successful_as_teacher: bool = True
    success_reward_threshold: float = 1.0
    dont_reprompt_on_self_success: bool = True
    """True never shows the teacher the completion that it reads."""
    include_environment_feedback: bool = False
    environment_feedback_only_without_solution: bool = False
    remove_thinking_from_demonstration: bool = False
    """True takes <think>...</think> out of what the teacher is shown."""
    reprompt_template: str = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    solution_template: str = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
    feedback_template: str = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"

    RANGES: ClassVar[dict[str, Rule]] = {
        **dict.fromkeys(("use_successful_as_teacher", "dont_reprompt_on_self_success", "include_environment_feedback",
                         "environment_feedback_only_without_solution", "remove_thinking_from_demonstration"), TRUTH),
        "success_reward_threshold": number("a number", lambda value: True),
    }

    def check_combinations(self) -> None:
        super().check_combinations()
        if not (self.use_successful_as_teacher or self.include_environment_feedback):
            raise ValueError("use_successful_as_teacher and include_environment_feedback are False, so the teacher is "
                             "told nothing; set one of them to True")
        for name, fields in {"reprompt_template": ("prompt", "solution", "feedback"),
                             "solution_template": ("successful_previous_attempt",),
                             "feedback_template": ("feedback_raw",)}.items():
            check_template(name, getattr(self, name), fields)


@dataclass
class SDFTConfig(SelfDistillationConfig):
    """TRL's SDFTConfig (arXiv 2601.19897): the teacher reads the row's `privileged_context` in the prompt."""

    teacher: str | None = BASE
    distillation_mode: str = TOP_K
    distillation_topk: int | None = 100
    distillation_alpha: float = 0.5
    teacher_prompt_template: str = "{prompt}\n\n{privileged_context}"
    generate_from_teacher: bool = False
    """True samples the completions behind the prompt that the teacher reads; the student learns them behind its own."""
    num_loss_tokens_to_skip: int = 0
    """The first tokens of each completion, which are not learnt."""

    evaluated: ClassVar[str] = "loss"
    RANGES: ClassVar[dict[str, Rule]] = {"num_loss_tokens_to_skip": ZERO_OR_MORE}

    def check_combinations(self) -> None:
        super().check_combinations()
        if self.num_loss_tokens_to_skip >= (self.max_completion_length or 1):
            raise ValueError(f"num_loss_tokens_to_skip is {self.num_loss_tokens_to_skip}, and max_completion_length "
                             f"{self.max_completion_length}: no token is left to learn; skip fewer")
        if self.generate_from_teacher and self.distillation_weight < 1:
            raise ValueError(f"generate_from_teacher=True, and distillation_weight is {self.distillation_weight}: the "
                             "policy loss needs completions behind the policy's own prompt; leave one of them out")
        fields = "prompt", "privileged_context"
        check_template("teacher_prompt_template", self.teacher_prompt_template, fields, needed=fields)
