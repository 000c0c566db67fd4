"""Models of fake tensors: NF4 weights as bitsandbytes keeps them, without memory.

A model is made on the meta device, where modules can be replaced; then its tensors become fake ones.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lowmem_grpo.models.experts import PackedStack, expert_stacks, use_routed_blocks
from lowmem_grpo.models.fused_weights import GROUPS, fuse
from lowmem_grpo.models.pretrained import attention_of, class_of

BLOCK, NESTED_BLOCK = 64, 256  # weights per scale, scales per nested scale
SCALES = ("absmax", "code", "offset")
OF_4BIT = ("quant_state", "blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")


def meta_model(config: Any, dtype: torch.dtype, nf4: bool) -> PreTrainedModel:
    """Return the frozen model of a transformers config on the meta device; with `nf4` linears but the head are NF4."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = class_of(config).from_config(
                config, attn_implementation=attention_of(config), trust_remote_code=False
            )
            if nf4:
                quantize(model, lambda linear: linear_4bit(linear, dtype))
            if nf4 and getattr(config, "quantization_config", None):
                use_routed_blocks(model, lambda weight: PackedStack(weight.shape, dtype))  # experts in MXFP4
            elif nf4:
                use_routed_blocks(model)
                for stack in expert_stacks(model):
                    stack.weight = weight_4bit(*stack.weight.shape, dtype)
    finally:
        torch.set_default_dtype(default)
    return model.requires_grad_(False)


def quantize(model: PreTrainedModel, make: Callable[[nn.Linear], Linear4bit]) -> None:
    """Replace the linears, but not the head and a tower's, by the 4-bit ones that `make` returns."""
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head and ".visual." not in name:
            model.set_submodule(name, make(module))
    model.is_loaded_in_4bit = model.is_quantized = True


def linear_4bit(linear: nn.Linear, dtype: torch.dtype) -> Linear4bit:
    """Return a 4-bit layer of the same shape on the meta device."""
    rows, columns = linear.weight.shape
    new = Linear4bit(columns, rows, bias=linear.bias is not None, compute_dtype=dtype, quant_type="nf4")
    new.weight = weight_4bit(rows, columns, dtype)
    new.quant_state, new.support_avx512bf16_for_cpu = new.weight.quant_state, False
    return new


def weight_4bit(rows: int, columns: int, dtype: torch.dtype) -> Params4bit:
    """Return a 4-bit weight on the meta device."""
    blocks = -(-rows * columns // BLOCK)
    nested = QuantState(
        torch.empty(-(-blocks // NESTED_BLOCK), dtype=torch.float32), code=torch.empty(256, dtype=torch.float32),
        blocksize=NESTED_BLOCK, dtype=torch.float32,
    )
    state = QuantState(
        torch.empty(blocks, dtype=torch.uint8), torch.Size((rows, columns)), torch.empty(16, dtype=torch.float32),
        BLOCK, "nf4", dtype, torch.empty((), dtype=torch.float32), nested,
    )
    packed = torch.empty(rows * columns // 2, 1, dtype=torch.uint8)
    return Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True)


def make_fake(model: nn.Module) -> None:
    """Replace each tensor of a model on the meta device by a fake one, inside a FakeTensorMode."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor, memo)
        if isinstance(module, Linear4bit):
            module.quant_state = module.weight.quant_state
    with EqualTables():
        lay_adjacent(model)


def lay_adjacent(model: nn.Module) -> None:
    """Make the 4-bit weights of q, k, v (gate, up) adjacent in memory, as the loader does before it adds adapters."""
    for module in model.modules():
        for names in GROUPS:
            layers = [getattr(child, "base_layer", child) for name in names
                      if (child := dict(module.named_children()).get(name)) is not None]
            if len(layers) == len(names) and all(isinstance(layer, Linear4bit) for layer in layers):
                with suppress(ValueError):  # sizes that do not end at a block's end: they stay separate
                    fuse([layer.weight for layer in layers])


class EqualTables(TorchDispatchMode):
    """A mode in which tensors without values count as equal, as the code tables of one 4-bit type are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return True if func._schema.name == "aten::equal" else func(*args, **(kwargs or {}))


def fake(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """Return the fake tensor of a tensor, the same one each time; a 4-bit parameter keeps its quantization state."""
    if id(tensor) not in memo:
        new = torch.empty(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        for part, name, scale in scales(tensor):
            setattr(part, name, fake(scale, memo))
        for name in OF_4BIT:
            if hasattr(tensor, name):
                setattr(memo[id(tensor)], name, getattr(tensor, name))
    return memo[id(tensor)]


def scales(weight: Any) -> list[tuple[Any, str, Tensor]]:
    """Return (owner, attribute, tensor) for each scale of a 4-bit weight; nothing for other weights."""
    state = getattr(weight, "quant_state", None)
    named = [(part, name, getattr(part, name)) for part in (state, state.state2) for name in SCALES] if state else []
    return [(part, name, value) for part, name, value in named if isinstance(value, Tensor)]


def stored(model: nn.Module) -> list[Tensor]:
    """Return every tensor that the model holds: parameters, buffers, and the scales of 4-bit weights."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    return [*model.parameters(), *model.buffers(), *(scale for weight in weights for *_, scale in scales(weight))]
