"""Trainers whose teacher is the point, with TRL's constructors. They are `GRPOTrainer`s whose config has a teacher."""

from typing import Any

from lowmem_grpo.config.distillation import DistillationConfig, SDFTConfig, SDPOConfig
from lowmem_grpo.runs.views.live import DistillationView
from lowmem_grpo.trainer.grpo import GRPOTrainer


class DistillationTrainer(GRPOTrainer):
    """On-policy distillation (arXiv 2306.13649): the student samples, and learns the distribution of `teacher_model` at
    each token. The teacher is a model, its name or folder, an adapter's folder, or what GRPOConfig.teacher may be."""

    settings = DistillationConfig
    method, view_class = "distillation", DistillationView

    def __init__(self, model: Any = None, teacher_model: Any = None, args: Any = None, train_dataset: Any = None,
                 eval_dataset: Any = None, processing_class: Any = None, callbacks: list[Any] | None = None,
                 optimizers: Any = (None, None), quantization_config: Any = None, peft_config: Any = None,
                 tools: Any = None, **others: Any) -> None:
        """The parameters are TRL's, in TRL's order; `others` are those of GRPOTrainer. ValueError without a teacher."""
        given = [teacher for teacher in (teacher_model, others.pop("teacher", None)) if teacher is not None]
        if len(given) > 1:
            raise ValueError("teacher_model and teacher are two names of the same; give one of them")
        super().__init__(model, others.pop("reward_funcs", None), args, train_dataset, eval_dataset, processing_class,
                         None, callbacks, optimizers, quantization_config, peft_config, tools,
                         teacher=given[0] if given else None, **others)


class SDPOTrainer(GRPOTrainer):
    """Self-distillation from the policy's own successes (arXiv 2601.20802): args is an SDPOConfig."""

    settings = SDPOConfig
    method, view_class = "sdpo", DistillationView

    def __init__(self, model: Any = None, reward_funcs: Any = None, args: Any = None, train_dataset: Any = None,
                 eval_dataset: Any = None, processing_class: Any = None, reward_processing_classes: Any = None,
                 callbacks: list[Any] | None = None, optimizers: Any = (None, None), peft_config: Any = None,
                 **others: Any) -> None:
        """The parameters are TRL's, in TRL's order; `others` are those of GRPOTrainer. ValueError without rewards."""
        if reward_funcs in (None, []):
            raise ValueError("reward_funcs is needed: the teacher is shown completions whose reward is at least "
                             "success_reward_threshold. Without rewards take SDFTTrainer or DistillationTrainer")
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class,
                         reward_processing_classes, callbacks, optimizers, None, peft_config, **others)


class SDFTTrainer(GRPOTrainer):
    """Self-distillation from worked solutions (arXiv 2601.19897): args is an SDFTConfig, and the rows have a column
    `privileged_context`, which the teacher reads in the prompt."""

    settings = SDFTConfig
    method, view_class = "sdft", DistillationView

    def __init__(self, model: Any = None, args: Any = None, train_dataset: Any = None, eval_dataset: Any = None,
                 processing_class: Any = None, callbacks: list[Any] | None = None, optimizers: Any = (None, None),
                 peft_config: Any = None, **others: Any) -> None:
        """The parameters are TRL's, in TRL's order; `others` are those of GRPOTrainer."""
        super().__init__(model, others.pop("reward_funcs", []), args, train_dataset, eval_dataset, processing_class,
                         None, callbacks, optimizers, None, peft_config, **others)
