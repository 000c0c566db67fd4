"""4-bit and FP8 weights dequantized to 16 bits while an engine samples, once per sampling phase, in one fixed buffer.

A kernel that reads quantized codes repeats the dequantization for each token. If memory has room between training
steps, the weights are dequantized once when sampling begins, and used in plain matrix products. The base weights never
change, so the values are bit for bit those that training computes with. Their dtype is the engine's compute dtype: 16
bits on a card, 32 for a float32 model.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.config.loading import FOUR, SIXTEEN
from lowmem_grpo.engines.vllm.settings import BLOCK, kv_bytes_of
from lowmem_grpo.engines.vllm.shared_linear import Product
from lowmem_grpo.memory.cards import AUTO, DEFAULT_SHARE
from lowmem_grpo.memory.layer_forms import FP8, NF4
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.time_plan import faster_in_16_bit, rows_of_codes
from lowmem_grpo.models.fp8_layers import fp8_linears
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.utils import size_text

logger = logging.getLogger(__name__)

ALIGN = 128  # numbers; each weight starts at a multiple
# Allocates uninitialized memory for a number of values; for CUDA graphs, at the same addresses each time
Room = Callable[[int, torch.dtype, torch.device], Tensor]


def new_buffer(numbers: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a new tensor in each call. The tensor is freed once unreferenced, so nothing may store its address."""
    return torch.empty(numbers, dtype=dtype, device=device)


class SamplingWeights:
    """The dequantized weights of an engine's quantized products, which use them from `fill` to `drop`."""

    def __init__(self, products: Sequence[Product], dtype: torch.dtype, device: torch.device, room: Room,
                 few: int = 0) -> None:
        """The dequantized weights serve inputs of more than `few` rows; smaller inputs use the quantized codes."""
        self.pairs = [(product, product.weight) for product in products if not isinstance(product.weight, Tensor)]
        self.dtype, self.device, self.room, self.few = dtype, device, room, few
        self.filled = False

    @property
    def numbers(self) -> int:
        return sum(aligned(math.prod(weight.shape)) for _, weight in self.pairs)

    @property
    def nbytes(self) -> int:
        return self.numbers * self.dtype.itemsize

    @torch.no_grad()
    def fill(self) -> None:
        """Dequantize all weights, if that is not done yet, and make the products use them."""
        if self.filled:
            return
        with torch.inference_mode(False):
            buffer, start = self.room(self.numbers, self.dtype, self.device), 0
            for product, weight in self.pairs:
                size = math.prod(weight.shape)
                product.few = self.few
                product.wide = buffer[start : start + size].view(weight.shape)
                weight.fill(product.wide)
                start += aligned(size)
        self.filled = True

    def drop(self) -> None:
        """Stop using the buffer, whose contents may then be lost; the products use the codes until the next `fill`."""
        for product, _ in self.pairs:
            product.wide = None
        self.filled = False


def aligned(numbers: int) -> int:
    return -(-numbers // ALIGN) * ALIGN


def wide_bytes(policy: Policy) -> int:
    """Return the bytes of a model's 4-bit and FP8 weights once dequantized to its compute dtype; 0 if it has none."""
    weights = [weight for _, weight in policy.base.named_parameters() if hasattr(weight, "quant_state")]
    shapes = [w.quant_state.shape for w in weights] + [layer.weight.shape for layer in fp8_linears(policy.base)]
    return sum(aligned(math.prod(shape)) for shape in shapes) * policy.head.weight.dtype.itemsize


def choose(asked: str | None, policy: Policy, kv_bytes: int, kv_given: bool, sequences: int, tokens: int,
           cache_dtype: str = AUTO) -> tuple[str, int]:
    """Return the form of weights to sample with, and the bytes left for the KV cache.

    `FOUR` is the form in which weights are held (4 bits or FP8), and `kv_bytes` the cache's size with it; dequantized
    weights take their room from the cache, unless the user set its size. If no form is `asked`, weights are dequantized
    only on a card, if its data sheet does not say that this decodes slower and the cache of `sequences` sequences of
    `tokens` tokens still fits. ValueError if a form is `asked` of a model that is not quantized.
    """
    size = wide_bytes(policy)
    check_four_bit(asked, size > 0)
    if asked == FOUR or not size or (asked is None and policy.device.type != "cuda"):
        return FOUR, kv_bytes
    left = kv_bytes if kv_given or policy.device.type != "cuda" else kv_bytes - size
    if asked == SIXTEEN:
        return SIXTEEN, left
    known = known_of(policy.base, policy.device)
    if known is not None and not faster_in_16_bit(*known[:2], sequences, tokens, known[2]):
        return FOUR, kv_bytes
    wanted = kv_bytes_of(policy, (-(-tokens // BLOCK) + 1) * BLOCK, cache_dtype=cache_dtype) * sequences
    fits = size + kv_bytes <= free_share(policy.device) if kv_given else left >= wanted
    logger.info("sampling with weights in %s: dequantized they take %s, the cache of %d sequences %s",
                "16 bits" if fits else "the form they are held in", size_text(size), sequences, size_text(wanted))
    return (SIXTEEN, left) if fits else (FOUR, kv_bytes)


def check_four_bit(asked: str | None, quantized: bool) -> None:
    """Raise ValueError if the user `asked` for a form of weights and the model has no quantized ones."""
    if asked is not None and not quantized:
        raise ValueError(f"sampling_weights is {asked!r} and the model is not in 4 bits or FP8, so there is nothing to "
                         "dequantize. Leave it out, or load with load_in_4bit=True or load_in_fp8=True")


def few_rows(base: Any, device: torch.device) -> int:
    """Return the largest number of rows for which codes are faster than dequantized weights on the card; 0: unknown."""
    known = known_of(base, device)
    return 0 if known is None else rows_of_codes(*known)


def known_of(base: Any, device: torch.device) -> tuple[ModelShape, str, str] | None:
    """Return the model's shape, its card's name and its weights' form; None if its config cannot be planned for."""
    form = FP8 if any(fp8_linears(base)) else NF4
    try:
        shape = ModelShape.from_config(base.config)
    except ValueError:
        return None
    return shape, torch.cuda.get_device_name(device) if device.type == "cuda" else device.type, form


def free_share(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return free - int((1 - DEFAULT_SHARE) * total)
