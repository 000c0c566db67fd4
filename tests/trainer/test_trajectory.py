"""Trajectories of several turns: ids, masks, advantages, loss and gradient as worked out by hand, in float64.

The gradient depends on what the policy drew, given what it saw: not on how that is packed, ordered or split.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from tables import every_row
from torch import Tensor
from trainer_runs import close, exact, gradient, learner, row

from lowmem_grpo import GRPOConfig
from lowmem_grpo.losses.credit import assign_credit
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.losses.objective import StepTotals
from lowmem_grpo.models.packing import pack
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import TOKEN_FIELDS, Rollout, RolloutGroup, Split, Turn

PROMPT = [5, 6, 7]
IDS = [10, 11, 20, 21, 12, 13, 14, 22, 15, 16]  # two tokens drawn, two of context, three, one of context, two
TRAINED = [True, True, False, False, True, True, True, False, True, True]
REWRITTEN = [5, 6, 7, 30, 31]  # the prompt of its second sequence, which begins at the context of one token
SEQUENCES = [([*PROMPT, *IDS[:7]], [3, 4, 7, 8, 9]), ([*REWRITTEN, *IDS[7:]], [6, 7])]  # ids, and the drawn places
OTHER = [40, 41, 42]  # a completion of one turn, in the same group
OLD = [[-8.5, -7.75, 0, 0, -6.5, -9.0, -7.25, 0, -8.0, -6.75], [-7.5, -8.25, -6.0]]
HAND = ("grpo", "gspo", "dapo")


def trajectory() -> Rollout:
    turns = [Turn(PROMPT, [10, 11], [0.0] * 2, "stop", reward=0.5), Turn([], [12, 13, 14], [0.0] * 3, "stop"),
             Turn([], [15, 16], [0.0] * 2, "stop", reward=1.0)]
    return Rollout(list(IDS), list(OLD[0]), "stop", trained=list(TRAINED), splits=[Split(7, list(REWRITTEN))],
                   turns=turns, ending="done", rewards={"Game": 1.5}, reward=1.5, old_logprobs=torch.tensor(OLD[0]))


def answer() -> Rollout:
    turns = [Turn(PROMPT, OTHER, [0.0] * 3, "stop", reward=0.25)]
    return Rollout(list(OTHER), list(OLD[1]), "stop", turns=turns, ending="done", rewards={"Game": 0.25}, reward=0.25,
                   old_logprobs=torch.tensor(OLD[1]))


def group(**settings: Any) -> RolloutGroup:
    """Both, with the advantages of turns: rewards to go with discount 0.5 less their mean, by hand below."""
    made = RolloutGroup({}, list(PROMPT), [trajectory(), answer()])
    config = GRPOConfig(scale_rewards="none", turn_discount=0.5, **settings)
    assign_credit([made], config, config.turn_discount, config.state_weight, {"Game": 1.0}, ["Game"])
    return made


# to go: 0.5 + 0.5 * (0 + 0.5 * 1) = 0.75, 0 + 0.5 * 1 = 0.5, 1; and 0.25. The first turns have the mean 0.5, and no
# other turn has one to be compared with
ADVANTAGES = [[0.25, 0.25, 0, 0, 0, 0, 0, 0, 0, 0], [-0.25] * 3]


@pytest.fixture(scope="module")
def model() -> peft.PeftModel:
    return exact()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(exact())


def drawn(model: peft.PeftModel, ids: list[int], places: list[int]) -> Tensor:
    """Log-probabilities of the tokens at these places of a sequence, by transformers and peft alone."""
    logits = model(input_ids=torch.tensor([ids])).logits[0]
    return torch.stack([logits[place - 1].log_softmax(-1)[ids[place]] for place in places])


def loss_by_hand(kind: str, logprobs: list[Tensor], olds: list[list[float]], advantages: list[list[float]]) -> Tensor:
    """Token by token: the trajectory's tokens are one sequence of 7, whatever lies between them."""
    total = torch.zeros((), dtype=torch.float64)
    for logp, old, advantage in zip(logprobs, olds, advantages, strict=True):
        mean = (logp - torch.tensor(old).double()).mean()
        for t in range(len(old)):
            ratio = (mean if kind == "gspo" else logp[t] - old[t]).exp()
            term = -torch.min(ratio * advantage[t], ratio.clamp(0.8, 1.2) * advantage[t])
            total = total + term / (10 if kind == "dapo" else 2 * len(old))
    return total


@pytest.mark.parametrize("kind", HAND)
def test_loss_and_gradient_are_those_worked_out_by_hand(kind: str, model: peft.PeftModel, policy: Policy) -> None:
    """Not packed, without masks: each sequence through the plain model, and the loss token by token."""
    made = group()
    assert [list(torch.as_tensor(one.advantages)) for one in made.rollouts] == ADVANTAGES
    parts = [drawn(model, *one) for one in SEQUENCES]
    logprobs = [torch.cat(parts), drawn(model, [*PROMPT, *OTHER], [3, 4, 5])]
    near = [(one.detach() + 0.05 * torch.linspace(-1, 1, len(one))).float() for one in logprobs]  # some are clipped
    for rollout, values in zip(made.rollouts, near, strict=True):
        mask = torch.tensor(rollout.trained or [True] * 3)
        rollout.old_logprobs = torch.zeros(len(mask)).masked_scatter(mask, values)
    rewards = [[0.25] * 2 + [0.0] * 5, [-0.25] * 3]
    expected = loss_by_hand(kind, logprobs, [one.tolist() for one in near], rewards)
    model.zero_grad()
    expected.backward()
    (batch,) = pack([made])
    assert policy.logprobs(batch, 1.0)[0].dtype == torch.float64
    own = learner(policy, loss_type=kind)
    found = own.objective.loss(batch, own.outputs(batch, own.policy), StepTotals(2, 10, 10)).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-10)
    close(gradient(policy, [made], loss_type=kind), row(model))


def varied() -> list[RolloutGroup]:
    """Two groups, whose tokens all have an advantage of their own."""
    made = [RolloutGroup({}, list(PROMPT), [trajectory(), answer()]), RolloutGroup({}, [8], [answer(), trajectory()])]
    for number, each in enumerate(made):
        for rollout in each.rollouts:
            rollout.ref_logprobs = rollout.old_logprobs - 0.5
            rollout.advantage = 1.0
            signs = torch.tensor([1.0, -0.5, 0.25] * 4)[: len(rollout.completion_ids)]
            context = torch.tensor(rollout.trained or [True] * len(rollout.completion_ids))
            rollout.token_advantages = (signs + 0.125 * number) * context
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    **{kind: {"loss_type": kind, "max_completion_length": 16} for kind in LOSS_TYPES},
    "kl": {"beta": 0.25}, "bonus": {"entropy_coef": 0.1}, "sequence mask": {"off_policy_mask_threshold": 0.5},
    "corrected": {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_truncate"},
}


@every_row("name", OPTIONS)
def test_packing_and_order_do_not_change_the_gradient(name: str, policy: Policy) -> None:
    whole = gradient(policy, varied(), **OPTIONS[name])
    cuts: list[dict[str, Any]] = [{"max_tokens_per_micro_batch": 1}, {"per_device_train_batch_size": 2}, {}]
    for cut in cuts:
        turned = [replace(each, rollouts=each.rollouts[::-1]) for each in varied()[::-1]]
        close(gradient(policy, turned, **(OPTIONS[name] | cut)), whole)


def split_at(rollout: Rollout, prompt: list[int], *starts: int) -> Rollout:
    """The same tokens in several sequences, each with all that came before it as its prompt."""
    return replace(rollout, splits=[Split(start, [*prompt, *rollout.completion_ids[:start]]) for start in starts])


@every_row("name", OPTIONS)
@pytest.mark.slow
def test_splits_with_all_that_came_before_as_their_prompts_do_not_change_the_gradient(
    name: str, policy: Policy
) -> None:
    """Also where two episodes have the same prompt behind a split, which they share, and the groups have others."""
    made = varied()
    for each in made:
        each.rollouts = [replace(one, splits=[]) for one in [*each.rollouts, deepcopy(each.rollouts[0])]]
    whole = gradient(policy, made, **OPTIONS[name])
    for starts in ((4,), (2, 7), (3, 4, 9)):
        split = [replace(each, rollouts=[
            split_at(one, each.prompt_ids, *starts) if one.trained else one for one in each.rollouts
        ]) for each in made]
        close(gradient(policy, split, **OPTIONS[name]), whole)


@every_row("name", OPTIONS)
def test_context_counts_in_no_length_and_what_lies_there_is_never_read(name: str, policy: Policy) -> None:
    """NaN in every field of the context, and more of it behind the last token that was drawn."""
    made, full = varied(), varied()
    nan = float("nan")
    for rollout in (one for each in full for one in each.rollouts if one.trained):
        context = torch.tensor([*(not flag for flag in rollout.trained), True, True])
        for field in ("old_logprobs", "ref_logprobs", "token_advantages"):
            values = torch.cat([getattr(rollout, field), torch.zeros(2)])
            setattr(rollout, field, values.masked_fill(context, nan))
        rollout.completion_ids += [1, 2]
        rollout.trained += [False, False]
        rollout.rollout_logprobs = torch.tensor([*rollout.rollout_logprobs, 0, 0]).masked_fill(context, nan).tolist()
    assert torch.equal(gradient(policy, full, **OPTIONS[name]), gradient(policy, made, **OPTIONS[name]))


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dapo", "dr_grpo"])
def test_a_failed_episode_is_in_no_mean(kind: str, policy: Policy) -> None:
    """With a KL term every completion trains, but not one whose environment broke."""
    settings = {"loss_type": kind, "beta": 0.25, "max_completion_length": 16}
    made, joined = varied(), varied()
    joined[0].rollouts.append(replace(answer(), ending="environment_error", ref_logprobs=torch.zeros(3)))
    assert torch.equal(gradient(policy, joined, **settings), gradient(policy, made, **settings))


def test_recomputed_values_come_back_to_their_tokens_and_are_0_at_context(
    model: peft.PeftModel, policy: Policy
) -> None:
    made = group()
    learner(policy).fill_fields([made], TOKEN_FIELDS["old_logprobs"], TOKEN_FIELDS["entropy"])
    with torch.no_grad():
        expected = torch.cat([drawn(model, *one) for one in SEQUENCES])
    found, mask = made.rollouts[0].old_logprobs, torch.tensor(TRAINED)
    torch.testing.assert_close(found[mask].double(), expected, rtol=1e-6, atol=0)
    assert not found[~mask].any() and not made.rollouts[0].entropy[~mask].any() and made.rollouts[0].entropy[mask].all()


def test_the_tokens_of_highest_entropy_are_chosen_among_those_that_were_drawn(policy: Policy) -> None:
    made = varied()[:1]
    own = learner(policy, top_entropy_quantile=0.5, beta=0.1)
    own.prepare(made, 1)
    masks = [(one.policy_mask, torch.tensor(one.trained or [True] * 3)) for one in made[0].rollouts]
    assert sum(int(mask.sum()) for mask, _ in masks) == 5 and not any((mask & ~own).any() for mask, own in masks)
    assert own.totals(made, None) == StepTotals(2, 10, 5, 2)
