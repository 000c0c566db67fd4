"""Count the kernel launches of a decoder layer, and the host microseconds of a call, on the CPU.

    python -m bench.launches [--json]  make bench-launches [JSON=1]

A launch is an operation for which a card would run a kernel, as a dispatch mode sees it while the embedded model trains
in NF4 and bfloat16 with LoRA and gradient checkpointing, on one micro-batch of two prompts with two completions each.
Every operation below autograd counts once, those of `lowmem_grpo::` too, except views, sizes and allocations (`FREE`).
A layer's count is the model's minus that of the same model without its last layer; `launches_kept` is that of a layer
which keeps all it computes, and `launches_lent` of one whose weights sampling also holds in 16 bits. Adapters are
converted once for all layers, before the first micro-batch of a step. Their gradients are new, as in that one; each
later one adds one launch per LoRA tensor. Attention's backward pass counts as one operation, although a card makes
several launches. For a sampled token, the four borrowed linear layers of one layer of Qwen2.5-3B's shape run on fake
tensors "on a card"; vLLM's own launches beside them in a captured graph were read from its source (0.32), not counted:
`VLLM_OWN`. Nothing here is a time on a card.
"""

import json
import sys
import timeit
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common import options
from bench.memory.counted_storages import owner
from lowmem_grpo import FastLanguageModel
from lowmem_grpo.engines.vllm.shared_linear import Product
from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.custom_op import custom_op
from lowmem_grpo.kernels.fp8 import FP8Weight
from lowmem_grpo.kernels.frozen_weight import WIDE, FrozenWeight, WideWeights
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.kernels.lora_factors import SharedFactors
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

ROUNDS, CALLS = 30, 300
HIDDEN, QUERIES, KEYS, INNER, RANK, ROWS = 2048, 2048, 256, 11008, 16, 8
LAYERS = {  # linear layers of a decoder layer: output size of each matrix, input size, biases or not
    "qkv": ([QUERIES, KEYS, KEYS], HIDDEN, True), "o": ([HIDDEN], QUERIES, False),
    "gate_up": ([INNER, INNER], HIDDEN, False), "down": ([HIDDEN], INNER, False),
}
VLLM_OWN = 7  # of a layer and token: two norms, rope, cache, FlashAttention, the sum of its parts, silu and product
FREE = {  # operations that only view or allocate memory
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like", "empty_strided",
    "expand", "is_same_size", "new_empty", "new_empty_strided", "permute", "promote_types", "select", "slice", "split",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}


class Launches(TorchDispatchMode):
    """A mode that counts the operations for which a card would run a kernel, by (name, calling function)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func._schema.name.partition("::")[2]
        if operation not in FREE:
            self.counts[operation, place()] += 1
        return result


def place() -> str:
    """Return the innermost function of ours, or of transformers' model, that called an operation, else "autograd"."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if owner(file) == "lowmem_grpo" or "/modeling_" in file:
            return frame.f_code.co_name
        frame = frame.f_back
    return "autograd"


def layer_launches(
    recompute: bool = True, lent: bool = False, name: str = "tiny"
) -> dict[str, Counter[tuple[str, str]]]:
    """Return the launches of a model's last decoder layer: forward, and backward, with or without recompute; with
    `lent`, sampling holds the weights in 16 bits."""
    model, _ = FastLanguageModel.from_pretrained(name, dtype=torch.bfloat16, max_seq_length=128)
    model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=recompute).train()
    base = model.get_base_model()
    held = WideWeights(0)
    # a card multiplies 16-bit numbers, whatever this processor does
    with SharedFactors().unchanged(), patch("lowmem_grpo.kernels.custom_op.WITHOUT_16_BITS", False):
        token = WIDE.set(held if lent else None)
        count(model)  # warm-up: what happens only once is not counted
        WIDE.reset(token)
        whole = count(model)
        base.model.layers = base.model.layers[:-1]
        base.config.num_hidden_layers -= 1
        rest = count(model)
    return {phase: counts - rest[phase] for phase, counts in whole.items()}


def count(model: Any) -> dict[str, Counter[tuple[str, str]]]:
    """Return the launches of one micro-batch through the whole model."""
    completions = [Rollout(list(range(10, 10 + length)), [0.0] * length, "stop") for length in (6, 9)]
    (batch,) = pack([RolloutGroup({}, [5, 6, 7, 8, 9], completions) for _ in range(2)])
    policy = Policy(model)
    for parameter in policy.trainable:
        parameter.grad = None
    with Launches() as forward:
        logprobs, _ = policy.logprobs(batch, 1.0)
    with Launches() as backward:
        logprobs.sum().backward()
    return {"forward": forward.counts, "backward": backward.counts}


def host_microseconds() -> float:
    """Return the host overhead in microseconds of one of our in-place custom ops, compared with calling its empty body
    directly. The minimum over many rounds counts, because other load can only add time."""
    out, values = torch.zeros(0), torch.zeros(0)
    calls = custom_op("bench_nothing", no_body, mutates=("out",)), no_body
    times = [min(timeit.repeat(partial(call, out, values, 3), number=CALLS, repeat=ROUNDS)) for call in calls]
    return (times[0] - times[1]) / CALLS * 1e6


def no_body(out: Tensor, values: Tensor, number: int) -> None:
    return None


# Launches of one layer for one sampled token


def breakdown(form: str = "4bit") -> dict[str, int]:
    """Return launches by linear layer, and vLLM's own, with weights in "4bit", "fp8", or "16bit" (dequantized)."""
    return {name: counts.total() for name, counts in counted(form).items()} | {"vLLM's own": VLLM_OWN}


def counted(form: str = "4bit") -> dict[str, Counter[str]]:
    """Return the operations of each borrowed layer, counted by name."""
    counts: dict[str, Counter[str]] = {}
    with on_a_pretend_card():
        for name, (features, inputs, biased) in LAYERS.items():
            product = make_product(features, inputs, biased, form)
            with torch.no_grad(), Launches() as launches:
                product.forward(on_card(ROWS, inputs))
            counts[name] = Counter()
            for (operation, _), number in launches.counts.items():
                counts[name][operation] += number
    return counts


@contextmanager
def on_a_pretend_card() -> Iterator[None]:
    """Make tensors on "cuda" fake inside the block, as on a card with tensor cores."""
    with FakeTensorMode(), patch.object(few_rows, "capability", lambda device: 90), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # all of them are 0
        yield


def on_card(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*sizes, dtype=dtype, device="cuda")


def make_product(features: list[int], inputs: int, biased: bool, form: str) -> Product:
    """Return a borrowed layer whose matrices and adapters are adjacent in memory, as the engine's are."""
    biases = [nn.Parameter(on_card(size), requires_grad=False) if biased else None for size in features]
    a = on_card(len(features) * RANK, inputs).split(RANK)
    b = on_card(sum(features), RANK).split(features)
    loras: list[LoRA | None] = [LoRA(*pair, 2.0) for pair in zip(a, b, strict=True)]
    weight: FrozenWeight = fake_fp8(features, inputs) if form == "fp8" else fake_nf4(features, inputs)
    product = Product(weight, features, biases, loras, torch.bfloat16)
    product.wide = on_card(product.rows, inputs) if form == "16bit" else None
    return product


def fake_nf4(features: list[int], inputs: int) -> NF4Weight:
    """Return matrices in NF4 with double quantization, stacked by rows."""
    byte, wide = partial(on_card, dtype=torch.uint8), partial(on_card, dtype=torch.float32)
    numbers = sum(features) * inputs
    blocks, groups = numbers // 64, -(-numbers // 64 // 256)
    return NF4Weight(byte(numbers // 2), byte(blocks), wide(16), (sum(features), inputs), 64, torch.bfloat16,
                     tuple(features), wide(256), wide(groups), wide(groups))


def fake_fp8(features: list[int], inputs: int) -> FP8Weight:
    """Return matrices in FP8, stacked by rows, with a scale for each row."""
    codes, scales = on_card(sum(features), inputs, dtype=torch.uint8), on_card(sum(features), 1, dtype=torch.float32)
    return replace(FP8Weight.from_codes(codes, scales, (1, inputs), torch.bfloat16), out_features=tuple(features))


@click.command(help=__doc__)
@options.AS_JSON
@click.option("--model", default="tiny", help="A folder with a small model; its experts count as one launch.")
def main(as_json: bool, model: str) -> None:
    """Print the totals; for people, also where the launches of a layer come from."""
    layer = layer_launches(name=model)
    forward, backward = (counts.total() for counts in layer.values())
    kept, lent = (sum(counts.total() for counts in layer_launches(False, held, model).values())
                  for held in (False, True))
    totals = {"launches_forward": forward, "launches_backward": backward, "launches_layer": forward + backward,
              "launches_kept": kept, "launches_lent": lent,
              "launches_decode": sum(breakdown().values()), "host_us_per_op": round(host_microseconds(), 2)}
    lines = [f"{name:<18} {value}" for name, value in totals.items()]
    for phase, counts in layer.items():
        lines += ["", f"{phase}, one decoder layer"]
        lines += [f"{number:5d}  {operation:<40} {place}" for (operation, place), number in counts.most_common()]
    click.echo(json.dumps(totals) if as_json else "\n".join(lines))


if __name__ == "__main__":
    main()
