"""Packed sequences that share prompts, and what attention or a model makes of them."""

from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.models.attention import without_cudnn
from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

GROUPS = {  # (prompt, completions) of each group; a prompt's last token belongs to its completions
    "one group": [(17, [5, 12, 1, 12])], "two groups": [(23, [3, 2, 9]), (6, [10, 7])],
    "alone among others": [(4, [19]), (11, [3, 8]), (1, [6])], "a prompt of one token": [(1, [5, 3, 11])],
}


def batch_of(groups: list[tuple[int, list[int]]]) -> MicroBatch:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for prompt, completions in groups:
        group = RolloutGroup({}, torch.randint(3, 380, (prompt,), generator=generator).tolist(), [])
        for length in completions:
            ids = torch.randint(3, 380, (length,), generator=generator).tolist()
            pairs.append((group, Rollout(ids, [0.0] * length, "stop")))
    return collate(pairs)


def outcome(run: Any, heads: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The result and every gradient, by the kernels that a model's layer takes."""
    with without_cudnn():
        result = run(*heads)
    grads = torch.autograd.grad(result, heads, grad.to(result))
    return {"result": result.detach(), **dict(zip(("query", "key", "value"), grads, strict=True))}


def trained(policy: Policy, batch: MicroBatch) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities and the adapter's gradients."""
    policy.model.zero_grad()
    logprobs, _ = policy.logprobs(batch, 1.0)
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), [parameter.grad.clone() for parameter in policy.trainable]
