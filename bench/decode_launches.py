"""Launches of one decoder layer for a token, in the graph that vLLM captures over the trainer's 4-bit weights.

The layer's four linear layers are borrowed as they are for vLLM (16-bit copies of the adapters, side by side), and a
`Product` says whether it is one kernel beside x A^T; one that is not makes a product, x A^T and a product for each B.
The kernels of vLLM's own layer are a list: they are in its compiled model, not in ours.
"""

import torch
from bitsandbytes.nn import Params4bit

from lowmem_grpo.engines.borrowed import Product
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.kernels.nf4 import NF4Weight

DTYPE = torch.bfloat16
HIDDEN, INNER, KEYS, RANK = 256, 512, 128, 8
LINEARS = {  # of one input: outputs of each matrix, and the input's size
    "qkv": ((HIDDEN, KEYS, KEYS), HIDDEN), "out": ((HIDDEN,), HIDDEN), "gate_up": ((INNER, INNER), HIDDEN),
    "down": ((HIDDEN,), INNER),
}
OF_VLLM = ("norm with residual", "rotary embedding", "write to the cache", "attention", "norm with residual",
           "activation of the MLP")


def count_decode_launches() -> int:
    """Of a layer of a model without norms of q and k (Qwen2.5, Llama)."""
    return len(OF_VLLM) + sum(launches(product(*sizes)) for sizes in LINEARS.values())


def launches(one: Product) -> int:
    """x A^T and one kernel; or the product, x A^T, and one product for each B."""
    return 2 if one.one_kernel else 2 + len(one.loras)


def product(outputs: tuple[int, ...], columns: int) -> Product:
    """4-bit matrices side by side with LoRA on each, as an engine borrows them."""
    params = [Params4bit(torch.zeros(rows, columns, dtype=DTYPE), requires_grad=False, quant_type="nf4").to("cpu")
              for rows in outputs]
    a = torch.zeros(RANK * len(outputs), columns, dtype=DTYPE).split(RANK)
    b = torch.zeros(sum(outputs), RANK, dtype=DTYPE).split(outputs)
    loras: list[LoRA | None] = [LoRA(*pair) for pair in zip(a, b, strict=True)]
    return Product(NF4Weight.adjacent(params), list(outputs), [None] * len(outputs), loras, DTYPE)
