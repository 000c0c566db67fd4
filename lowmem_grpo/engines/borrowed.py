"""The trainer's linear layers as another engine computes with them: on the same tensors, as they are at each call.

An engine's layer may stand for several modules of the trainer side by side (qkv_proj for q_proj, k_proj, v_proj). Its
output is the concatenation of theirs, LoRA and biases included, by one product where their weights are adjacent.

Everything goes through one opaque op, so that an engine's compiler and CUDA graphs pass over it; the op finds its layer
by name. A captured graph keeps the addresses of tensors and what Python decided while it was captured. So the op
decides nothing: it always applies the same tensors, and a `Switch` on the device turns the adapter off.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_grpo.engines.adjacent import joined, joined_weights
from lowmem_grpo.kernels.lora import FrozenWeight, LoRA, frozen_weight
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.nf4_linear import nf4_linear, project
from lowmem_grpo.kernels.opaque import opaque

LAYERS: dict[str, "BorrowedLinear"] = {}  # what the op finds by name, while an engine lives
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ADVICE = "Close the engine before moving, merging, quantizing or reloading the model, and make a new one"
OTHER_ENGINE = 'Sample with fast_inference="transformers"'


class BorrowError(ValueError):
    """The trainer's model and the engine's do not map onto each other, or no longer do."""


class Switch:
    """Strengths of adapters by their scale: that scale, or 0 for the base model; on the device, as graphs need it."""

    def __init__(self, device: torch.device, scales: Iterable[float]) -> None:
        self.strengths = {scale: torch.tensor(scale, dtype=torch.float32, device=device) for scale in scales}

    def set(self, on: bool) -> None:
        for scale, strength in self.strengths.items():
            strength.fill_(scale if on else 0.0)


class Product:
    """Adjacent matrices, or a single one: x (N, in) -> (N, sum of out), biases and LoRA included."""

    def __init__(
        self, weight: FrozenWeight, features: list[int], biases: list[Tensor | None], loras: list[LoRA | None],
        switch: Switch,
    ) -> None:
        self.weight, self.biases, self.loras = weight, biases, loras
        self.strengths = [None if lora is None else switch.strengths[lora.scale] for lora in loras]
        ends = list(accumulate(features))
        self.rows = [slice(end - size, end) for size, end in zip(features, ends, strict=True)]
        self.present = [lora for lora in loras if lora is not None]
        self.stack_a = joined([lora.a for lora in self.present]) if self.present else None
        self.stack_b = joined([lora.b for lora in loras if lora is not None]) if None not in loras else None
        kinds = {(lora.a.shape[0], lora.scale) for lora in self.present}
        self.one_kernel = isinstance(weight, NF4Weight) and len(kinds) < 2

    def forward(self, x: Tensor) -> Tensor:
        if self.one_kernel:
            return self.forward_nf4(x)
        y = project(x, self.weight, self.bias(x))
        if not self.present:
            return y
        a = torch.cat([lora.a.to(x.dtype) for lora in self.present]) if self.stack_a is None else self.stack_a
        lows = iter((x @ a.to(x.dtype).T).split([lora.a.shape[0] for lora in self.present], dim=1))
        for rows, lora, strength in zip(self.rows, self.loras, self.strengths, strict=True):
            if lora is not None:
                y[:, rows].addmm_(next(lows) * strength, lora.b.to(x.dtype).T)
        return y

    def forward_nf4(self, x: Tensor) -> Tensor:
        """Everything in one kernel, where there is one."""
        strength: Any = next((strength for strength in self.strengths if strength is not None), None)
        if strength is None:
            return nf4_linear(x, self.weight, bias=self.bias(x))
        if self.stack_a is not None and self.stack_b is not None:
            return nf4_linear(x, self.weight, self.stack_a, self.stack_b, strength, self.bias(x))
        factors = [(None, None) if lora is None else (lora.a, lora.b) for lora in self.loras]
        a, b = ([pair[number] for pair in factors] for number in (0, 1))
        return nf4_linear(x, self.weight, a, b, strength, self.bias(x))

    def bias(self, x: Tensor) -> Tensor | None:
        """(sum of out,) in x.dtype, zeros for a matrix without one; None where none has one."""
        if all(bias is None for bias in self.biases):
            return None
        sizes = [rows.stop - rows.start for rows in self.rows]
        parts = [x.new_zeros(size) if bias is None else bias.to(x.dtype)
                 for bias, size in zip(self.biases, sizes, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass
class BorrowedLinear:
    """Linear modules of the trainer (plain or 4-bit) on one input, with the LoRA tensors that are sampled with."""

    name: str  # the engine's name of the layer
    modules: dict[str, nn.Module]  # of the trainer, by their path
    loras: list[LoRA | None]
    switch: Switch
    products: list[Product] = field(init=False)
    held: list[Tensor] = field(init=False)  # what was borrowed: while it is held, its addresses are nobody else's

    def __post_init__(self) -> None:
        weights = [weight_of(path, module) for path, module in self.modules.items()]
        self.shapes = [weight.shape for weight in weights]
        self.products = self.make_products(weights)
        self.held = [tensor.detach() for tensor in self.tensors()]
        LAYERS[self.name] = self

    def make_products(self, weights: Sequence[FrozenWeight]) -> list[Product]:
        """One where all weights are adjacent, else one for each."""
        features = [weight.shape[0] for weight in weights]
        biases = [base_of(module).bias for module in self.modules.values()]
        whole = joined_weights(weights) if len(weights) > 1 else None
        if whole is not None:
            return [Product(whole, features, biases, self.loras, self.switch)]
        parts = zip(weights, features, biases, self.loras, strict=True)
        return [Product(weight, [size], [bias], [lora], self.switch) for weight, size, bias, lora in parts]

    @property
    def out_features(self) -> int:
        return sum(shape[0] for shape in self.shapes)

    def tensors(self) -> list[Tensor]:
        """Every tensor of the trainer that the products read, adapters aside."""
        found = []
        for path, module in self.modules.items():
            weight, bias = weight_of(path, module), base_of(module).bias
            found += [weight] if isinstance(weight, Tensor) else [part for part in weight.tensors if part is not None]
            found += [] if bias is None else [bias]
        return found

    def check(self) -> None:
        """Raise BorrowError where a tensor has been moved, replaced or merged since."""
        if any(getattr(module, "merged", False) for module in self.modules.values()):
            raise BorrowError(f"{self.name}: the adapter was merged into the weights while an engine samples with "
                              f"them. {ADVICE}")
        same_tensors(self.name, self.held, self.tensors())

    def forward(self, x: Tensor) -> Tensor:
        """(N, in) -> (N, sum of out)."""
        outputs = [product.forward(x) for product in self.products]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def close(self) -> None:
        """Let go of the trainer's tensors, whoever still holds this."""
        if LAYERS.get(self.name) is self:
            del LAYERS[self.name]
        self.modules, self.loras, self.products, self.held = {}, [], [], []


def base_of(module: Any) -> Any:
    """The linear layer under peft's wrapper, or the module itself."""
    return getattr(module, "base_layer", module)


def weight_of(path: str, module: Any) -> FrozenWeight:
    """The frozen weight of a linear module; BorrowError where it is of no kind that can be computed with."""
    base = base_of(module)
    if not isinstance(base, nn.Linear):
        raise BorrowError(f"{path} is a {type(base).__name__}; expected a torch.nn.Linear or one of bitsandbytes. "
                          f"{OTHER_ENGINE}")
    try:
        found = frozen_weight(base.weight)
    except ValueError as error:
        raise BorrowError(f"{path}: {error}. {ADVICE}") from error
    if found.dtype not in DTYPES:
        raise BorrowError(f"{path} has weights of {found.dtype}; expected one of {DTYPES} or 4 bits of bitsandbytes. "
                          f"{OTHER_ENGINE}")
    return found.detach() if isinstance(found, Tensor) else found


def same_tensors(name: str, held: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Raise BorrowError where the tensors that are there now are not those that were borrowed."""
    places = [[(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors] for tensors in (held, found)]
    if places[0] != places[1]:
        raise BorrowError(
            f"{name}: the trainer's tensors were moved or replaced while an engine samples with them. {ADVICE}"
        )


def linear_by_name(x: Tensor, out_features: int, layer: str) -> Tensor:
    """x (..., in) -> (..., out_features) by the trainer's modules of `layer`."""
    with torch.no_grad():
        return LAYERS[layer].forward(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], out_features)


borrowed_linear = opaque(
    "borrowed_linear", linear_by_name, fake=lambda x, out_features, _: x.new_empty(*x.shape[:-1], out_features)
)
