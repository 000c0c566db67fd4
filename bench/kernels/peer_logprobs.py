"""Log-probabilities (and entropy) of target tokens from hidden states and a frozen head: ours and others'.

N rows, D hidden size, V vocabulary. The rows are N / 8 tokens of 8 sequences, and the upstream gradient of a row is
-advantage(sequence) / N: that of GRPO's loss on policy, so that a provider that returns this loss (Liger) must have
the same gradient of the hidden states.
"""

from typing import Any

import torch
from torch import Tensor

from bench.kernels.problems import (
    FWD,
    FWD_BWD,
    Case,
    Forward,
    Problem,
    Provider,
    Results,
    Run,
    compiled,
    pair,
    truth_of,
)
from lowmem_grpo.kernels import linear_logprobs, linear_logprobs_ref

SEQUENCES = 8
TRUTH_CHUNK, TRUTH_ROWS = 512, 2048  # rows whose float64 logits are made at a time, and in all


def logprob_problem(case: Case) -> Problem:
    """Return a problem of hidden states and a head whose logits are spread like a model's."""
    rows, size, vocabulary = (case.shape[name] for name in "NDV")
    generator = case.generator()
    leaves = {"hidden": case.randn(rows, size, generator=generator)}
    given = {
        "weight": case.randn(vocabulary, size, generator=generator, scale=2 / size**0.5),
        "targets": torch.randint(vocabulary, (rows,), generator=generator, device=case.device),
    }
    advantages = torch.randn(SEQUENCES, generator=generator, device=case.device)
    upstream = {"logprobs": advantages.repeat_interleave(rows // SEQUENCES) / -rows}
    product = 2 * rows * size * vocabulary
    return Problem(case, leaves, given | {"advantages": advantages}, upstream,
                   lambda: logprob_truth(leaves, given, upstream), flops={FWD: product, FWD_BWD: 2 * product})


def logprob_truth(leaves: Results, given: dict[str, Any], upstream: Results) -> Results:
    """Return the results of the first rows in float64, computed in chunks: a row's results depend on no other row."""
    weight = given["weight"].double()
    tensors = leaves["hidden"], given["targets"], upstream["logprobs"]
    chunks = zip(*(tensor[:TRUTH_ROWS].split(TRUTH_CHUNK) for tensor in tensors), strict=True)
    parts = [
        truth_of(reference, {"hidden": hidden}, {"weight": weight, "targets": targets}, {"logprobs": grad})
        for hidden, targets, grad in chunks
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def both(logprobs: Tensor, entropy: Tensor) -> Results:
    return {"logprobs": logprobs.flatten(), "entropy": entropy.detach().flatten()}


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Results:
    return both(*linear_logprobs(hidden, weight, targets, return_entropy=True))


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Results:
    return both(*linear_logprobs_ref(hidden, weight, targets))


def by_hand(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Results:
    """Compute the product in the model's dtype, and the softmax in float32."""
    log_softmax = (hidden @ weight.T).float().log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return both(log_softmax.gather(-1, targets[:, None])[:, 0], entropy)


def products(problem: Problem) -> Run:
    """Return a call of the matrix products alone, in the case's dtype: the logits, and with backward their gradient."""
    hidden, weight = problem.leaves["hidden"], problem.given["weight"]
    if problem.case.passes == FWD:
        return Run(lambda: {"products": hidden @ weight.T})
    return Run(lambda: {"products": hidden @ weight.T @ weight})


def trl_chunked(problem: Problem) -> Forward:
    """Return the function that TRL's GRPO trainer calls by default since 1.16 (`add_fused_lm_head`), with TRL's tiles
    and the entropy that it logs. It saves the hidden states and recomputes each tile of logits in the backward pass."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Results:
        found = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, CHUNK, None, 1.0, ("entropy",))
        return both(*found[:2])

    return forward


def trl_logits(problem: Problem) -> Forward:
    """Return TRL's function on whole logits, in float32 as accelerate passes them under mixed precision."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Results:
        logits = (hidden @ weight.T).float().view(SEQUENCES, -1, weight.shape[0])
        return both(*selective_log_softmax_and_entropy(logits, targets.view(SEQUENCES, -1),
                                                       entropy_requires_grad=False))

    return forward


def liger_loss(problem: Problem) -> Forward:
    """Return Liger's fused GRPO loss, which computes all gradients in its forward pass."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, loss_type="bnpo", use_ref_model=False, temperature=1.0)

    def forward(hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor) -> Results:
        tokens = targets.view(SEQUENCES, -1)
        value, _ = loss(hidden.view(*tokens.shape, -1), weight, tokens, torch.ones_like(tokens), advantages)
        return {"loss": value}

    return forward


def cut_cross_entropy(problem: Problem) -> Forward:
    """Return Apple's cut-cross-entropy; its negative is the log-probability."""
    from cut_cross_entropy import linear_cross_entropy

    return lambda hidden, weight, targets, **_: {
        "logprobs": -linear_cross_entropy(hidden, weight, targets, reduction="none").float()}


PROBLEMS = {"linear_logprobs": (logprob_problem, [
    *pair(ours, reference, "whole logits in float32, and so are the products"),
    compiled(by_hand, "of log_softmax, gather and entropy over whole logits"),
    Provider("trl_chunked", trl_chunked, "trl", "its GRPO's default: add_fused_lm_head's function and tiles"),
    Provider("trl_full_logits", trl_logits, "trl", "TRL's log-probability and entropy of whole float32 logits"),
    Provider("liger_grpo_loss", liger_loss, "liger-kernel",
             "the loss, not log-probabilities; no entropy; error of grad_hidden only", needs=("backward",)),
    Provider("cut_cross_entropy", cut_cross_entropy, "cut-cross-entropy", "no entropy, no temperature",
             needs=("card", "16 bits")),
    Provider("two_gemms", products, note="only the matrix products (one for fwd)"),
])}
