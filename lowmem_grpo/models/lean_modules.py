"""Layers, MLPs, norms and attention of known families on our kernels, with the same parameters and names.

Each of our modules replaces transformers' own and has the same children; unknown modules stay. Attention computes q, k
and v in one autograd node and RoPE in one launch.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from lowmem_grpo.kernels.glu import activate_ref
from lowmem_grpo.kernels.lora_mlp import lora_mlp
from lowmem_grpo.kernels.rms_norm import rms_norm
from lowmem_grpo.kernels.rope import rope
from lowmem_grpo.memory.families import FAMILIES, Attention, Norm
from lowmem_grpo.models.head_groups import without_waiting
from lowmem_grpo.models.lora_layers import JoinedWeights, base_of, loras_of, one_node

MLP_TILE = 4096  # tokens of a tile: enough to fill a GPU's tensor cores
# The rows of families, by the name of transformers' class
MLPS = {row.mlp.kind: row.mlp for row in FAMILIES.values() if row.mlp.lean}
NORMS = {row.norm.kind: row.norm for row in FAMILIES.values() if row.norm.lean}
ATTENTIONS = {row.attention.kind: row.attention for row in FAMILIES.values() if row.attention.lean}
LAYERS = {row.layer for row in FAMILIES.values() if row.layer}
NAMES = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}  # transformers' to ours


class LeanAttention(nn.Module):
    """Attention that takes over the children and attributes of `attention`, transformers' module."""

    config: Any
    layer_idx: int
    head_dim: int
    num_key_value_groups: int
    scaling: float
    attention_dropout: float

    def __init__(self, attention: nn.Module, form: Attention) -> None:
        super().__init__()
        take_place(self, attention)
        self.form, self.weights = form, JoinedWeights()

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None,
                attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any) -> tuple[Tensor, Any]:
        """Map hidden_states (B, T, D) to ((B, T, D), the attention function's second output)."""
        assert position_embeddings is not None
        inputs = (hidden_states, *position_embeddings, attention_mask, past_key_values, kwargs)
        if torch.is_grad_enabled() and getattr(kwargs.get("packed"), "head_groups", 1) > 1:
            result, weights = without_waiting(self, self.attended, *inputs)
        else:
            result, weights = self.attended(*inputs)
        return self.get_submodule("o_proj")(result.reshape(*hidden_states.shape[:-1], -1)), weights

    def attended(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None,
                 past_key_values: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Return the attention function's two outputs: the result (B, T, H, K), and attention weights or None."""
        q, k, v = self.heads(hidden_states)
        if not self.form.turns or getattr(self, self.form.turns):
            q, k = TURNS[self.form.position](q, k, cos.detach(), sin.detach())
        if self.form.stretched:
            q = q * self.stretch(kwargs["position_ids"]).to(q.dtype)
        query, key, value = (heads.transpose(1, 2) for heads in (q, k, v))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        if (sinks := getattr(self, "sinks", None)) is not None:
            kwargs = kwargs | {"s_aux": sinks}
        result: tuple[Tensor, Any] = attention_function(self.config)(
            self, query, key, value, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, sliding_window=window, **kwargs,
        )
        return result

    def heads(self, x: Tensor) -> list[Tensor]:
        """Return q (B, T, H, K), k and v (B, T, H_kv, K) for x (B, T, D)."""
        layers = [self.get_submodule(name) for name in self.form.inner]
        parts = one_node(x, layers, self.weights)
        if len(parts) == 1:
            queries = self.config.num_attention_heads * self.head_dim
            keys = queries // self.num_key_value_groups
            parts = parts[0].split((queries, keys, keys), -1)
        q, k, v = parts
        if self.form.norm == "whole":
            q, k = self.get_submodule("q_norm")(q), self.get_submodule("k_norm")(k)
        q, k, v = (part.view(*x.shape[:-1], -1, self.head_dim) for part in (q, k, v))
        if self.form.norm == "heads":
            q, k = self.get_submodule("q_norm")(q), self.get_submodule("k_norm")(k)
        return [q, k, v]

    def stretch(self, position_ids: Tensor) -> Tensor:
        """Return the queries' factor (B, T, 1, 1) float32: 1 + beta log(1 + floor(position / original context))."""
        settings = self.config.rope_parameters
        steps = torch.floor(position_ids / settings["original_max_position_embeddings"])
        grown: Tensor = 1 + settings["llama_4_scaling_beta"] * torch.log(1 + steps)
        return grown[:, :, None, None]


def take_place(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy the children, parameters and public attributes of the replaced module to ours."""
    for name, child in theirs.named_children():
        ours.add_module(name, child)
    for name, parameter in theirs.named_parameters(recurse=False):
        ours.register_parameter(name, parameter)
    for name, value in vars(theirs).items():
        if not name.startswith("_"):
            setattr(ours, name, value)


def turn_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Apply RoPE to q and k (B, T, H, K), on neighbouring pairs. cos and sin (B, T, R) hold each angle twice."""
    half = cos.shape[-1] // 2
    c, s = cos[:, :, None, :half], sin[:, :, None, :half]

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        pairs = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        return torch.cat((pairs, x[..., 2 * half :]), -1)

    return turned(q), turned(k)


def turn_once(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Apply RoPE to q and k (B, T, H, K), on halves. cos and sin (B, T, R / 2) hold each angle once."""
    return rope(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), heads_first=False)


TURNS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "half": partial(rope, heads_first=False), "pairs": turn_pairs, "once": turn_once}


def attention_function(config: Any) -> Any:
    """Return the attention function that the config names in transformers' registry; ValueError without it."""
    name, registry = config._attn_implementation, AttentionInterface()
    if name not in registry:
        raise ValueError(f"attn_implementation is {name!r}, which transformers' registry of attention functions does "
                         f"not hold; call model.set_attn_implementation() with one of {sorted(registry)}")
    return registry[name]


class LeanMLP(nn.Module):
    """A gated MLP with the children of `mlp`. With `tile_rows`, it runs in tiles and saves only its input."""

    def __init__(self, mlp: nn.Module, inner: tuple[str, ...], activation: str, tile_rows: int | None) -> None:
        super().__init__()
        for name in (*inner, "down_proj"):
            self.add_module(name, mlp.get_submodule(name))
        self.inner, self.activation, self.tile_rows = inner, activation, tile_rows
        self.weights, self.down_weight = JoinedWeights(), JoinedWeights()
        self.biased = any(base_of(child).bias is not None for child in self.children())
        self.training = mlp.training

    def forward(self, x: Tensor) -> Tensor:
        layers: list[Any] = [self.get_submodule(name) for name in self.inner]
        down: Any = self.down_proj
        loras = None if self.biased else loras_of(x, [*layers, down], self.weights)
        if loras is None:  # the kernel does not cover this case
            outputs = [layer(x) for layer in layers]
            gate, up = outputs if len(outputs) > 1 else outputs[0].chunk(2, dim=-1)
            result: Tensor = down(activate_ref(gate, self.activation) * up)
            return result
        gate, up = (*self.weights.join(layers), None)[:2]
        (down_weight,) = self.down_weight.join([down])
        return lora_mlp(
            x, gate, up, down_weight, gate_lora=loras[0], up_lora=loras[1] if len(layers) > 1 else None,
            down_lora=loras[-1], activation=self.activation, tile_rows=self.tile_rows,
        )


class LeanLayer(GradientCheckpointingLayer):
    """A decoder layer that takes over the children of `layer`. Each norm also adds: in forward the residual, and in
    backward the gradients of its input, which would take launches of their own. Make it with `lean_layer`."""

    def __init__(self, layer: nn.Module) -> None:
        nn.Module.__init__(self)  # transformers' class would make children of its own
        take_place(self, layer)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Map hidden states (B, T, D) to those of the next layer."""
        x, residual = self.get_submodule("input_layernorm")(hidden_states, with_sum=True)
        attended, _ = self.get_submodule("self_attn")(hidden_states=x, **kwargs)
        x, residual = self.get_submodule("post_attention_layernorm")(attended, residual, with_sum=True)
        result: Tensor = residual + self.get_submodule("mlp")(x)
        return result


@cache
def lean_layer(kind: Any) -> Any:
    """Return our layer as a subclass of transformers' `kind`, by which hidden states are recorded."""
    return type(f"Lean{kind.__name__}", (LeanLayer, kind), {})


class LeanRMSNorm(nn.Module):
    """The norm x / rms(x) * (offset + weight), with the weight of transformers' module."""

    def __init__(self, weight: nn.Parameter, eps: float, form: Norm) -> None:
        super().__init__()
        self.weight, self.eps, self.form = weight, eps, form

    def forward(self, x: Tensor, residual: Tensor | None = None, with_sum: bool = False) -> Any:
        """Return the norm y of h = x, or residual + x; with `with_sum`, the pair (y, h)."""
        if residual is not None and residual.dtype != x.dtype:  # in mixed precision
            x, residual = residual + x, None
        return rms_norm(x, self.weight, self.eps, residual=residual, offset=self.form.offset,
                        round_once=self.form.round_once, with_sum=with_sum)


def make_lean(model: Any, tile_rows: int | None) -> None:
    """Replace modules of a transformers model by ours."""
    config = model.config.get_text_config()
    activation = NAMES.get(str(getattr(config, "hidden_act", getattr(config, "hidden_activation", None))))
    for path, module in list(model.named_modules()):
        kind = type(module).__name__
        if ".visual." in path or not type(module).__module__.startswith("transformers."):
            continue
        if kind in NORMS and hasattr(module, "weight"):  # Gemma 4 has some without
            norm = LeanRMSNorm(module.weight, getattr(module, NORMS[kind].eps), NORMS[kind])
            norm.training = module.training
            model.set_submodule(path, norm)
        elif kind in LAYERS:  # its children follow
            theirs: Any = type(module)
            layer = lean_layer(theirs)(module)
            layer.training = module.training
            model.set_submodule(path, layer)
        elif kind in ATTENTIONS:
            model.set_submodule(path, LeanAttention(module, ATTENTIONS[kind]))
        elif kind in MLPS and activation is not None:
            model.set_submodule(path, LeanMLP(module, MLPS[kind].inner, activation, tile_rows))


def check_tile(mlp_tile: int | None, checkpointing: bool | str) -> int | None:
    """Return the MLP's tokens per tile, None for no tiles. ValueError for a tile below 1 or without checkpointing."""
    if mlp_tile is None:
        return MLP_TILE if checkpointing else None
    if mlp_tile < 1:
        raise ValueError(f"mlp_tile is {mlp_tile}; it must be at least 1")
    if not checkpointing:
        raise ValueError(f"mlp_tile is {mlp_tile} and use_gradient_checkpointing=False: tiles are computed again in "
                         "backward, and that is checkpointing. Leave one of them out")
    return mlp_tile
