"""Counts the launches of one decoder layer for a token while vLLM decodes with our layers, without a GPU.

    python -m bench.launches.decode             4-bit and FP8 weights, and the same dequantized while sampling

The four borrowed linear layers of a layer of Qwen2.5-3B's form (biases on q, k, v) run on fake tensors "on a card",
under a dispatch mode that counts operations; views launch nothing. What vLLM itself launches beside them in a captured
graph is a list that was read in its source (0.32) and not counted: `VLLM_OWN`.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_grpo.engines.vllm.lent_layers import Product
from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.fp8 import FP8Weight
from lowmem_grpo.kernels.frozen import FrozenWeight
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.kernels.nf4 import NF4Weight

HIDDEN, QUERIES, KEYS, INNER, RANK, ROWS = 2048, 2048, 256, 11008, 16, 8
LAYERS = {  # of a decoder layer: outputs of each matrix, inputs, whether they have biases
    "qkv": ([QUERIES, KEYS, KEYS], HIDDEN, True), "o": ([HIDDEN], QUERIES, False),
    "gate_up": ([INNER, INNER], HIDDEN, False), "down": ([HIDDEN], INNER, False),
}
FORMS = ("4bit", "fp8", "16bit")  # of weights; the last are dequantized while sampling
VLLM_OWN = {  # launches of one layer and token on its FlashAttention path; split keys add one
    "input norm, with the residual": 1, "rope of q and k": 1, "keys and values into the cache": 1, "attention": 1,
    "sum of the parts of attention": 1, "second norm, with the residual": 1, "silu and product": 1,
}
FREE = {  # operations that only look at memory in another way, or set it aside
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like", "empty_strided",
    "expand", "is_same_size", "new_empty", "new_empty_strided", "permute", "promote_types", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}


class Launches(TorchDispatchMode):
    """Inside, `counts` grows by one for each operation that a card would run a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func._schema.name.partition("::")[2]
        if operation not in FREE:
            self.counts[self.key(operation)] += 1
        return result

    def key(self, operation: str) -> Any:
        """What a launch is counted under."""
        return operation


def count_decode_launches() -> int:
    """Launches of one token in one decoder layer, 4-bit weights: ours, and those that vLLM makes itself."""
    return sum(breakdown().values())


def breakdown(form: str = "4bit") -> dict[str, int]:
    """Launches by what they are for, with weights in one of FORMS."""
    return {name: sum(counts.values()) for name, counts in counted(form).items()} | VLLM_OWN


def counted(form: str = "4bit") -> dict[str, Counter[str]]:
    """Operations of each borrowed layer, by name."""
    found = {}
    with on_a_pretend_card():
        for name, (features, inputs, biased) in LAYERS.items():
            product = make_product(features, inputs, biased, form)
            x = torch.empty(ROWS, inputs, dtype=torch.bfloat16, device="cuda")
            with torch.no_grad(), Launches() as launches:
                product.forward(x)
            found[name] = launches.counts
    return found


@contextmanager
def on_a_pretend_card() -> Iterator[None]:
    """Inside, tensors on "cuda" are fake ones, of a card with tensor cores."""
    with FakeTensorMode(), patch.object(few_rows, "capability", lambda device: 90), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # all of them are 0
        yield


def make_product(features: list[int], inputs: int, biased: bool, form: str) -> Product:
    """A borrowed layer whose matrices and adapters lie side by side, as the engine's do."""
    out = sum(features)
    biases: list[Tensor | None] = [None] * len(features)
    if biased:
        biases = [nn.Parameter(half(size), requires_grad=False) for size in features]
    a = half(len(features) * RANK, inputs).split(RANK)
    b = half(out, RANK).split(features)
    loras: list[LoRA | None] = [LoRA(*pair, 2.0) for pair in zip(a, b, strict=True)]
    weight: FrozenWeight = fake_fp8(features, inputs) if form == "fp8" else fake_nf4(features, inputs)
    product = Product(weight, features, biases, loras, torch.bfloat16)
    product.wide = half(out, inputs) if form == "16bit" else None
    return product


def half(*sizes: int) -> Tensor:
    return torch.empty(*sizes, dtype=torch.bfloat16, device="cuda")


def fake_nf4(features: list[int], inputs: int) -> NF4Weight:
    """Matrices in NF4 with double quantization, one below the other."""
    numbers = sum(features) * inputs
    blocks = numbers // 64
    groups = -(-blocks // 256)

    def made(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="cuda")

    return NF4Weight(
        made(numbers // 2, torch.uint8), made(blocks, torch.uint8), made(16, torch.float32),
        (sum(features), inputs), 64, torch.bfloat16, tuple(features), made(256, torch.float32),
        made(groups, torch.float32), made(groups, torch.float32),
    )


def fake_fp8(features: list[int], inputs: int) -> FP8Weight:
    """The same in FP8, with a scale for each row."""
    codes, scales = (torch.empty(sum(features), size, dtype=dtype, device="cuda")
                     for size, dtype in ((inputs, torch.uint8), (1, torch.float32)))
    return replace(FP8Weight.of(codes, scales, (1, inputs), torch.bfloat16), out_features=tuple(features))


def main() -> None:
    """Print the counts of each form, as one JSON object."""
    found = {}
    for name in FORMS:
        parts = breakdown(name)
        found[name] = {"launches_decode": sum(parts.values()), "parts": parts,
                       "ours": {layer: dict(counts) for layer, counts in counted(name).items()}}
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
