"""What is trained beside LoRA, and heads: a trained one, and one that gives a number."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import assert_alike
from packed_problem import batch_of, learned, learned_alone
from safetensors.torch import load_file
from small_models import random_model, scatter
from torch import Tensor

from lowmem_grpo import GRPOConfig
from lowmem_grpo.models.export.base_weights import live_weights
from lowmem_grpo.models.policy import Head, Policy
from lowmem_grpo.runs.checkpoint import load_checkpoint, save_checkpoint
from lowmem_grpo.trainer.optim import learning_rates, make_optimizer, make_scheduler

BATCH = batch_of([(3, [4]), (2, [5])])


def beside_lora(module: str, **settings: Any) -> Any:
    """A random model with LoRA, and with this module trained whole, or what the settings of LoRA say."""
    base = random_model("Llama")
    base.score = torch.nn.Linear(32, 1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM",
                             **settings or {"modules_to_save": [module]})
    return scatter(peft.get_peft_model(base, config))


@pytest.mark.parametrize(("module", "settings"), [
    ("norm", {"modules_to_save": ["model.norm"]}),
    ("embed_tokens", {"trainable_token_indices": BATCH.input_ids[:2].tolist()}),
])
def test_what_is_trained_beside_lora_has_its_rate_is_saved_and_is_the_bases_under_the_reference(
    module: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    policy, config = Policy(beside_lora(module, **settings)), GRPOConfig(learning_rate=1e-3)
    policy.keep_reference()
    optimizer = make_optimizer(policy.trained.groups({module: {"lr": 0.5}}), config)
    assert learning_rates(optimizer) == {"learning_rate": 1e-3, f"learning_rate/{module}": 0.5}
    run = policy.model, optimizer, make_scheduler(optimizer, config, 10)
    [norm] = [weight for weight in policy.trained if weight.base is not None]
    policy.logprobs(BATCH, 1.0)[0].sum().backward()
    optimizer.step()  # the first step of Adam is the rate
    moved = norm.parameter.detach().clone()
    assert torch.allclose((moved - norm.base).abs(), torch.tensor(0.5), atol=1e-3)
    folder = save_checkpoint(tmp_path, 1, *run, {}, policy.kept_adapters)
    assert load_file(folder / "adapter_model.safetensors").keys() == {weight.saved_name for weight in policy.trained}
    norm.parameter.data.zero_()
    load_checkpoint(folder, *run)
    with policy.reference():
        assert torch.equal(norm.parameter, norm.base)
    policy.move_reference(0.5)
    with policy.reference():
        assert torch.allclose(norm.parameter, (moved + norm.base) / 2)
    assert torch.equal(norm.parameter, moved)
    names = [weight.name for weight in live_weights(policy.model)]
    assert names == [weight.name for weight in live_weights(policy.model.unload())]


class Score(Head):
    def values(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight, self.bias)[:, 0]


def test_a_head_that_gives_a_number_takes_a_step_with_the_gradients_of_dense_autograd() -> None:
    model = beside_lora("score")
    twin, head = copy.deepcopy(model), Score(model.get_base_model().score)
    policy, dense = Policy(model, head=head), twin.get_base_model()
    optimizer = torch.optim.SGD(policy.trained.groups({}), lr=0.5)
    head.values(policy.at_trained(BATCH)[0]).square().sum().backward()
    parts = BATCH.input_ids.split(BATCH.cu_seqlens.diff().tolist())
    hidden = torch.cat([dense.model(part[None]).last_hidden_state[0] for part in parts])
    dense.score(BATCH.at_trained(hidden)).square().sum().backward()
    for weight in policy.trained:
        torch.testing.assert_close(weight.parameter.grad, twin.get_parameter(weight.name).grad, rtol=1e-4, atol=1e-5)
    begun = head.weight.detach().clone()
    optimizer.step()
    assert torch.allclose(head.weight, begun - 0.5 * head.weight.grad) and not torch.equal(head.weight, begun)
    with policy.base_model():
        assert torch.equal(head.weight, begun)


def test_a_vocabulary_head_that_is_trained_gets_its_gradient() -> None:
    model = beside_lora("lm_head")
    theirs = learned_alone(copy.deepcopy(model), BATCH)
    assert any("lm_head" in name for name in theirs[1])
    assert_alike(learned(Policy(model), BATCH), theirs)
