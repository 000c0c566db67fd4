"""MLPs, norms and attention of known model families on our kernels: the same parameters under the same names.

Our module replaces transformers' own and has the same children. We change nothing of transformers, and modules that we
do not know stay as they are.
"""

from typing import Any

from torch import Tensor, nn

from lowmem_grpo.kernels.lora_mlp import ACTIVATIONS, lora_mlp
from lowmem_grpo.kernels.rms_norm import rms_norm
from lowmem_grpo.memory.families import FAMILIES, Norm
from lowmem_grpo.models.lean_attention import LeanAttention
from lowmem_grpo.models.lora_layers import JoinedWeights, base_of, loras_of

MLP_TILE = 4096  # tokens of a tile: large enough to fill a card's matrix units
# by transformers' class
MLPS = {row.mlp.kind: row.mlp for row in FAMILIES.values() if row.mlp.lean}
NORMS = {row.norm.kind: row.norm for row in FAMILIES.values() if row.norm.lean}
ATTENTIONS = {row.attention.kind: row.attention for row in FAMILIES.values() if row.attention.lean}
NAMES = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' to ours


class LeanMLP(nn.Module):
    """A gated MLP with the children of `mlp`. With `tile_rows`, only its input is kept for backward."""

    def __init__(self, mlp: nn.Module, inner: tuple[str, ...], activation: str, tile_rows: int | None) -> None:
        super().__init__()
        for name in (*inner, "down_proj"):
            self.add_module(name, mlp.get_submodule(name))
        self.inner, self.activation, self.tile_rows = inner, activation, tile_rows
        self.weights, self.down_weight = JoinedWeights(), JoinedWeights()
        self.biased = any(base_of(child).bias is not None for child in self.children())
        self.train(mlp.training)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        layers: list[Any] = [self.get_submodule(name) for name in self.inner]
        down: Any = self.down_proj
        loras = None if self.biased else loras_of(x, [*layers, down], self.weights)
        if loras is None:
            return self.plain(x, layers)
        gate, up = (*self.weights.of(layers), None)[:2]
        (down_weight,) = self.down_weight.of([down])
        return lora_mlp(
            x, gate, up, down_weight, gate_lora=loras[0], up_lora=loras[1] if len(layers) > 1 else None,
            down_lora=loras[-1], activation=self.activation, tile_rows=self.tile_rows,
        )

    def plain(self, x: Tensor, layers: list[Any]) -> Tensor:
        """The same, computed by the layers themselves, for what the kernel does not cover."""
        outputs = [layer(x) for layer in layers]
        gate, up = outputs if len(outputs) > 1 else outputs[0].chunk(2, dim=-1)
        result: Tensor = self.get_submodule("down_proj")(ACTIVATIONS[self.activation](gate) * up)
        return result


class LeanRMSNorm(nn.Module):
    """x / rms(x) * (offset + weight), with the weight of transformers' module. Only its input is kept for backward."""

    def __init__(self, weight: nn.Parameter, eps: float, form: Norm) -> None:
        super().__init__()
        self.weight, self.eps, self.form = weight, eps, form

    def forward(self, x: Tensor) -> Tensor:
        """x (..., D) -> (..., D)."""
        y = rms_norm(x, self.weight, self.eps, offset=self.form.offset, round_once=self.form.round_once)
        assert isinstance(y, Tensor)
        return y


def make_lean(model: Any, tile_rows: int | None) -> list[str]:
    """Replace modules of a transformers model with ours; returns the paths of those that were replaced."""
    config = model.config.get_text_config()
    activation = NAMES.get(str(getattr(config, "hidden_act", getattr(config, "hidden_activation", None))))
    replaced = []
    for path, module in list(model.named_modules()):
        new = lean_of(module, activation, tile_rows)
        if new is not None:
            model.set_submodule(path, new)
            replaced.append(path)
    return replaced


def lean_of(module: Any, activation: str | None, tile_rows: int | None) -> nn.Module | None:
    """Our module for one of transformers'; None where we do not know it."""
    kind = type(module).__name__
    if not type(module).__module__.startswith("transformers."):
        return None
    if kind in NORMS and hasattr(module, "weight"):  # Gemma 4 has some without
        return LeanRMSNorm(module.weight, getattr(module, NORMS[kind].eps), NORMS[kind])
    if kind in ATTENTIONS:
        return LeanAttention(module, ATTENTIONS[kind])
    if kind in MLPS and activation is not None:
        return LeanMLP(module, MLPS[kind].inner, activation, tile_rows)
    return None
