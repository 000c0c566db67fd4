"""`TrainedSet`: what is trained, LoRA factors and modules of which PEFT trains a copy (`modules_to_save`)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

COPY = re.compile(r"\.modules_to_save\.[^.]+")  # in the names of a copy's parameters, with the adapter's name
OF_ADAPTER = re.compile(rf"(\.lora_\w+)\.[^.]+|{COPY.pattern}")


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
        """The learning-rate group: the name of a module that is trained whole, such as "lm_head"; empty for LoRA."""
        return self.name.rpartition(".modules_to_save.")[0].rpartition(".")[2]

    @property
    def without_effect(self) -> Tensor:
        """A value with which the model computes as the base does."""
        if self.base is not None:
            return self.base
        return torch.zeros_like(self.parameter) if "lora_B" in self.name else self.parameter.detach()


class TrainedSet(tuple[TrainedWeight, ...]):
    """The trained parameters of a model, in the model's order."""

    @classmethod
    def of(cls, model: nn.Module) -> "TrainedSet":
        """Return the parameters that require gradients now."""
        names = ((name, COPY.sub(".original_module", name)) for name, p in model.named_parameters() if p.requires_grad)
        return cls(TrainedWeight(name, model.get_parameter(name), None if original == name else
                                 model.get_parameter(original).detach()) for name, original in names)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [weight.parameter for weight in self]

    def values(self) -> dict[str, Tensor]:
        """Return {name: parameter}, detached but not copied."""
        return {weight.name: weight.parameter.detach() for weight in self}

    def groups(self, rates: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
        """Return an optimizer's groups: the first has the optimizer's learning rate, and each of `rates` its own."""
        own = rates or {}
        others = [weight.parameter for weight in self if weight.group not in own]
        return [{"params": others}, *(
            {"params": [weight.parameter for weight in self if weight.group == name], "lr": rate, "name": name}
            for name, rate in own.items())]
