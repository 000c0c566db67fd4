"""A token field that a test declares: computed under the base behind another prompt, packed, read in the loss."""

from dataclasses import replace
from operator import attrgetter, methodcaller
from typing import Any

import pytest
import torch
from trainer_runs import exact, learner

from lowmem_grpo.losses.objective import Objective, PolicyOutputs, StepTotals
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.types import TOKEN_FIELDS, LossOutput, MicroBatch, Rollout, RolloutGroup, Source, TokenField

HINT, PROMPT, COMPLETIONS = [9, 8], [5, 6, 7], ([8, 9, 10, 11], [12, 13])


def hinted(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    return [replace(group, prompt_ids=HINT + group.prompt_ids) for group in groups]


TOY = TokenField("toy", value=attrgetter("logprobs"), source=Source(methodcaller("base_model"), hinted))


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
