"""`TrainedSet`: what is trained, LoRA factors, modules of which PEFT trains a copy (`modules_to_save`), and rows of
embeddings (`trainable_token_indices`)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

COPY = re.compile(r"\.modules_to_save\.[^.]+")  # in the names of a copy's parameters, with the adapter's name
OF_ADAPTER = re.compile(rf"(\.lora_\w+|\.trainable_tokens_(?:delta|original))\.[^.]+|{COPY.pattern}")
MODULE = re.compile(r"(\w+)\.(modules_to_save|token_adapter)\.")


@dataclass(frozen=True, eq=False)
class TrainedWeight:
    """A trained parameter."""

    name: str  # in the model
    parameter: nn.Parameter
    base: Tensor | None  # its value in the base model; None for LoRA factors, which the base does not have

    @property
    def saved_name(self) -> str:
        """The name in the adapter's file."""
        return OF_ADAPTER.sub(r"\1", self.name)

    @property
    def group(self) -> str:
        """The learning-rate group: the name of a module such as "lm_head", or of that of trained rows; "" for LoRA and
        for a score head."""
        module = MODULE.search(self.name)
        return "" if module is None or module[1] == "score" else module[1]

    @property
    def without_effect(self) -> Tensor:
        """A value with which the model computes as the base does."""
        if self.base is not None:
            return self.base
        return torch.zeros_like(self.parameter) if "lora_B" in self.name else self.parameter.detach()


def base_value(model: nn.Module, name: str) -> Tensor | None:
    """Return the base model's value of a trained parameter; None for LoRA factors."""
    original = COPY.sub(".original_module", name).replace(".trainable_tokens_delta.", ".trainable_tokens_original.")
    path, _, last = original.rpartition(".")
    return None if original == name else getattr(model.get_submodule(path), last).detach()


def adapter_values(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return {name: parameter} of an adapter, trained or frozen; a tied parameter has several names."""
    return {name: parameter for name, parameter in model.named_parameters(remove_duplicate=False)
            if (part := OF_ADAPTER.search(name)) and part[0].endswith(f".{adapter}")}


class TrainedSet(tuple[TrainedWeight, ...]):
    """The trained parameters of a model, in the model's order."""

    @classmethod
    def of(cls, model: nn.Module) -> "TrainedSet":
        """Return the parameters that require gradients now."""
        return cls(TrainedWeight(name, parameter, base_value(model, name))
                   for name, parameter in model.named_parameters() if parameter.requires_grad)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [weight.parameter for weight in self]

    @property
    def modules(self) -> list[str]:
        """The names of the modules that are trained beside LoRA, or of whose rows some are; each name once."""
        return list(dict.fromkeys(weight.group for weight in self if weight.group))

    def values(self) -> dict[str, Tensor]:
        """Return {name: parameter}, detached but not copied."""
        return {weight.name: weight.parameter.detach() for weight in self}

    def groups(self, own: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return an optimizer's groups: the first with its usual settings, and one for each group in `own` settings."""
        others = [weight.parameter for weight in self if weight.group not in own]
        return [{"params": others}, *(
            {"params": [weight.parameter for weight in self if weight.group == name], "name": name, **settings}
            for name, settings in own.items())]
