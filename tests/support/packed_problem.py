"""Packed sequences that share prompts: what attention or a model makes of them together, and of each one alone."""

from typing import Any

import torch
from torch import Tensor

from lowmem_grpo.models.packing import collate
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import MicroBatch, Rollout, RolloutGroup

Learned = tuple[Tensor, dict[str, Tensor]]  # log-probabilities, and gradients by name
GROUPS = {  # (prompt, completions) of each group; a prompt's last token belongs to its completions
    "one group": [(17, [5, 12, 1, 12])], "two groups": [(23, [3, 2, 9]), (6, [10, 7])],
    "alone among others": [(4, [19]), (11, [3, 8]), (1, [6])], "a prompt of one token": [(1, [5, 3, 11])],
}


def batch_of(groups: list[tuple[int, list[int]]]) -> MicroBatch:
    """Random completions of random prompts, in one micro-batch."""
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
    result = run(*heads)
    grads = torch.autograd.grad(result, heads, grad.to(result))
    return {"result": result.detach(), **dict(zip(("query", "key", "value"), grads, strict=True))}


def learned(policy: Policy, batch: MicroBatch) -> Learned:
    """Log-probabilities of the trained tokens, and the gradient of every LoRA tensor."""
    logprobs, _ = policy.logprobs(batch, 1.0)
    return logprobs.detach(), gradients(policy.model, logprobs)


def learned_alone(model: Any, batch: MicroBatch) -> Learned:
    """The same by a model's own forward pass, one sequence at a time."""
    logprobs = alone(model, batch)
    return logprobs.detach(), gradients(model, logprobs)


def alone(model: Any, batch: MicroBatch) -> Tensor:
    """(N,) log-probabilities of the trained tokens, one sequence at a time, in float32 at least."""
    found = torch.zeros(len(batch.input_ids), dtype=torch.promote_types(model.dtype, torch.float32))
    lengths = batch.cu_seqlens.diff().tolist()
    for row, length in zip(batch.sources.view(len(lengths), -1), lengths, strict=True):
        ids, targets, mine = (part[row[:length]] for part in (batch.input_ids, batch.targets, batch.loss_mask))
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0].to(found).log_softmax(-1)
        found = found.index_put((row[:length][mine],), logprobs.gather(-1, targets[:, None])[mine, 0])
    return found[batch.trained]


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    """Of every LoRA tensor, by its name, for a loss that weighs every token differently."""
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
