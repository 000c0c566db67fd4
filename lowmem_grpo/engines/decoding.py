"""Choosing the next token: temperature, truncation, and a draw whose log-probability is known."""

import torch
from torch import Tensor

from lowmem_grpo.config.sampling import SamplingParams


def draw(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B,) and their log-probabilities (B,) under the distribution they were drawn from; logits (B, V) fp32.

    Inverse-CDF sampling: one uniform number a row. A token of probability 0 is never drawn. Greedy (temperature 0)
    reports the log-probability at temperature 1.
    """
    if params.temperature == 0:
        logprobs = logits.log_softmax(-1)
        tokens = logits.argmax(-1)
    else:
        logprobs = truncate(logits / params.temperature, params).log_softmax(-1)
        cdf = logprobs.exp().cumsum(-1, dtype=torch.float64)
        uniform = torch.rand(len(cdf), 1, dtype=torch.float64, device=cdf.device, generator=generator)
        tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits with what top_k, then top_p, then min_p cut off at -inf (transformers' order)."""
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probs = ordered.softmax(-1)
        beyond = probs.cumsum(-1) - probs >= params.top_p  # the most likely token always stays
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    if params.min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits
