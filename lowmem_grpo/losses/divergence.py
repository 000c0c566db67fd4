"""How far a student's distribution over the next token is from a teacher's, for each of N tokens.

    forward KL  sum q (log q - log p)        reverse KL  sum p (log p - log q)        p: the student, q: the teacher
    between     m = (1 - alpha) p + alpha q;  alpha KL(q || m) + (1 - alpha) KL(p || m)       (arXiv 2306.13649)

Whole vocabularies are compared without logits by `kernels/linear_divergence.py`; here are the forms that look at some
tokens only, in plain torch. Log-probabilities are finite, in nats, of both sides at one temperature; gradients reach
the student only if the teacher's have none.
"""

import math

import torch
from torch import Tensor

WHOLE = -1e-7  # the most that the log of the mass of k tokens may be: what is left is above 0


def generalized_divergence(student: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """Return the divergence (N,) between distributions over K events, given as log-probabilities (N, K)."""
    if alpha == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if alpha == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixed = torch.logaddexp(student + math.log1p(-alpha), teacher + math.log(alpha))
    of_teacher, of_student = (part.exp() * (part - mixed) for part in (teacher, student))
    return (alpha * of_teacher + (1 - alpha) * of_student).sum(-1)


def top_k_divergence(student: Tensor, teacher: Tensor, alpha: float, tail: bool) -> Tensor:
    """Return the divergence (N,) over K tokens, from their log-probabilities (N, K). With `tail`, all other tokens
    count as one more; without, the K tokens are taken for the whole, and their probabilities sum to 1."""
    own, other = (with_tail(part) if tail else part.log_softmax(-1) for part in (student, teacher))
    return generalized_divergence(own, other, alpha)


def with_tail(logprobs: Tensor) -> Tensor:
    """Return (N, K + 1): the log-probabilities (N, K) and that of any other token."""
    mass = logprobs.logsumexp(-1, keepdim=True).clamp(max=WHOLE)
    return torch.cat([logprobs, torch.log(-torch.expm1(mass))], -1)


def sampled_token_loss(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return a loss (N,) whose gradient estimates that of the reverse KL from the sampled tokens alone: the policy
    gradient with the advantage log q - log p (as in arXiv 2601.20802)."""
    return (logprobs - teacher_logprobs).detach() * logprobs


def clipped_ratio(logprobs: Tensor, old_logprobs: Tensor, most: float) -> Tensor:
    """Return the weight (N,) of tokens sampled by an older policy: the ratio of probabilities, at most `most`."""
    return (logprobs.detach() - old_logprobs).clamp(max=math.log(most)).exp()


def mean_of_sequences(sequence_ids: Tensor, taught: Tensor, rollouts: int, sequences: float) -> Tensor:
    """Return the weights (N,) of a mean over sequences of each sequence's mean over its tokens that are `taught` (N,)
    bool. `sequence_ids` (N,) int64 are below `rollouts`; `sequences` counts all of the step's, also those without a
    taught token, which add 0."""
    lengths = torch.zeros(rollouts, dtype=torch.long, device=taught.device)
    lengths.index_add_(0, sequence_ids, taught.long())
    return 1 / (lengths.clamp(min=1)[sequence_ids] * sequences)
