"""Log-probabilities of several targets at one place, of one pass through the head:

    log p(k) = log p(0) + z(k) - z(0),  z = softcap(scale * (h . w + bias))

Place n has a first target 0, whose log-probability the head's kernel gives without logits; the others cost one row of
the head each.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowmem_grpo.kernels import linear_logprobs
from lowmem_grpo.models.policy import OutputHead, Policy
from lowmem_grpo.types import MicroBatch

ROWS = 4096  # of the head that are in memory at a time


def several_logprobs(policy: Policy, batch: MicroBatch, places: Tensor, tokens: Tensor) -> Tensor:
    """log p (E,) of `tokens` (E,) int64 at `places` (E,) int64, indices into the N trained tokens of a batch. Gradients
    reach the hidden states."""
    head = policy.head
    hidden, first = batch.at_trained(policy.hidden(batch)).to(head.weight.dtype), batch.at_trained(batch.targets)
    logprobs: Tensor = linear_logprobs(
        hidden, head.weight, first, bias=head.bias, logit_scale=head.logit_scale, softcap=head.softcap,
        return_entropy=True, chunk_rows=policy.logits_chunk)[0]
    everywhere = torch.arange(len(first), device=first.device)
    base = logprobs - logits_of(head, hidden, everywhere, first)
    return base[places] + logits_of(head, hidden, places, tokens)


def logits_of(head: OutputHead, hidden: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """The logits (E,) of some tokens at some places of `hidden` (N, D), a block at a time, made again for backward."""
    blocks = zip(places.split(ROWS), tokens.split(ROWS), strict=True)
    return torch.cat([checkpoint(block_logits, head, hidden, *block, use_reentrant=False,
                                 preserve_rng_state=False) for block in blocks])


def block_logits(head: OutputHead, hidden: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """The same of one block, in float32 at least."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = (hidden[places].to(wide) * head.weight[tokens].to(wide)).sum(-1)
    if head.bias is not None:
        logits = logits + head.bias[tokens]
    logits = logits * head.logit_scale
    return logits if not head.softcap else torch.tanh(logits / head.softcap) * head.softcap
