"""Attention modules of known model families on our kernels: q, k, v as one autograd node, and one launch for RoPE.

Our module replaces transformers' own and has the same children and attributes. The attention function itself is the one
in transformers' registry that the model's config names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from lowmem_grpo.kernels.rope import rope
from lowmem_grpo.memory.families import Attention
from lowmem_grpo.models.head_groups import without_waiting
from lowmem_grpo.models.lora_layers import JoinedWeights, one_node


class LeanAttention(nn.Module):
    """Attention with the children and attributes of `attention`, one of transformers' modules."""

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

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None, past_key_values: Any = None, **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """hidden_states (B, T, D) -> ((B, T, D), what the attention function returns beside its result)."""
        assert position_embeddings is not None
        inputs = (hidden_states, *position_embeddings, attention_mask, past_key_values, kwargs)
        if torch.is_grad_enabled() and getattr(kwargs.get("packed"), "head_groups", 1) > 1:
            result, weights = without_waiting(self, self.attended, *inputs)
        else:
            result, weights = self.attended(*inputs)
        return self.get_submodule("o_proj")(result.reshape(*hidden_states.shape[:-1], -1)), weights

    def attended(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, attention_mask: Tensor | None, past_key_values: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Any]:
        """Return the result of the attention function, (B, T, H, K), and something beside it."""
        q, k, v = self.heads(hidden_states)
        if not self.form.turns or getattr(self, self.form.turns):
            q, k = TURNS[self.form.position](q, k, cos.detach(), sin.detach())
        if self.form.stretched:
            q = q * self.stretch(kwargs["position_ids"]).to(q.dtype)
        query, key, value = (heads.transpose(1, 2) for heads in (q, k, v))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        result: tuple[Tensor, Any] = attention_function(self.config)(
            self, query, key, value, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, sliding_window=self.window, **kwargs,
        )
        return result

    @property
    def window(self) -> int | None:
        """The number of tokens that this layer looks back: its own number where it has one, otherwise the model's."""
        own: int | None = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        return own

    def heads(self, x: Tensor) -> list[Tensor]:
        """q (B, T, H, K), k and v (B, T, H_kv, K) of x (B, T, D)."""
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
        """(B, T, 1, 1) float32, by which queries grow: 1 + beta log(1 + floor(position / original context))."""
        settings = self.config.rope_parameters
        steps = torch.floor(position_ids / settings["original_max_position_embeddings"])
        grown: Tensor = 1 + settings["llama_4_scaling_beta"] * torch.log(1 + steps)
        return grown[:, :, None, None]


def take_place(ours: nn.Module, theirs: nn.Module) -> None:
    """Give our module the children, parameters and attributes of the one whose place it takes."""
    for name, child in theirs.named_children():
        ours.add_module(name, child)
    for name, parameter in theirs.named_parameters(recurse=False):
        ours.register_parameter(name, parameter)
    for name, value in vars(theirs).items():
        if not name.startswith("_"):
            setattr(ours, name, value)


def turn_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """RoPE of (B, T, H, K) that turns neighbours; cos and sin (B, T, R) hold the angles twice. Backward keeps those."""
    half = cos.shape[-1] // 2
    c, s = cos[:, :, None, :half], sin[:, :, None, :half]

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        pairs = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        return torch.cat((pairs, x[..., 2 * half :]), -1)

    return turned(q), turned(k)


TURNS: dict[str, Callable[..., tuple[Tensor, ...]]] = {"half": partial(rope, heads_first=False), "pairs": turn_pairs}


def attention_function(config: Any) -> Any:
    """The function of transformers' registry that the model's config names; ValueError where there is none."""
    name, registry = config._attn_implementation, AttentionInterface()
    if name not in registry:
        raise ValueError(f"attn_implementation is {name!r}, which transformers' registry of attention functions does "
                         f"not hold; call model.set_attn_implementation() with one of {sorted(registry)}")
    return registry[name]
