"""Trainers whose teacher is the point, with TRL's constructors. They are `GRPOTrainer`s whose config has a teacher."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lowmem_grpo.config.distillation import DistillationConfig, SDFTConfig, SDPOConfig
from lowmem_grpo.runs.listeners import TEACHER_EVENTS
from lowmem_grpo.runs.views.live import DistillationView
from lowmem_grpo.trainer.grpo import GRPOTrainer
from lowmem_grpo.types import RolloutGroup


class TeacherTrainer(GRPOTrainer):
    """What TRL's trainers with a teacher have beside GRPO's: the attribute `teacher_model`, and hooks of callbacks."""

    @property
    def teacher_model(self) -> Any:
        """The model that computes what the teacher says: the trained one, unless the teacher is another model."""
        other = getattr(self.teaching.teacher, "other", None)
        return self.model if other is None else other.model

    def rollout(self) -> list[RolloutGroup]:
        groups = super().rollout()
        steps = self.args.steps_per_generation or self.args.gradient_accumulation_steps
        self.tell(TEACHER_EVENTS[0], generate_every=steps * self.args.num_iterations, steps_per_generation=steps)
        return groups

    def read_by_teacher(self, groups: list[RolloutGroup]) -> dict[str, float]:
        """Also call the hooks with what the teacher reads: tensors of R rollouts, padded as in TRL."""
        metrics = super().read_by_teacher(groups)
        pairs = [(group.prompt_ids, rollout) for group in groups for rollout in group.rollouts]
        if pairs and any(hasattr(one, hook) for one in self.callbacks.callbacks for hook in TEACHER_EVENTS[1:]):
            prompts, _ = self.padded([prompt for prompt, _ in pairs], "left")
            read, read_mask = self.padded([rollout.teacher_prompt or prompt for prompt, rollout in pairs], "left")
            completions, mask = self.padded([rollout.completion_ids for _, rollout in pairs], "right")
            taught = torch.stack([rollout.fields["teacher_mask"].max() for _, rollout in pairs])
            for event in TEACHER_EVENTS[1:]:
                self.tell(event, prompt_ids=prompts, completion_ids=completions, completion_mask=mask,
                          teacher_input_ids=torch.cat([read, completions], 1), self_distillation_mask=taught,
                          teacher_attention_mask=torch.cat([read_mask, mask], 1))
        return metrics

    def padded(self, rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
        """Return rows of token ids as one tensor (R, T), and its mask (R, T)."""
        ids = [torch.tensor(row) for row in rows]
        return (pad_sequence(ids, True, self.tokenizer.pad_token_id, side),
                pad_sequence([torch.ones_like(row) for row in ids], True, 0, side))

    def tell(self, event: str, **payload: Any) -> None:
        """Call the callbacks' hook as TRL does: all arguments have names."""
        for hook in (getattr(listener, event, None) for listener in self.callbacks.callbacks):
            if hook is not None:
                hook(args=self.args, state=self.state, control=self.control, model=self.model,
                     processing_class=self.tokenizer, **payload)


class DistillationTrainer(TeacherTrainer):
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
        given = given or [name for name in [getattr(args, "teacher_model_name_or_path", None)] if name is not None]
        super().__init__(model, others.pop("reward_funcs", None), args, train_dataset, eval_dataset, processing_class,
                         None, callbacks, optimizers, quantization_config, peft_config, tools,
                         teacher=given[0] if given else None, **others)


class SDPOTrainer(TeacherTrainer):
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
                         reward_processing_classes, callbacks, optimizers, None, peft_config,
                         teacher=others.pop("teacher", kind_in(others, args)), **others)


class SDFTTrainer(TeacherTrainer):
    """Self-distillation from worked solutions (arXiv 2601.19897): args is an SDFTConfig, and the rows have a column
    `privileged_context`, which the teacher reads in the prompt."""

    settings = SDFTConfig
    method, view_class = "sdft", DistillationView

    def __init__(self, model: Any = None, args: Any = None, train_dataset: Any = None, eval_dataset: Any = None,
                 processing_class: Any = None, callbacks: list[Any] | None = None, optimizers: Any = (None, None),
                 peft_config: Any = None, **others: Any) -> None:
        """The parameters are TRL's, in TRL's order; `others` are those of GRPOTrainer."""
        super().__init__(model, others.pop("reward_funcs", []), args, train_dataset, eval_dataset, processing_class,
                         None, callbacks, optimizers, None, peft_config,
                         teacher=others.pop("teacher", kind_in(others, args)), **others)


def kind_in(others: dict[str, Any], args: Any) -> str | None:
    """Return TRL's `teacher_model_kind`, which is a keyword or a setting; None if it is neither."""
    kind: str | None = others.get("teacher_model_kind", getattr(args, "teacher_model_kind", None))
    return kind
