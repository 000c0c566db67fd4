"""What a loss may ask of the policy, by an objective that uses all of it: against whole logits, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_runs import close, exact, learner, row

from lowmem_grpo.losses.objective import Objective, PolicyOutputs, StepTotals
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import LossOutput, MicroBatch, Rollout, RolloutGroup

PROMPT, COMPLETIONS = [5, 6, 7], ([8, 9, 10, 11], [12, 13])


def toy_loss(logprobs: Tensor, entropy: Tensor, hidden: Tensor, near: Tensor) -> Tensor:
    return (near.exp().sum() - logprobs.sum() - 0.1 * entropy.sum() + hidden.sin().sum()) / 6


class Toy(Objective):
    temperature = 0.7

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        entropy, places = outputs.entropy(grad=True), torch.arange(len(outputs.targets)).repeat_interleave(2)
        near = outputs.several(places, outputs.targets[places] + torch.tensor([1, 2]).repeat(len(outputs.targets)))
        return LossOutput(toy_loss(outputs.logprobs, entropy, outputs.hidden, near), {"hits": outputs.hits.mean()})


class CountedHead(Policy):
    calls = 0

    def at_head(self, *args: Any) -> Any:
        self.calls += 1
        return super().at_head(*args)


def groups() -> list[RolloutGroup]:
    return [RolloutGroup({}, PROMPT, [Rollout(ids, [0.0] * len(ids), "stop") for ids in COMPLETIONS])]


def test_an_objective_trains_on_hidden_states_entropy_and_several_targets_as_whole_logits_say() -> None:
    policy = CountedHead(exact())
    made = learner(policy, max_grad_norm=1e9)
    made.objective, made.optimizer.param_groups[0]["lr"] = Toy(), 0.5
    expected = torch.zeros((), dtype=torch.float64)
    for ids in COMPLETIONS:
        out = policy.model(input_ids=torch.tensor([PROMPT + ids]), output_hidden_states=True)
        whole, targets = (out.logits[0, 2:-1] / 0.7).log_softmax(-1), torch.tensor(ids)
        near = whole.gather(-1, torch.stack([targets + 1, targets + 2], -1))
        expected = expected + toy_loss(whole.gather(-1, targets[:, None]), -(whole.exp() * whole).sum(-1),
                                       out.hidden_states[-1][0, 2:-1], near)
    slopes = torch.cat([slope.flatten() for slope in torch.autograd.grad(expected, policy.trainable)])
    before = torch.cat([parameter.detach().flatten() for parameter in policy.trainable])
    metrics = made.forward_backward(groups())
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-10) and 0 <= metrics["hits"] <= 1
    close(row(policy.model), slopes)
    made.optim_step()
    close(torch.cat([parameter.detach().flatten() for parameter in policy.trainable]), before - 0.5 * slopes)
    assert policy.calls == 1


def test_the_head_runs_for_no_loss_that_asks_for_hidden_states_alone() -> None:
    policy = CountedHead(exact())
    made, objective = learner(policy), Objective()
    objective.loss = lambda _, outputs, __: LossOutput(outputs.hidden.sin().sum(), {})  # type: ignore[method-assign]
    made.objective = objective
    made.forward_backward(groups())
    assert row(policy.model).norm() > 0 and not policy.calls


def test_an_entropy_whose_gradient_is_asked_for_after_the_head_has_run_is_refused() -> None:
    outputs = PolicyOutputs(torch.ones(2, 4, requires_grad=True), torch.ones(2).long(),
                            lambda *_: (torch.ones(2), torch.ones(2), torch.ones(2)), lambda *_: torch.ones(2))
    assert outputs.logprobs.tolist() == outputs.entropy().tolist()
    with pytest.raises(RuntimeError, match="entropy"):
        outputs.entropy(grad=True)
