"""What an objective may add: a token field computed under the base behind another prompt, and a loss over pairs."""

from dataclasses import replace
from operator import attrgetter, methodcaller
from typing import Any

import pytest
import torch
from trainer_runs import close, exact, learner, row

from lowmem_grpo.losses.objective import Objective, PolicyOutputs, StepTotals
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import TOKEN_FIELDS, LossOutput, MicroBatch, Rollout, RolloutGroup, TokenField

HINT, PROMPT, COMPLETIONS = [9, 8], [5, 6, 7], ([8, 9, 10, 11], [12, 13])


def hinted(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [replace(group, prompt_ids=HINT + group.prompt_ids) for group in groups]


TOY = TokenField("toy", value=attrgetter("logprobs"), under=methodcaller("base_model"), behind=hinted)


class Distillation(Objective):
    def needed_before(self, optimizer_steps: int) -> tuple[TokenField, ...]:
        return TOY, TOKEN_FIELDS["old_logprobs"]

    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        return LossOutput((outputs.logprobs - batch.at_trained(batch.fields["toy"])).sum() / totals.tokens, {})


def of_tokens(model: Any, prompt: list[int], ids: list[int]) -> torch.Tensor:
    whole = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return whole.gather(-1, torch.tensor(ids)[:, None])[:, 0]


@torch.no_grad()
def test_a_declared_field_is_computed_under_its_adapter_and_prompt_and_read_in_the_loss(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TOKEN_FIELDS, "toy", TOY)
    policy = Policy(exact())
    made, rollouts = learner(policy), [Rollout(ids, [0.0] * len(ids), "stop") for ids in COMPLETIONS]
    with policy.base_model():
        base = [of_tokens(policy.model, HINT + PROMPT, ids) for ids in COMPLETIONS]
    own = [of_tokens(policy.model, PROMPT, ids) for ids in COMPLETIONS]
    made.objective = Distillation()
    loss = made.measure([RolloutGroup({}, PROMPT, rollouts)])["loss"]
    assert loss == pytest.approx(((torch.cat(own) - torch.cat(base)).sum() / 6).item(), abs=1e-6) and abs(loss) > 1e-3
    for rollout, toy, old in zip(rollouts, base, own, strict=True):
        assert (rollout.fields["toy"] - toy).abs().max() < 1e-6 and (rollout.old_logprobs - old).abs().max() < 1e-6


class Preference(Objective):
    def loss(self, batch: MicroBatch, outputs: PolicyOutputs, totals: StepTotals) -> LossOutput:
        sums = outputs.logprobs.new_zeros(len(batch.rollouts))
        sums = sums.index_add(0, batch.at_trained(batch.sequence_ids), outputs.logprobs)
        signs = torch.tensor([1.0 if rollout.reward else -1.0 for rollout in batch.rollouts])
        margins = sums.new_zeros(int(batch.units.max()) + 1).index_add(0, batch.units, sums * signs)
        return LossOutput(-torch.nn.functional.logsigmoid(margins).sum() / totals.units, {})


def test_a_loss_over_pairs_is_the_same_however_few_completions_a_micro_batch_may_have() -> None:
    pairs = [RolloutGroup({}, [5, token], [Rollout([token, place], [0.0] * 2, "stop", reward=place, unit=0)
                                           for place in (0, 1)]) for token in (7, 8, 9)]
    found = []
    for size in (64, 1):
        policy = Policy(exact())
        made = learner(policy, per_device_train_batch_size=size)
        made.objective = Preference()
        found.append((made.forward_backward(pairs), row(policy.model)))
    (whole, expected), (cut, slopes) = found
    assert whole["micro_batches"] == 1 and cut["micro_batches"] == 3 and cut["loss"] == pytest.approx(whole["loss"])
    close(slopes, expected)
