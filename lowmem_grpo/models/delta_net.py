"""Gated delta-net layers of hybrid models: on packed sequences, on a growing cache, and on plain rows.

Our module replaces transformers' own and has the same children, parameters and attributes. It computes

    packed   one row of T tokens. Each prompt is run once from a state of zeros, and each of its completions from the
             prompt's last state, so that the gradients of all completions flow into it.
    cached   rows that continue from the states in a cache. Tokens for which `real` is False (padding, finished rows)
             leave the state as it is.
    other    rows from a state of zeros, with or without a padding mask.

The state consists of the delta rule's state (kernels/delta_rule.py) and the last inputs of the convolution before it.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowmem_grpo.kernels.delta_rule import causal_conv, delta_rule, delta_step, describe_kernels
from lowmem_grpo.kernels.varlen import VarlenSequences
from lowmem_grpo.memory.families import DELTA_IN, DELTA_OUT, FAMILIES
from lowmem_grpo.models.lean_modules import take_place
from lowmem_grpo.models.lora_layers import JoinedWeights, one_node
from lowmem_grpo.models.packed_attention import PackedLayout

logger = logging.getLogger(__name__)
KINDS = {row.delta_net for row in FAMILIES.values() if row.delta_net}  # transformers' classes


@dataclass(frozen=True)
class RuleInputs:
    """The delta rule's inputs for T packed tokens: the convolution's input, log decay and update rate."""

    mixed: Tensor  # (T, C) query, key and value
    g: Tensor  # (T, H) float32
    beta: Tensor  # (T, H) float32

    def at(self, tokens: Tensor | slice) -> "RuleInputs":
        return RuleInputs(self.mixed[tokens], self.g[tokens], self.beta[tokens])


@dataclass(frozen=True)
class Stages:
    """Packed tokens in two stages: prompts, which start from zero states, and completions, which continue a prompt."""

    prompts: VarlenSequences
    completions: VarlenSequences
    counts: tuple[int, ...]  # completions of each prompt
    order: Tensor | None  # (T,) int64, the packed tokens by stage; None if they are already in this order
    back: Tensor | None  # the inverse permutation

    @classmethod
    def from_layout(cls, layout: PackedLayout, device: torch.device) -> "Stages":
        """Return the stages of a packed micro-batch: the tokens of all prompts, then those of all completions."""
        lengths = [length for prompt in layout.prompts for length in prompt]
        tokens = torch.arange(sum(lengths)).split(lengths)
        stages = [int(place > 0) for prompt in layout.prompts for place in range(len(prompt))]  # 0: a prompt
        first, later = ([place for place, other in enumerate(stages) if other == stage] for stage in (0, 1))
        order = torch.cat([tokens[place] for place in (*first, *later)])
        same = stages == sorted(stages)
        return cls(
            VarlenSequences(tuple(lengths[place] for place in first), device),
            VarlenSequences(tuple(lengths[place] for place in later), device),
            tuple(len(prompt) - 1 for prompt in layout.prompts),
            None if same else order.to(device), None if same else order.argsort().to(device),
        )


class DeltaNet(nn.Module):
    """A gated delta net that takes over the children, parameters and attributes of `net`, transformers' module."""

    layer_idx: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        take_place(self, net)
        self.weights = JoinedWeights()

    def forward(self, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None,
                packed: PackedLayout | None = None, real: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Map (B, T, D) to (B, T, D). The states ignore tokens whose `real` (else `attention_mask`) is False."""
        rows, count, _ = hidden_states.shape
        mixed, z, b, a = one_node(hidden_states, [self.get_submodule(name) for name in DELTA_IN], self.weights)
        a, b, log, bias = (tensor.to(torch.promote_types(tensor.dtype, torch.float32))  # float64 stays in float64
                           for tensor in (a, b, self.A_log, self.dt_bias))
        g = -log.exp() * F.softplus(a + bias)
        inputs = RuleInputs(mixed.flatten(0, 1), g.flatten(0, 1), b.sigmoid().flatten(0, 1))
        if packed is not None:
            packed.calls += 1
            result = self.packed(inputs, packed)
        else:
            real = attention_mask.bool() if real is None and attention_mask is not None else real
            result = self.rows(inputs, rows, cache_params, None if real is None else real[:, -count:])
        z = z.reshape(-1, self.head_v_dim)
        normed = self.get_submodule("norm")(result.reshape(-1, self.head_v_dim), z)
        output: Tensor = self.get_submodule(DELTA_OUT)(normed.view(rows, count, self.value_dim))
        return output

    def packed(self, inputs: RuleInputs, layout: PackedLayout) -> Tensor:
        """Return the rule's output (T, H, V) for a packed micro-batch."""
        if layout.stages is None:
            layout.stages = Stages.from_layout(layout, inputs.g.device)
        stages: Stages = layout.stages
        if stages.order is not None:
            inputs = inputs.at(stages.order)
        count = stages.prompts.tokens
        prompts, *states = self.run(inputs.at(slice(0, count)), stages.prompts)
        shared = [repeated(state, stages.counts) for state in states]
        completions, *_ = self.run(inputs.at(slice(count, None)), stages.completions, *shared)
        result = torch.cat([prompts, completions])
        return result if stages.back is None else result.index_select(0, stages.back)

    def rows(self, inputs: RuleInputs, rows: int, cache: Any, real: Tensor | None) -> Tensor:
        """Return the output (B T, H, V) for B rows. With a cache, they continue from its states and update them."""
        count = len(inputs.g) // rows
        before = self.states(cache) if cache is not None and cache.has_previous_state(self.layer_idx, 0) else None
        if real is not None:
            shown = real.reshape(-1, 1)
            inputs = RuleInputs(torch.where(shown, inputs.mixed, 0), torch.where(shown, inputs.g, 0),
                                torch.where(shown, inputs.beta, 0))
        runs = VarlenSequences((count,) * rows, inputs.g.device)
        result, _, state = self.run(inputs, runs, *(before or (None, None)))
        if cache is not None:
            cache.update_conv_state(inputs.mixed.unflatten(0, (rows, count)).mT, self.layer_idx, real=real,
                                    conv_kernel_size=self.conv_weight.shape[1])
            cache.update_recurrent_state(state, self.layer_idx, real=real)
        return result

    def states(self, cache: Any) -> tuple[Tensor, Tensor]:
        """Return the cached last inputs (B, W - 1, C) of the convolution and the rule's states (B, H, K, V)."""
        layer = cache.layers[self.layer_idx]
        return layer.conv_states[0][..., 1 - self.conv_weight.shape[1] :].mT, layer.recurrent_states[0]

    def run(self, inputs: RuleInputs, runs: VarlenSequences, conv: Tensor | None = None, state: Tensor | None = None
            ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (T, H, V) for packed sequences, and the final states of the convolution and of the rule.
        `conv` and `state` are the initial ones; None means zeros."""
        mixed, conv = causal_conv(inputs.mixed, self.conv_weight, runs, conv)
        query, key, value = mixed.split((self.key_dim, self.key_dim, self.value_dim), -1)
        heads = query.unflatten(-1, (-1, self.head_k_dim)), key.unflatten(-1, (-1, self.head_k_dim))
        value = value.unflatten(-1, (-1, self.head_v_dim))
        recorded = torch.is_grad_enabled() and (value.requires_grad or getattr(state, "requires_grad", False))
        if state is not None and len(inputs.g) == len(runs.lengths) == sum(runs.lengths) and not recorded:
            result, state = delta_step(*heads, value, inputs.g, inputs.beta, state)
        else:
            result, state = delta_rule(*heads, value, inputs.g, inputs.beta, runs, state)
        return result, conv, state

    @property
    def conv_weight(self) -> Tensor:
        """The convolution's weight (C, W)."""
        weight: Tensor = self.get_submodule("conv1d").weight  # type: ignore[assignment]
        return weight[:, 0]


def repeated(states: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Repeat the states (P, ...) of prompts for each completion, whose gradients are summed in a fixed order."""
    rows = zip(states.split(1), counts, strict=True)
    return torch.cat([row.expand(count, *row.shape[1:]) for row, count in rows])


def use_delta_nets(model: nn.Module) -> None:
    """Replace transformers' gated delta nets by our modules."""
    nets = {path: DeltaNet(module) for path, module in model.named_modules()
            if type(module).__name__ in KINDS and type(module).__module__.startswith("transformers.")}
    for path, net in nets.items():
        model.set_submodule(path, net)
    if nets:
        logger.info("%d gated delta-net layers compute with %s", len(nets),
                    describe_kernels(next(iter(nets.values())).conv_weight))
