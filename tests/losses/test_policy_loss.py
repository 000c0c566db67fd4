"""The loss against formulas written out token by token in float64, in value and gradient to 1e-10."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_loss import (
    LENGTHS,
    LONGEST,
    STEP,
    close,
    close_with_gradients,
    denominator,
    example,
    naive_loss,
    naive_phi,
    places_of,
)
from tables import every_row, pairwise
from torch import Tensor

from lowmem_grpo.losses.loss_settings import LossSettings
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.losses.objective import Reducer
from lowmem_grpo.losses.policy_loss import grpo_loss
from lowmem_grpo.types import LossOutput

Options = dict[str, Any]
LEVELS = ("token", "sequence", "sequence_token")
HIGH: list[Options] = [{"epsilon": 0.2, "epsilon_high": high} for high in (None, 0.5)]
DELTA: list[Options] = [{"delta": delta} for delta in (None, 1.9)]
GSPO_CLIPS = [{"epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None}, *(
    {"epsilon": 0.2, "epsilon_high": high, "delta": delta} for high, delta in itertools.product((0.2, 0.5), (None, 1.9))
)]
CHOICES: dict[str, list[list[Options]]] = {  # the options that a loss type has
    **{name: [HIGH, DELTA, [{"importance_sampling_level": level} for level in LEVELS]]
       for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")},
    **{name: [GSPO_CLIPS] for name in ("gspo", "gspo_token")},
    "cispo": [[{"epsilon_high": high} for high in (1.2, 5.0)], [{"importance_sampling_level": v} for v in LEVELS]],
    "sapo": [[{"sapo_temperature_pos": pos, "sapo_temperature_neg": neg} for pos, neg in ((1.0, 1.05), (0.7, 2.3))],
             [{"importance_sampling_level": level} for level in LEVELS]],
    "vespo": [[{"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0},
               {"vespo_k_pos": 0.7, "vespo_lambda_pos": 0.3, "vespo_k_neg": 1.1, "vespo_lambda_neg": 0.9}]],
    "gmpo": [[{"epsilon": epsilon, "epsilon_high": high} for epsilon, high in ((0.4, None), (0.1, 0.3))]],
    "reinforce": [], "rloo": [HIGH, DELTA],
}
ESTIMATORS: list[Options] = [{"beta": 0.07, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3")]
WEIGHED: list[Options] = [{"use_bias_correction_kl": weighed} for weighed in (True, False)]


def joined(loss_type: str, parts: Iterable[Options]) -> Options:
    return {"loss_type": loss_type} | {name: value for part in parts for name, value in part.items()}


def plain(loss_type: str) -> list[Options]:
    """Every combination of the options of a loss type, without a KL term."""
    return [joined(loss_type, (*parts, {"beta": 0.0})) for parts in itertools.product(*CHOICES[loss_type])]


def with_kl(loss_type: str) -> list[Options]:
    """Every combination of the options of a loss type and of its KL term."""
    return [joined(loss_type, parts) for parts in itertools.product(*CHOICES[loss_type], ESTIMATORS, WEIGHED)]


def few_with_kl(loss_type: str) -> list[Options]:
    """Of `with_kl`, cases in which every pair of options occurs: the formula that they share has all, with grpo."""
    axes = {str(number): axis for number, axis in enumerate((*CHOICES[loss_type], ESTIMATORS, WEIGHED))}
    return [joined(loss_type, case.values) for case in pairwise(**axes)[1]]


PLAIN = [case for loss_type in CHOICES for case in plain(loss_type)]
CASES = PLAIN + [case for loss_type in CHOICES for case in with_kl(loss_type)]
each_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def ours(tokens: dict[str, Tensor], options: Options, on_policy: bool = False, **changes: Any) -> LossOutput:
    """grpo_loss of the same case."""
    given = tokens | ({"old_logprobs": None} if on_policy else {})
    return grpo_loss(**(given | {"max_completion_length": LONGEST} | options | STEP | changes))


def part_of(tokens: dict[str, Tensor], places: list[int]) -> dict[str, Tensor]:
    """The tokens at these places, in this order; their sequences numbered from 0, as in a batch of their own."""
    part = {name: value[torch.tensor(places, dtype=torch.int64)] for name, value in tokens.items()}
    return part | {"sequence_ids": part["sequence_ids"].unique(return_inverse=True)[1]}


def gradient_of(loss: Tensor, tokens: dict[str, Tensor]) -> Tensor:
    return torch.autograd.grad(loss, tokens["logprobs"], retain_graph=True)[0]


# The formulas


def test_every_loss_type_is_held_to_a_formula() -> None:
    assert set(CHOICES) == set(LOSS_TYPES), "list the options of a new loss type in CHOICES, at the top of this file"
    for loss_type, choices in CHOICES.items():
        assert {name for part in choices for option in part for name in option} == set(LOSS_TYPES[loss_type].options)


def assert_formula(tokens: dict[str, Tensor], case: Options, on_policy: bool = False) -> None:
    result, expected = ours(tokens, case, on_policy).loss, naive_loss(tokens, case, on_policy)
    close_with_gradients(result, expected, tokens["logprobs"])


@each_loss_type
@pytest.mark.every(2)
def test_loss_and_gradient_are_the_formulas(loss_type: str) -> None:
    tokens = example()
    for case in (*plain(loss_type), *(with_kl if loss_type == "grpo" else few_with_kl)(loss_type)):
        for on_policy in (False, True):
            assert_formula(tokens, case, on_policy)


@each_loss_type
def test_tokens_may_have_advantages_of_their_own(loss_type: str) -> None:
    tokens = example(seed=1, token_advantages=True)
    for case in plain(loss_type):
        assert_formula(tokens, case)


@each_loss_type
def test_without_counts_the_means_are_over_this_call(loss_type: str) -> None:
    tokens, case = example(), next(case for case in PLAIN if case["loss_type"] == loss_type)
    own = ours(tokens, case, num_sequences_in_step=None, num_tokens_in_step=None).loss
    expected = naive_loss(tokens, case, False, sequences=len(LENGTHS), count=sum(LENGTHS))
    close_with_gradients(own, expected, tokens["logprobs"])


def test_the_example_clips_on_every_side() -> None:
    tokens = example()
    for level in ("token", "sequence"):
        case = {"loss_type": "dapo", "epsilon": 0.1, "importance_sampling_level": level}
        metrics = ours(tokens, case).metrics
        assert 0 < metrics["clip_ratio/low_mean"] < 1 and 0 < metrics["clip_ratio/high_mean"] < 1
    ratio = (tokens["logprobs"] - tokens["old_logprobs"]).exp()
    assert ((ratio > 1.9) & (tokens["advantages"] < 0)).any()
    assert ((ratio > 1.2) & (ratio < 1.5) & (tokens["advantages"] > 0)).any()


def test_gspo_token_has_gspos_gradient_and_exactly_its_ratio_where_advantages_are_the_sequences() -> None:
    for seed in range(5):
        tokens = example(seed)
        losses = [ours(tokens, {"loss_type": name, "epsilon": 0.2}).loss for name in ("gspo", "gspo_token")]
        close_with_gradients(*losses, tokens["logprobs"])
        tokens = {name: value.detach().float() for name, value in tokens.items()}
        tokens |= {"sequence_ids": tokens["sequence_ids"].long(), "old_logprobs": tokens["old_logprobs"] * 20}
        assert torch.equal(*(ours(tokens, {"loss_type": name, "epsilon": 0.2, "epsilon_high": 9.0}).loss
                             for name in ("gspo", "gspo_token")))


def test_gspo_token_has_another_gradient_where_advantages_of_tokens_differ() -> None:
    tokens = example() | {"advantages": torch.ones(sum(LENGTHS)).double()}
    tokens["advantages"][0] = 3.0  # of three tokens
    first, second = (gradient_of(ours(tokens, {"loss_type": name, "epsilon": 9.0}).loss, tokens)
                     for name in ("gspo", "gspo_token"))
    close(first[:3], first[:1].expand(3))  # one gradient for all tokens of a sequence
    close(second[0], 3 * second[1])  # each token by its own advantage
    close(first[3:], second[3:])


def test_the_kl_term_has_the_ratios_own_gradient() -> None:
    """Off-policy, weighed by the ratio of tokens, it is the gradient of w KL, not of sg(w) KL."""
    tokens = example() | {"advantages": torch.zeros(sum(LENGTHS)).double()}
    for estimator, level in itertools.product(("k1", "k2", "k3"), LEVELS):
        case = {"loss_type": "bnpo", "beta": 1.0, "kl_estimator": estimator, "importance_sampling_level": level,
                "epsilon": 0.2, "delta": None, "use_bias_correction_kl": True}
        assert_formula(tokens, case)
        gradients = [gradient_of(ours(tokens, case | {"use_bias_correction_kl": weighed}).loss, tokens)
                     for weighed in (True, False)]
        assert not torch.allclose(*gradients), case


# What a batch is made of does not change the step


@settings(deadline=None, max_examples=80)
@given(
    case=st.sampled_from(CASES), order=st.permutations(range(len(LENGTHS))), first=st.integers(0, len(LENGTHS)),
    on_policy=st.booleans(), seed=st.integers(0, 9),
)
def test_micro_batches_and_their_order_change_neither_loss_nor_gradient(
    case: Options, order: list[int], first: int, on_policy: bool, seed: int
) -> None:
    tokens = example(seed)
    places = places_of(tokens["sequence_ids"])
    split = [[t for sequence in part for t in places[sequence]] for part in (order[:first], order[first:])]
    shares = sum(ours(part_of(tokens, part), case, on_policy).loss for part in split)
    close_with_gradients(shares, ours(tokens, case, on_policy).loss, tokens["logprobs"])


@settings(deadline=None, max_examples=80)
@given(case=st.sampled_from(CASES), order=st.permutations(range(sum(LENGTHS))), on_policy=st.booleans())
def test_tokens_of_sequences_may_lie_interleaved(case: Options, order: list[int], on_policy: bool) -> None:
    tokens = example()
    mixed = {name: value[torch.tensor(order)] for name, value in tokens.items()}
    close_with_gradients(
        ours(mixed, case, on_policy).loss, ours(tokens, case, on_policy).loss, tokens["logprobs"]
    )


@settings(deadline=None, max_examples=40)
@given(case=st.sampled_from(PLAIN), idle=st.sets(st.integers(0, len(LENGTHS) - 1)), seed=st.integers(0, 9))
def test_sequences_without_advantage_get_no_gradient_and_change_no_other(
    case: Options, idle: set[int], seed: int
) -> None:
    tokens = example(seed)
    without = torch.tensor([sequence in idle for sequence in tokens["sequence_ids"].tolist()])
    tokens["advantages"] = tokens["advantages"].masked_fill(without, 0.0)
    kept = (~without).nonzero().squeeze(-1).tolist()
    whole = ours(tokens, case).loss
    assert not gradient_of(whole, tokens)[without].any()
    close_with_gradients(ours(part_of(tokens, kept), case).loss, whole, tokens["logprobs"])


@settings(deadline=None, max_examples=80)
@given(
    case=st.sampled_from(CASES), order=st.permutations(range(len(LENGTHS))), first=st.integers(0, len(LENGTHS)),
    seed=st.integers(0, 9), mode=st.sampled_from([None, "token_truncate", "sequence_truncate"]),
)
def test_metrics_of_micro_batches_reduce_to_the_whole_steps(
    case: Options, order: list[int], first: int, seed: int, mode: str | None
) -> None:
    correction = {"correct_mismatch": True, "vllm_importance_sampling_mode": mode, "off_policy_mask_threshold": 0.1}
    tokens = example(seed)
    places = places_of(tokens["sequence_ids"])
    reducer, whole = Reducer(), ours(tokens, case, **(correction if mode else {}))
    for part in (order[:first], order[first:]):
        own = [t for sequence in part for t in places[sequence]]
        out = ours(part_of(tokens, own), case, **(correction if mode else {}))
        reducer.add(out.metrics, -1.0, out.counts)  # every mean says what it is over: no weight of the call's own
        reducer.keep(out.samples)
    assert whole.metrics and reducer.result() == pytest.approx(
        {name: value.item() for name, value in whole.metrics.items()}, rel=1e-9, abs=1e-12
    )
    for name, values in whole.samples.items():
        close(reducer.sampled(name).sort().values, values.sort().values)


def test_a_call_without_tokens_has_a_loss_and_no_metrics() -> None:
    nothing = part_of(example(), [])
    for loss_type in LOSS_TYPES:
        result = ours(nothing, {"loss_type": loss_type, "beta": 0.07})
        assert result.loss == 0 and result.loss.requires_grad and not result.metrics


# On-policy


@each_loss_type
def test_on_policy_ratio_and_weight_are_exactly_one_and_nothing_is_clipped(loss_type: str) -> None:
    for case in plain(loss_type):
        result = ours(example(), case, on_policy=True)
        assert torch.equal(result.samples["ratio"], torch.ones(sum(LENGTHS)).double())
        clipping = {name: value for name, value in result.metrics.items() if "clip" in name}
        assert not any(value.any() for value in clipping.values()), case
        assert bool(clipping) == (LOSS_TYPES[loss_type].metrics in ("clip", "cispo", "gmpo"))
        assert loss_type != "vespo" or result.metrics["vespo/phi_seq_mean"] == 1


@each_loss_type
def test_on_policy_the_gradient_is_the_policy_gradient(loss_type: str) -> None:
    """d loss / d logp = -A times the token's weight, whatever is clipped, gated or reshaped off-policy. In rloo a
    completion is one action, so each of its tokens has the weight of the completion."""
    tokens = example()
    lengths = torch.tensor(LENGTHS)[tokens["sequence_ids"]].tolist()
    lengths = [1] * len(lengths) if loss_type == "rloo" else lengths
    over = [denominator(loss_type, length, sequences=7, count=31.5) for length in lengths]
    expected = -tokens["advantages"] / torch.tensor(over).double()
    for case in plain(loss_type):
        close(gradient_of(ours(tokens, case, on_policy=True).loss, tokens), expected)


@each_loss_type
def test_old_logprobs_that_are_the_policys_give_the_same_loss_as_none(loss_type: str) -> None:
    tokens, term = example(), {"beta": 0.07}
    for case in plain(loss_type):
        given = ours(tokens, case | term, old_logprobs=tokens["logprobs"].detach())
        assert torch.equal(given.loss, ours(tokens, case | term, on_policy=True).loss), case


# What a loss reports


@every_row("epsilon_high", [None, 0.05, 0.9])
@every_row("delta", [None, 2.5])
def test_clip_metrics_count_the_tokens_whose_gradient_is_gone(
    epsilon_high: float | None, delta: float | None
) -> None:
    tokens = example()
    result = ours(tokens, {"loss_type": "bnpo", "epsilon_high": epsilon_high, "delta": delta})
    ratio = (tokens["logprobs"] - tokens["old_logprobs"]).exp()
    by_delta = torch.zeros_like(ratio).bool() if delta is None else (ratio > delta) & (tokens["advantages"] < 0)
    gone = (gradient_of(result.loss, tokens) == 0) & ~by_delta  # which no metric of TRL's counts
    close(result.metrics["clip_ratio/region_mean"], gone.double().mean())
    for name, side in (("low_mean", tokens["advantages"] < 0), ("high_mean", tokens["advantages"] > 0)):
        close(result.metrics[f"clip_ratio/{name}"], (gone & side).double().mean())
    shares = {name: [(gone & side)[tokens["sequence_ids"] == s].double().mean().item() for s in range(len(LENGTHS))]
              for name, side in (("low", tokens["advantages"] < 0), ("high", tokens["advantages"] > 0))}
    close(result.metrics["clip_ratio/low_min"].item(), min(shares["low"]))
    close(result.metrics["clip_ratio/high_max"].item(), max(shares["high"]))


def test_clip_metrics_of_sequence_ratios_weigh_all_sequences_the_same() -> None:
    tokens = example()
    ratios = [(tokens["logprobs"] - tokens["old_logprobs"])[places].mean().exp().item()
              for places in places_of(tokens["sequence_ids"]).values()]
    expected = [ratio < 0.9 if advantage < 0 else ratio > 1.1
                for ratio, advantage in zip(ratios, (1.5, -0.7, -1.1, 0.4), strict=True)]
    assert 0 < sum(expected) < len(LENGTHS)
    result = ours(tokens, {"loss_type": "gspo", "epsilon": 0.1, "epsilon_high": 0.1})
    close(result.metrics["clip_ratio/region_mean"].item(), sum(expected) / len(LENGTHS))
    assert result.counts["clip_ratio/region_mean"] == len(LENGTHS)


def test_metrics_of_gmpo_cispo_and_vespo_are_their_formulas() -> None:
    tokens, vespo = example(), next(case for case in PLAIN if case["loss_type"] == "vespo")
    log_ratio = (tokens["logprobs"] - tokens["old_logprobs"]).detach()
    discouraged, encouraged = tokens["advantages"] < 0, tokens["advantages"] > 0
    phis = [naive_phi([log_ratio[t] for t in places], tokens["advantages"][places[0]], vespo)
            for places in places_of(tokens["sequence_ids"]).values()]
    gmpo = {"loss_type": "gmpo", "epsilon": 0.3, "epsilon_high": 0.5}
    for options, name, expected in (
        (gmpo, "clip_ratio/low_mean", ((log_ratio < -0.3) & discouraged).double().mean()),
        (gmpo, "clip_ratio/high_mean", ((log_ratio > 0.5) & encouraged).double().mean()),
        ({"loss_type": "cispo", "epsilon_high": 1.3}, "cispo_clip_ratio",
         ((log_ratio.exp() > 1.3) & encouraged).double().mean()),
        (vespo, "vespo/phi_seq_mean", torch.tensor(sum(phis) / len(phis), dtype=torch.float64)),
    ):
        assert expected > 0
        close(ours(tokens, options).metrics[name], expected)


def test_kl_is_the_mean_of_the_term_and_zero_at_the_reference() -> None:
    tokens, case = example(), {"loss_type": "dapo", "beta": 0.07, "use_bias_correction_kl": False}
    apart = (tokens["ref_logprobs"] - tokens["logprobs"]).detach()
    close(ours(tokens, case).metrics["kl"], (apart.exp() - apart - 1).mean())
    assert ours(tokens | {"ref_logprobs": tokens["logprobs"].detach()}, case).metrics["kl"] == 0


def test_what_is_logged_holds_no_graph() -> None:
    for case in CASES:
        result = ours(example(), case, correct_mismatch=True)
        logged = [*result.metrics.values(), *result.samples.values(), result.policy_loss]
        assert not any(value.requires_grad for value in logged)
        means = {name for name in result.metrics if not name.endswith(("min", "max"))}
        assert means == set(result.counts)


# Refusals


@every_row(("options", "missing", "message"), [
    ({"loss_type": "ppo"}, "", "loss_type is 'ppo'; it must be one of grpo, bnpo, dr_grpo, dapo"),
    ({"loss_type": "dr_grpo"}, "max_completion_length", "divides by max_completion_length; pass it"),
    ({"beta": 0.04}, "ref_logprobs", r"beta is 0\.04, which needs ref_logprobs"),
    ({"vllm_importance_sampling_correction": True}, "rollout_logprobs", "mismatch is to be corrected, which needs"),
    ({"top_entropy_quantile": 0.5}, "entropy", r"top_entropy_quantile is 0\.5, which needs entropy"),
    ({"entropy_coef": 0.01}, "entropy", r"entropy_coef is 0\.01, which needs entropy"),
])
def test_an_unknown_loss_type_and_what_an_option_needs_and_lacks_are_refused(
    options: Options, missing: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ours(example(), {"loss_type": "grpo"} | options, **({missing: None} if missing else {}))


@pytest.mark.parametrize("name", ["logprobs", "advantages", "sequence_ids", "old_logprobs", "ref_logprobs",
                                  "rollout_logprobs", "entropy", "policy_mask"])
def test_tensors_that_would_be_broadcast_and_constants_with_a_gradient_are_refused(name: str) -> None:
    tokens = example()
    tokens |= {"policy_mask": tokens["advantages"] == tokens["advantages"], "entropy": tokens["advantages"].abs()}
    values = tokens[name].detach()
    wrong: list[tuple[Any, str]] = [
        (values[:, None], rf"{name} is \({len(values)}, 1\); it must be"), (values[:1], rf"{name} is \(1,\)"),
        (values[0], rf"{name} is \(\)"), (values.tolist(), f"{name} is a list"),
    ]
    if name in ("sequence_ids", "policy_mask"):
        wrong.append((values.float(), f"{name} is torch.float32; it must be .*{name}.to"))
    elif name not in ("logprobs", "entropy"):
        wrong.append((values.clone().requires_grad_(), rf"{name} needs a gradient.*{name}.detach\(\)"))
    for changed, message in wrong:
        if name == "logprobs":  # the others are measured by it
            message = message if isinstance(changed, list) or changed.ndim != 1 else r"is \(\d\d+,\); it must be"
        with pytest.raises(ValueError, match=message):
            ours(tokens | {name: changed}, {"loss_type": "dapo", "beta": 0.1, "entropy_coef": 0.1})


def test_settings_and_options_together_are_refused() -> None:
    with pytest.raises(TypeError, match="settings is a dict; give LossSettings, or its fields as options"):
        grpo_loss(torch.zeros(1), torch.ones(1), torch.zeros(1).long(), settings={"epsilon": 0.1})
    with pytest.raises(TypeError, match="settings and also epsilon"):
        grpo_loss(torch.zeros(1), torch.ones(1), torch.zeros(1).long(), settings=LossSettings(), epsilon=0.1)
