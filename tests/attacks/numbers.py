"""Numbers that leave the range of float32, or its digits: every loss against float64, and the log-probability kernels.

    python -m tests.attacks.numbers            all comparisons, in minutes on one core
    python -m tests.attacks.numbers --quick    a part of them, in seconds

A comparison is a loss, a metric or a gradient. It fails where the float32 result is further from the float64 result
than rounding explains, or is NaN where the float64 result is a number. A result beyond float32 must be infinite.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import Tensor

from lowmem_grpo.kernels import linear_logprobs, linear_logprobs_ref
from lowmem_grpo.losses.advantages import STD_EPSILON
from lowmem_grpo.losses.loss_settings import LossSettings
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.losses.regularization import KL_ESTIMATORS, put_kl_in_reward
from lowmem_grpo.types import Rollout
from tests.attacks.attack import Verdict, attack_and_exit

Tokens = dict[str, Tensor]
ROUNDING = 2.0**-20  # of a result, for each unit of the largest log that it is an exponential of
SUMMED = 2.0**-24  # bound on the rounding of a sum, for each of its terms
LARGEST = torch.finfo(torch.float32).max
BEYOND = LARGEST / 1e4  # a sum with such a term may be infinite, or NaN
NEAR_ONE = 2.0**-23  # rounding of a number near 1, such as a sigmoid
LENGTHS = (3, 1, 7, 5)  # odd, and one sequence of one token
WINDOW: dict[str, Any] = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": 2.0}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {}, "token_truncate": {}, "token_truncate from below": WINDOW | {"vllm_importance_sampling_clip_max": None},
    "token_mask": WINDOW, "sequence_truncate": {}, "sequence_mask": {}, "geometric_mask": WINDOW,
    "k3_mask": {"vllm_importance_sampling_clip_max": 0.01},
}
TERMS: dict[str, dict[str, Any]] = {
    "": {}, "k3": {"beta": 0.1}, "k3 unweighed": {"beta": 0.1, "use_bias_correction_kl": False},
    "k1": {"beta": 0.1, "kl_estimator": "k1"}, "k2": {"beta": 0.1, "kl_estimator": "k2"},
    "off-policy mask": {"off_policy_mask_threshold": 0.1}, "token mask": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.01}, "mask and bonus": {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "delta": {"delta": 3.0}, "sequence level": {"importance_sampling_level": "sequence"},
}


def tokens_of(lengths: tuple[int, ...], seed: int = 0) -> Tokens:
    """Random tokens near the policy, float32; advantages of both signs and 0."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    logprobs, *others = -1 + 0.2 * torch.randn(4, count, generator=generator)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    names = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    return dict(zip(names, others, strict=True)) | {
        "logprobs": logprobs, "sequence_ids": ids, "advantages": torch.tensor([1.5, -0.7, 0.0, -1.1])[ids % 4],
        "entropy": torch.rand(count, generator=generator),
    }


def shifted(name: str, by: float, every: int = 2, praised: bool = False) -> Callable[[], Tokens]:
    """Tokens of which every second (or so) has one of its log-probabilities elsewhere; if `praised`, where A >= 0."""
    def make() -> Tokens:
        tokens = tokens_of(LENGTHS)
        moved = (torch.arange(sum(LENGTHS)) % every == 0) & ((tokens["advantages"] >= 0) | (not praised))
        return tokens | {name: torch.where(moved, tokens[name] + by, tokens[name])}

    return make


def long() -> Tokens:
    """A sequence of 20,000 tokens, each of which the sampler finds 0.005 less likely."""
    tokens = tokens_of((20_000, 3))
    drift = torch.where(tokens["sequence_ids"] == 0, 0.005, 0.0)
    return tokens | {"rollout_logprobs": tokens["old_logprobs"] - drift, "logprobs": tokens["old_logprobs"] + drift}


def cold() -> Tokens:
    """Log-probabilities as at a temperature of 0.01."""
    names = ("logprobs", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    return {name: 100 * value if name in names else value for name, value in tokens_of(LENGTHS).items()}


def at_reference() -> Tokens:
    """The policy is the reference, and far from what it was at the start of the update."""
    tokens = shifted("old_logprobs", -100.0)()
    return tokens | {"ref_logprobs": tokens["logprobs"].clone()}


def broken_reference() -> Tokens:
    tokens = tokens_of(LENGTHS)
    tokens["ref_logprobs"][4] = torch.nan
    return tokens


EXTREMES: dict[str, Callable[[], Tokens]] = {
    "ordinary": lambda: tokens_of(LENGTHS), "ratio overflows": shifted("old_logprobs", -100.0),
    "ratio vanishes": shifted("old_logprobs", 150.0), "sequence ratio overflows": shifted("old_logprobs", -400.0, 1),
    "ratio overflows, A >= 0": shifted("old_logprobs", -100.0, praised=True),
    "sequence ratio overflows, A >= 0": shifted("old_logprobs", -400.0, 1, praised=True),
    "policy back, A >= 0": shifted("logprobs", 100.0, praised=True),
    "mismatch overflows": shifted("rollout_logprobs", -100.0), "mismatch vanishes": shifted("rollout_logprobs", 150.0),
    "policy gone": shifted("logprobs", -150.0), "policy back": shifted("logprobs", 100.0),
    "policy and old gone": lambda: shifted("logprobs", -120.0)() | {
        "old_logprobs": shifted("old_logprobs", -110.0)()["old_logprobs"]},
    "reference gone": shifted("ref_logprobs", -150.0), "at the reference": at_reference,
    "NaN in the reference": broken_reference, "no tokens": lambda: tokens_of(()), "20,000 tokens": long, "cold": cold,
}


def outcome(tokens: Tokens, settings: LossSettings, correct: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """The loss, its gradients and its metrics in this dtype, in float64."""
    given: dict[str, Any] = {name: value.to(dtype) if value.is_floating_point() else value
                             for name, value in tokens.items()}
    leaves = [given[name].requires_grad_() for name in ("logprobs", "entropy")]
    out = grpo_loss(**given, settings=settings, correct_mismatch=correct, num_sequences=len(LENGTHS) + 1)
    grads = torch.autograd.grad(out.loss, leaves, materialize_grads=True, allow_unused=True)
    found = {"loss": out.loss, "gradient": grads[0], "gradient of the entropy": grads[1], **out.metrics}
    return {name: value.detach().double() for name, value in found.items()}


def unbounded(tokens: Tokens, settings: LossSettings) -> bool:
    """Whether a factor is beyond float32 with nothing to bound it: a ratio with A < 0, a weight without an upper bound.
    The result may then be infinite or NaN, which the guard sees, even if another factor would bring it back."""
    ratio, weight = (tokens[one] - tokens[other] > math.log(LARGEST)
                     for one, other in (("logprobs", "old_logprobs"), ("old_logprobs", "rollout_logprobs")))
    free = settings.vllm_importance_sampling_clip_max is None
    return bool(ratio[tokens["advantages"] < 0].any()) or bool(free and weight[tokens["advantages"] != 0].any())


def differs(ours: Tensor, truth: Tensor, slack: float, may_overflow: bool) -> str:
    """What is wrong with a float32 result; empty where nothing is. `slack` is a share of the largest number."""
    told = ~ours.isfinite() if may_overflow else torch.zeros_like(truth, dtype=torch.bool)
    beyond = truth.abs() > BEYOND
    sound = torch.where(beyond, ~(ours.abs() < BEYOND / 8), told | (ours.isfinite() == truth.isfinite()))
    if not sound.all():
        return f"got {ours[~sound].tolist()[:3]}, float64 has {truth[~sound].tolist()[:3]}"
    known = truth.isfinite() & ~beyond & ~told
    error, largest = ((values[known].abs().max() if known.any() else 0.0) for values in (ours - truth, truth))
    limit = slack * largest + NEAR_ONE
    return f"error {error:.2e}, allowed {limit:.2e}" if error > limit else ""


def losses(quick: bool) -> Iterator[Verdict]:
    """Every loss type with every correction, term and extreme that its settings allow."""
    few = ("k3", "mask and bonus"), ("none", "token_mask", "sequence_mask")
    terms, modes = few if quick else (tuple(TERMS), tuple(CORRECTIONS))
    for loss_type, mode, term in itertools.product(LOSS_TYPES, modes, terms):
        bounds, options = CORRECTIONS[mode], TERMS[term]
        correction = {} if mode == "none" else {"vllm_importance_sampling_mode": mode.split(" ")[0], **bounds}
        try:
            settings = LossSettings(loss_type=loss_type, max_completion_length=9, **correction, **options)
        except ValueError:
            continue  # refused: nothing to compare
        for extreme, make in EXTREMES.items():
            tokens = make()
            logs = [(tokens[name] - tokens["logprobs"]).abs().nan_to_num() for name in tokens if "logprobs" in name]
            largest = max((float(one.max()) for one in logs if one.numel()), default=0.0)
            slack = ROUNDING * (8 + largest) + SUMMED * len(tokens["logprobs"])
            truth, ours = (outcome(tokens, settings, mode != "none", dtype) for dtype in (torch.float64, torch.float32))
            for name, value in truth.items():
                if "gradient" in name and truth["loss"].abs() > BEYOND:
                    continue  # the loss is infinite, and no step is made
                told = " with ".join(filter(None, (loss_type, mode, term)))
                share = slack if name != "loss" else slack * max(1.0, 1 / float(value.abs()) if value else 0.0)
                damage = differs(ours[name], value, share, unbounded(tokens, settings))
                yield Verdict(f"loss: {extreme}", f"{told}: {name}", damage)


def run_head(function: Any, rows: int, trained: bool, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """logprobs, entropy and the gradients of hidden and, if it is trained, the head, in float64."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(size, 33, generator=generator).to(dtype).requires_grad_() for size in (rows, 1003))
    targets, grads = torch.randint(1003, (rows,), generator=generator), torch.randn(2, rows, generator=generator)
    logprobs, entropy = function(hidden, weight / 3 if trained else weight.detach() / 3, targets, **options)
    loss = (logprobs * grads[0]).sum() + (entropy * grads[1]).sum()
    found = torch.autograd.grad(loss, [hidden, weight][: 1 + trained])
    return [one.detach().double() for one in (logprobs, entropy, *found)]


def kernels(quick: bool) -> Iterator[Verdict]:
    """Log-probabilities, entropies and gradients of the kernels' CPU path, no further from float64 than plain torch."""
    asked: dict[str, Any] = {"return_entropy": True, "entropy_grad": True, "chunk_rows": 7}
    shapes = itertools.product((1.0, 0.01, 1e-4), (None, 30.0, 1000.0), (1, 63), (False, True))
    for temperature, softcap, rows, trained in list(shapes)[:: 3 if quick else 1]:
        options: dict[str, Any] = {"temperature": temperature, "softcap": softcap}
        truth, plain = (run_head(linear_logprobs_ref, rows, trained, dtype, **options)
                        for dtype in (torch.float64, torch.float32))
        ours = run_head(linear_logprobs, rows, trained, torch.float32, **options, **asked)
        for name, one, other, exact in zip(("logp", "entropy", "dhidden", "dweight"), ours, plain, truth, strict=False):
            error, allowed = ((found - exact).abs().max() for found in (one, other))
            limit = allowed + 8 * ROUNDING * exact.abs().max()
            damage = "" if error <= limit else f"error {error:.2e}, allowed {limit:.2e}"
            yield Verdict(f"kernel at temperature {temperature}", f"{name}, softcap {softcap}, {rows, trained}", damage)


def divergences() -> Iterator[Verdict]:
    """The KL estimates near 0, where differences lose their digits."""
    apart = torch.cat([sign * torch.logspace(-12, 1.5, 20_001) for sign in (-1, 1)])
    for name, estimate in KL_ESTIMATORS.items():
        truth, ours = estimate(-apart.double(), torch.zeros(1).double()), estimate(-apart, torch.zeros(1)).double()
        wrong = (ours - truth).abs() > 8 * ROUNDING * truth.abs()
        yield Verdict("KL near 0", f"{name}: digits", f"{int(wrong.sum())} of {len(apart)}" if wrong.any() else "")
        below = name != "k1" and bool((ours < 0).any())
        yield Verdict("KL near 0", f"{name}: sign", "negative" if below else "")


def advantages() -> Iterator[Verdict]:
    """A reference that is NaN or infinite at one token, with the KL term in the reward."""
    for broken in (torch.nan, torch.inf, -torch.inf):
        rollouts = [Rollout([1] * length, [-1.0] * length, "stop") for length in LENGTHS]
        for number, rollout in enumerate(rollouts):
            rollout.reward, rollout.ref_logprobs = float(number), torch.full((len(rollout.completion_ids),), -1.0)
        whole = [rollouts[0], *rollouts[2:]]
        put_kl_in_reward(whole, 0.1)
        expected = [rollout.token_advantages for rollout in whole]
        rollouts[1].ref_logprobs = torch.tensor([broken])
        put_kl_in_reward(rollouts, 0.1)
        equal = all(one.token_advantages is not None and other is not None
                    and torch.allclose(one.token_advantages, other, atol=STD_EPSILON)
                    for one, other in zip(whole, expected, strict=True))
        yield Verdict("KL in the reward", f"reference {broken}", "" if equal else "it moved other advantages")
        found = rollouts[1].token_advantages
        told = found is not None and not found.isfinite().any()
        yield Verdict("KL in the reward", f"reference {broken} is told", "" if told else "its own is a number")


def verdicts(quick: bool) -> Iterator[Verdict]:
    """Every comparison, or a part."""
    yield from divergences()
    yield from advantages()
    yield from kernels(quick)
    yield from losses(quick)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="A part of them, in seconds.")
def main(quick: bool) -> None:
    attack_and_exit(lambda _: verdicts(quick), "every comparison")


if __name__ == "__main__":
    main()
