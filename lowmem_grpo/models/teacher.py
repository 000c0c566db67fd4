"""Teachers of a distillation that compute here: the policy's model with other adapter values, or another model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from lowmem_grpo.config.teacher import BASE, EMA
from lowmem_grpo.models.policy import Policy, evaluating, in_float32
from lowmem_grpo.runs.adapter_file import check_finite, read_all
from lowmem_grpo.runs.checkpoint import check_adapter, check_scaling
from lowmem_grpo.runs.checkpoint_state import ADAPTER, adapter_tensors
from lowmem_grpo.runs.saved_adapter import AdapterError, MismatchError, adapter_settings, check_base


class Teacher:
    """A teacher of the policy `student`. It computes without dropout, and nobody asks it for a gradient."""

    def __init__(self, kind: str, student: Policy, adapter: dict[str, Tensor] | None = None,
                 other: Policy | None = None) -> None:
        """`kind` is "base", "ema" or "live", or names what computes: an `adapter` on the policy's base model, or an
        `other` model. The average of kind "ema" starts as the policy's adapter."""
        self.kind, self.student, self.adapter, self.other = kind, student, adapter, other
        if kind == EMA:
            student.teacher_adapter = {weight.name: in_float32(weight.parameter.detach())
                                       for weight in student.trained}

    @contextmanager
    def reading(self, _: Any = None) -> Iterator[Policy]:
        """Give the policy that computes the teacher's outputs in this context: the `under` of a `TokenField`."""
        student = self.student
        if self.other is not None:
            with evaluating(self.other.model):
                yield self.other
            return
        adapter = student.teacher_adapter if self.kind == EMA else self.adapter
        with evaluating(student.model):
            if adapter is not None:
                with student.wearing(adapter):
                    yield student
            elif self.kind == BASE:
                with student.base_model():
                    yield student
            else:
                yield student

    def policy_of_head(self, whole: bool) -> Policy:
        """Return the policy whose head turns the teacher's hidden states into log-probabilities. If the student's head
        is trained, and the `whole` of it is compared, it has a copy of the head with which the teacher reads now."""
        if self.other is not None or not (whole and self.student.head.is_trained):
            return self.other or self.student
        other = copy(self.student)
        with self.reading():
            other.head = other.head.frozen_copy()
        return other

    def follow(self, rate: float) -> None:
        """Move a teacher of kind "ema" toward the policy: rate * policy + (1 - rate) * teacher, weight by weight."""
        if self.kind == EMA and self.student.teacher_adapter is not None:
            self.student.move(self.student.teacher_adapter, rate)


def weight_bytes(model: Any) -> int:
    """Return the bytes of a model's weights, with the scales of those in 4 bits."""
    tensors = [*model.parameters(), *model.buffers()]
    states = [state for tensor in tensors if (state := getattr(tensor, "quant_state", None)) is not None]
    return sum(tensor.nbytes for tensor in (*tensors, *(state.absmax for state in states)))


def adapter_of(folder: Path, student: Policy, loaded: Any) -> dict[str, Tensor]:
    """Return the values of a saved adapter for the policy's trained parameters. AdapterError unless it is of the same
    base model, rank, scale and layers; `loaded` says the policy's base model."""
    check_base(folder, loaded.name, loaded.revision, loaded.sha256)
    _, tensors, _ = read_all(folder)
    model: Any = student.model
    held = adapter_tensors(model)
    wide = {name: tensor.to(held[name].dtype) if name in held and held[name].shape == tensor.shape else tensor
            for name, tensor in tensors.items()}
    try:
        check_adapter(folder, wide, held)
        check_scaling(adapter_settings(folder), model.peft_config[ADAPTER], folder)
    except MismatchError as error:
        raise AdapterError(f"the teacher's adapter does not fit the student's: {error}. Both are on one base model, so "
                           "they need equal settings: put LoRA on the student with the teacher's r, lora_alpha and "
                           "target_modules, or give a merged model as the teacher") from error
    check_finite(folder, wide)
    return {weight.name: wide[weight.saved_name] for weight in student.trained}
