"""Divergence of a student from a teacher, from hidden states and one frozen head: ours and TRL's.

N rows, D hidden size, V vocabulary; beta 1, the default of TRL's DistillationTrainer. The upstream gradient of a row is
1 / N: that of the mean over tokens.
"""

from typing import Any

import torch
from torch import Tensor

from bench.kernels.peer_logprobs import TRUTH_CHUNK, TRUTH_ROWS
from bench.kernels.problems import FWD, FWD_BWD, Case, Forward, Problem, Provider, Results, compiled, pair, truth_of
from lowmem_grpo.kernels import linear_divergence, linear_divergence_ref


def divergence_problem(case: Case) -> Problem:
    """Return a problem of hidden states of both, the teacher's near the student's, and a head whose logits are spread
    like a model's."""
    rows, size, vocabulary = (case.shape[name] for name in "NDV")
    generator = case.generator()
    hidden = case.randn(rows, size, generator=generator)
    given = {"teacher_hidden": hidden + case.randn(rows, size, generator=generator, scale=0.3),
             "weight": case.randn(vocabulary, size, generator=generator, scale=2 / size**0.5)}
    upstream = {"divergence": torch.full((rows,), 1 / rows, device=case.device)}
    product = 2 * rows * size * vocabulary
    return Problem(case, {"hidden": hidden}, given, upstream, lambda: divergence_truth(hidden, given, upstream),
                   flops={FWD: 2 * product, FWD_BWD: 3 * product})


def divergence_truth(hidden: Tensor, given: Results, upstream: Results) -> Results:
    """Return the results of the first rows in float64, computed in chunks: a row's results depend on no other row."""
    tensors = hidden, given["teacher_hidden"], upstream["divergence"]
    parts = [
        truth_of(reference, {"hidden": some}, {"teacher_hidden": teacher, "weight": given["weight"]},
                 {"divergence": grad})
        for some, teacher, grad in zip(*(each[:TRUTH_ROWS].split(TRUTH_CHUNK) for each in tensors), strict=True)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def ours(hidden: Tensor, teacher_hidden: Tensor, weight: Tensor) -> Results:
    found = linear_divergence(hidden, teacher_hidden, weight)
    return {"divergence": found.divergence, "entropy": found.entropy}


def reference(hidden: Tensor, teacher_hidden: Tensor, weight: Tensor) -> Results:
    found = linear_divergence_ref(hidden, teacher_hidden, weight)
    return {"divergence": found.divergence, "entropy": found.entropy}


def by_hand(hidden: Tensor, teacher_hidden: Tensor, weight: Tensor) -> Results:
    """Compute the products in the model's dtype, and the softmax in float32."""
    log_p, log_q = ((each @ weight.T).float().log_softmax(-1) for each in (hidden, teacher_hidden))
    return {"divergence": (log_p.exp() * (log_p - log_q)).sum(-1)}


def trl_chunked(problem: Problem) -> Forward:
    """Return the function of TRL's DistillationTrainer, with its tiles; it recomputes them in the backward pass."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def forward(hidden: Tensor, teacher_hidden: Tensor, weight: Tensor, **_: Any) -> Results:
        found = ChunkedDivergenceFunction.apply(hidden, weight, None, teacher_hidden, weight, None, 1.0)
        return dict(zip(("divergence", "entropy"), found, strict=True))

    return forward


PROBLEMS = {"linear_divergence": (divergence_problem, [
    *pair(ours, reference, "whole logits of both in float32, and so are the products"),
    compiled(by_hand, "of both log_softmax over whole logits; no entropy"),
    Provider("trl_chunked", trl_chunked, "trl", "its DistillationTrainer's function and tiles"),
])}
