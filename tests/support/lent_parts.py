"""Small layers of both sides of a loan, and what they should give."""

from typing import Any

import torch
from card import CPU
from torch import Tensor

from lowmem_grpo.engines.vllm.lent_adapter import AdapterCopy
from lowmem_grpo.engines.vllm.lent_layers import LAYERS, borrowed_linear
from lowmem_grpo.engines.vllm.loan import Loan
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.models.fp8_linear import FP8Linear
from lowmem_grpo.models.fused_weights import fuse_fp8

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LAYER = "model.layers.0."
QKV, GATE_UP, OUT = LAYER + "self_attn.qkv_proj", LAYER + "mlp.gate_up_proj", LAYER + "self_attn.o_proj"
MODULES = {QKV: [LAYER + "self_attn." + name for name in PARTS["qkv_proj"]],
           GATE_UP: [LAYER + "mlp." + name for name in PARTS["gate_up_proj"]], OUT: [OUT]}


def inputs(model: Any, layer: str, rows: int = 5) -> Tensor:
    base = model.get_base_model()
    width = base.get_submodule(MODULES[layer][0]).in_features
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(2))
    return x.to(base.get_input_embeddings().weight.dtype)


@torch.no_grad()
def theirs(model: Any, layer: str, x: Tensor) -> Tensor:
    """What the trainer's modules give."""
    return torch.cat([model.get_base_model().get_submodule(path)(x) for path in MODULES[layer]], -1)


def ours(layer: str, x: Tensor) -> Tensor:
    return borrowed_linear(x, LAYERS[layer].out_features, layer)


def close_to(got: Tensor, expected: Tensor) -> None:
    """Equal but for rounding: 1e-5 in float32, 2 units in the last place of the largest value in bfloat16."""
    scale = expected.abs().max().item()
    assert (got.float() - expected.float()).abs().max() <= scale * (1e-5 if got.dtype == torch.float32 else 2 / 128)


def fuse_plain(modules: list[Any]) -> None:
    """Put weights and biases of linear layers into one buffer each."""
    for name in ("weight", "bias"):
        parameters = [getattr(getattr(module, "base_layer", module), name) for module in modules]
        if None not in parameters:
            buffer = torch.cat([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, buffer.split([len(p) for p in parameters]), strict=True):
                parameter.data = part


def fuse(model: Any, layer: str) -> None:
    modules: list[Any] = [model.get_base_model().get_submodule(path) for path in MODULES[layer]]
    if isinstance(modules[0].base_layer, FP8Linear):
        fuse_fp8([module.base_layer for module in modules])
    elif hasattr(modules[0].base_layer.weight, "quant_state"):
        NF4Weight.adjacent([module.base_layer.weight for module in modules])
    else:
        fuse_plain(modules)


def borrow(model: Any, adapter: str | None = None, copied: AdapterCopy | None = None) -> Loan:
    """What an engine would borrow of the first layer."""
    loan = Loan(model.get_base_model(), CPU, adapter, copied)
    for name in MODULES:
        loan.linear(name, PARTS)
    loan.embedding("model.embed_tokens", head=False)
    loan.embedding("lm_head", head=True)
    norm = model.get_base_model().model.norm.weight
    loan.parameter("model.norm.weight", norm)
    return loan


def sampled(loan: Loan, layer: str, x: Tensor, base_model: bool = False) -> Tensor:
    """What the next call of an engine computes with."""
    loan.take(base_model)
    return ours(layer, x)


def addresses(layer: str) -> list[int]:
    """Where the adapter lies that a layer is sampled with."""
    return [tensor.data_ptr() for lora in LAYERS[layer].loras if lora for tensor in (lora.a, lora.b)]


def reallocated(parameter: Any) -> None:
    """Move a parameter to another place in memory."""
    parameter.data = parameter.data.clone()


def linear_of(model: Any, path: str = MODULES[QKV][1]) -> Any:
    """A linear layer of the trainer, k_proj unless said otherwise."""
    return model.get_base_model().get_submodule(path)
