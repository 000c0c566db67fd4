"""The step's loss written out sequence by sequence and token by token in float64; knows nothing of the package."""

import math
from typing import Any

import torch
from torch import Tensor

LENGTHS = [3, 1, 6, 4]
LONGEST = 10  # max_completion_length
STEP = {"num_sequences_in_step": 7, "num_tokens_in_step": 31.5}  # of which the example is a part
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
OF_ALL_TOKENS = ("bnpo", "dapo", "cispo", "vespo", "reinforce")  # means over the tokens of the step
OF_MEANS = ("grpo", "gspo", "gspo_token", "sapo", "gmpo", "rloo")  # means over sequences of means over tokens


def example(seed: int = 0, token_advantages: bool = False) -> dict[str, Tensor]:
    """Tokens of LENGTHS, far enough off-policy that every kind of clipping happens."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    logprobs = -1 + normal(0.3)
    ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    old = logprobs.detach() + normal(0.6)
    old[-LENGTHS[-1]:] += (logprobs.detach() - old)[-LENGTHS[-1]:].mean() - 1e-4  # one within GSPO's narrow bounds
    advantages = torch.tensor([1.5, -0.7, -1.1, 0.4], dtype=torch.float64)[ids]
    return {
        "logprobs": logprobs.requires_grad_(), "advantages": normal(1.0) if token_advantages else advantages,
        "sequence_ids": ids, "old_logprobs": old, "ref_logprobs": -1 + normal(0.5),
        "rollout_logprobs": old + normal(0.4),
    }


def places_of(sequence_ids: Tensor) -> dict[int, list[int]]:
    """The places of each sequence's tokens, in order."""
    found: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequence_ids.tolist()):
        found.setdefault(sequence, []).append(place)
    return found


def mean(values: list[Any]) -> Any:
    return sum(values) / len(values)


def bounded(value: Tensor, low: float, high: float) -> Tensor:
    """The value inside of the bounds; a constant, without gradient, outside."""
    return value if low <= value <= high else value.new_tensor(low if value < low else high)


def kl_of(estimator: str, logp: Tensor, ref: Tensor) -> Tensor:
    if estimator == "k1":
        return logp - ref
    if estimator == "k2":
        return (logp - ref) ** 2 / 2
    return (ref - logp).exp() - (ref - logp) - 1


def naive_phi(log_ratios: list[Tensor], advantage: Tensor, options: dict[str, Any], extra: float = 0.0) -> float:
    """VESPO's weight of a sequence, w^k exp(lambda (1 - w)); `extra` is the log of its correction."""
    log_w = min(max(sum(min(max(r.item(), -20), 20) for r in log_ratios) + extra, math.log(1e-8)), 20)
    side = "pos" if advantage >= 0 else "neg"
    k, scale = options[f"vespo_k_{side}"], options[f"vespo_lambda_{side}"]
    return math.exp(log_w) ** k * math.exp(scale * (1 - math.exp(log_w)))


def objective(
    log_ratios: list[Tensor], advantages: list[Tensor], t: int, weight: Tensor, logp: Tensor, options: dict[str, Any],
    extra: float,
) -> Tensor:
    """What the t-th token of a sequence is asked."""
    loss_type, A = options["loss_type"], advantages[t]  # noqa: N806
    epsilon = options.get("epsilon")
    upper = epsilon if options.get("epsilon_high") is None else options["epsilon_high"]
    if loss_type in CLIPPED or loss_type in ("gspo", "gspo_token", "rloo"):
        first = weight if options["delta"] is None else bounded(weight, -math.inf, options["delta"])
        return -min(first * A, bounded(weight, 1 - epsilon, 1 + upper) * A)
    if loss_type == "cispo":
        return -min(weight.item(), upper) * A * logp
    if loss_type == "sapo":
        tau = options["sapo_temperature_pos"] if A > 0 else options["sapo_temperature_neg"]
        return -4 / tau / (1 + (-tau * (weight - 1)).exp()) * A
    if loss_type == "vespo":
        return -naive_phi(log_ratios, A, options, extra) * A * logp
    if loss_type == "gmpo":
        sides = [(-math.inf, upper) if own > 0 else (-epsilon, math.inf) for own in advantages]
        return -mean([bounded(r, *side) for r, side in zip(log_ratios, sides, strict=True)]).exp() * A
    assert loss_type == "reinforce", f"write the formula of {loss_type} here, in tests/support/naive_loss.py"
    return -A * logp


def level_of(options: dict[str, Any]) -> str:
    own = {"gspo": "sequence", "gspo_token": "sequence_token", "rloo": "sequence_sum"}
    return options.get("importance_sampling_level") or own.get(options["loss_type"], "token")


def naive_loss(
    tokens: dict[str, Tensor], options: dict[str, Any], on_policy: bool, factors: list[float] | None = None,
    extras: dict[int, float] | None = None, sequences: float = 7, count: float = 31.5,
) -> Tensor:
    """The loss; `factors` multiply the policy term of each token, `extras` are logs of VESPO's corrections."""
    total = 0.0 * tokens["logprobs"].sum()
    for sequence, places in places_of(tokens["sequence_ids"]).items():
        logps = [tokens["logprobs"][t] for t in places]
        olds = [logp.detach() if on_policy else tokens["old_logprobs"][t]
                for t, logp in zip(places, logps, strict=True)]
        log_ratios = [logp - old for logp, old in zip(logps, olds, strict=True)]
        for t, place in enumerate(places):
            weight = log_ratios[t].exp()
            if level_of(options) == "sequence":
                weight = mean(log_ratios).exp()
            elif level_of(options) == "sequence_sum":
                weight = sum(log_ratios[1:], log_ratios[0]).exp()
            elif level_of(options) == "sequence_token":
                weight = mean(log_ratios).exp().detach() * logps[t].exp() / logps[t].exp().detach()
            extra = (extras or {}).get(sequence, 0.0)
            advantages = [tokens["advantages"][place] for place in places]
            loss = objective(log_ratios, advantages, t, weight, logps[t], options, extra)
            loss = loss * (1.0 if factors is None else factors[place])
            if options["beta"]:
                kl = kl_of(options["kl_estimator"], logps[t], tokens["ref_logprobs"][place])
                loss = loss + options["beta"] * kl * (weight if options["use_bias_correction_kl"] else 1)
            total = total + loss / denominator(options["loss_type"], len(places), sequences, count)
    return total


def denominator(loss_type: str, length: int, sequences: float, count: float) -> float:
    """What a token is divided by."""
    if loss_type in OF_ALL_TOKENS:
        return count
    if loss_type == "dr_grpo":
        return sequences * LONGEST
    if loss_type == "luspo":
        return sequences
    assert loss_type in OF_MEANS, f"add {loss_type} to OF_ALL_TOKENS or OF_MEANS in tests/support/naive_loss.py"
    return length * sequences


def close(actual: Any, expected: Any) -> None:
    """Equal to 1e-10."""
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)


def close_with_gradients(actual: Tensor, expected: Tensor, *of: Tensor) -> None:
    """Equal to 1e-10, in value and in the gradient of each of the tensors."""
    close(actual.detach(), expected.detach())
    found, wanted = (torch.autograd.grad(loss, of, allow_unused=True, materialize_grads=True,
                                         retain_graph=True)
                     for loss in (actual, expected))
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
