"""Kernel launches of a decoder layer, and host microseconds of a call, counted on the CPU.

    python -m bench.launches [--json]  make bench-launches [JSON=1]

A launch is an operation that a card would run a kernel for, as a dispatch mode sees it while the embedded model trains
in NF4 and bfloat16 with LoRA, under gradient checkpointing, on one micro-batch of two prompts with two completions
each. The rules:

    counted    every operation below autograd, one each; one of `lowmem_grpo::` is one launch, whatever the CPU does
    not        views, sizes and allocations (`FREE`), which start nothing
    a layer    the model's count less that of the same model without its last layer: what happens once cancels out

Gradients of the adapters are new, as in the first micro-batch of a step; each later one adds one launch a LoRA tensor.
Attention's backward pass counts as one operation, of which a card makes several launches. For a sampled token, the four
borrowed linear layers of a layer of Qwen2.5-3B's form (biases on q, k, v) run on fake tensors "on a card"; what vLLM
launches itself beside them in a captured graph is a list that was read in its source (0.32), not counted: `VLLM_OWN`.
Nothing here is a time on a card: it shows how much work the host has to start.
"""

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.common import options
from lowmem_grpo import FastLanguageModel
from lowmem_grpo.engines.vllm.lent_layers import Product
from lowmem_grpo.kernels import few_rows
from lowmem_grpo.kernels.fp8 import FP8Weight
from lowmem_grpo.kernels.frozen import FrozenWeight
from lowmem_grpo.kernels.lora import LoRA
from lowmem_grpo.kernels.nf4 import NF4Weight
from lowmem_grpo.kernels.opaque import opaque
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

OURS = ("lowmem_grpo/", "/modeling_")  # files that an operation is named by
ROUNDS, CALLS = 30, 300
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
    """Inside, `counts` grows by one for each operation that a card would run a kernel for: under its name, or where
    `placed`, under (phase, name, the function that asked for it)."""

    def __init__(self, placed: bool = False) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.placed, self.phase = placed, "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func._schema.name.partition("::")[2]
        if operation not in FREE:
            self.counts[(self.phase, operation, place()) if self.placed else operation] += 1
        return result


def place() -> str:
    """The function of ours, or of transformers' model, that asked for an operation; else autograd did."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in OURS):
            return frame.f_code.co_name
        frame = frame.f_back
    return "autograd"


def layer_launches() -> Counter[tuple[str, str, str]]:
    """Launches of one decoder layer, forward and backward with recompute."""
    model, _ = FastLanguageModel.from_pretrained("tiny", dtype=torch.bfloat16, max_seq_length=128)
    model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=True).train()
    base = model.get_base_model()
    count(model)  # what is only found out once is known now
    whole = count(model)
    base.model.layers = base.model.layers[:-1]
    base.config.num_hidden_layers -= 1
    whole.subtract(count(model))
    return +whole


def count(model: Any) -> Counter[tuple[str, str, str]]:
    """Launches of a micro-batch through the whole model."""
    prompts = [RolloutGroup({}, [5, 6, 7, 8, 9], [completion(length) for length in (6, 9)]) for _ in range(2)]
    (batch,) = pack(prompts)
    policy = Policy(model)
    for parameter in policy.trainable:
        parameter.grad = None
    with Launches(placed=True) as launches:
        logprobs, _ = policy.logprobs(batch, 1.0)
        launches.phase = "backward"
        logprobs.sum().backward()
    return launches.counts


def completion(length: int) -> Rollout:
    return Rollout(list(range(10, 10 + length)), [0.0] * length, "stop")


def host_microseconds() -> float:
    """Host time of one of our operations above that of its body, which does nothing here: one that writes in place."""
    out, values = torch.zeros(0), torch.zeros(0)
    operation = opaque("bench_nothing", no_body, mutates=("out",))
    return smallest_mean(operation, out, values) - smallest_mean(no_body, out, values)


def no_body(out: Tensor, values: Tensor, number: int) -> None:
    return None


def smallest_mean(call: Callable[..., Any], out: Tensor, values: Tensor) -> float:
    """Microseconds of a call: the smallest of many rounds, because other load can only add."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call(out, values, 3)
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(rounds)


# A token of a layer


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
    blocks, groups = numbers // 64, -(-numbers // 64 // 256)

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


def measured() -> tuple[dict[str, Any], Counter[tuple[str, str, str]]]:
    """What `--json` prints, and the launches of a layer for the table."""
    layer = layer_launches()
    sums = {phase: sum(n for (when, *_), n in layer.items() if when == phase) for phase in ("forward", "backward")}
    return {
        "launches_forward": sums["forward"], "launches_backward": sums["backward"],
        "launches_layer": sum(sums.values()), "launches_decode": sum(breakdown().values()),
        "host_us_per_op": round(host_microseconds(), 2),
    }, layer


def table(found: dict[str, Any], layer: Counter[tuple[str, str, str]]) -> str:
    """The totals, and where the launches of a layer come from, for people."""
    lines = [f"{name:<18} {value}" for name, value in found.items()]
    for phase in ("forward", "backward"):
        lines += ["", f"{phase}, one decoder layer"]
        for (when, operation, place), number in layer.most_common():
            if when == phase:
                lines.append(f"{number:5d}  {operation:<40} {place}")
    return "\n".join(lines)


@click.command(help=__doc__)
@options.AS_JSON
def main(as_json: bool) -> None:
    found, layer = measured()
    click.echo(json.dumps(found) if as_json else table(found, layer))


if __name__ == "__main__":
    main()
