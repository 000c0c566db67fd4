"""Kernel launches of a decoder layer, and host microseconds of a call, counted on the CPU.

    python -m bench.launches.bench [--json]  make bench-launches [JSON=1]

A launch is an operation that a card would run a kernel for, as a dispatch mode sees it while the embedded model trains
in NF4 and bfloat16 with LoRA, under gradient checkpointing, on one micro-batch of two prompts with two completions
each. The rules:

    counted    every operation below autograd, one each; one of `lowmem_grpo::` is one launch, whatever the CPU does
    not        views, sizes and allocations (`FREE`), which start nothing
    a layer    the model's count less that of the same model without its last layer: what happens once cancels out

Gradients of the adapters are new, as in the first micro-batch of a step; each later one adds one launch a LoRA tensor.
Attention's backward pass counts as one operation, of which a card makes several launches. Nothing here is a time on a
card: it shows how much work the host has to start.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.launches.decode import Launches, count_decode_launches
from lowmem_grpo import FastLanguageModel
from lowmem_grpo.kernels.opaque import opaque
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import Rollout, RolloutGroup

OURS = ("lowmem_grpo/", "/modeling_")  # files that an operation is named by
ROUNDS, CALLS = 30, 300


class PlacedLaunches(Launches):
    """Counts each launch under (phase, operation, the function that asked for it)."""

    phase = "forward"

    def key(self, operation: str) -> tuple[str, str, str]:
        return self.phase, operation, place()


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
    with PlacedLaunches() as launches:
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


def measured() -> tuple[dict[str, Any], Counter[tuple[str, str, str]]]:
    """What `--json` prints, and the launches of a layer for the table."""
    layer = layer_launches()
    sums = {phase: sum(n for (when, *_), n in layer.items() if when == phase) for phase in ("forward", "backward")}
    return {
        "launches_forward": sums["forward"], "launches_backward": sums["backward"],
        "launches_layer": sum(sums.values()), "launches_decode": count_decode_launches(),
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


def main() -> None:
    """Count, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    found, layer = measured()
    print(json.dumps(found) if options.json else table(found, layer))


if __name__ == "__main__":
    main()
