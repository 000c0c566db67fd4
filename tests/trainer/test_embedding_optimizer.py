"""The optimizer of what is trained beside LoRA: its own learning rate, whole matrices in 16 bits, moments in 8 bits."""

from typing import Any

import peft
import pytest
import torch
from small_models import random_model

from lowmem_grpo import GRPOConfig, SFTConfig
from lowmem_grpo.models.trained_set import TrainedSet
from lowmem_grpo.trainer.optim import learning_rates, own_or_made

BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}


def trained(**beside: Any) -> TrainedSet:
    """What a random model trains: LoRA, and what `beside` says."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **beside)
    return TrainedSet.of(peft.get_peft_model(random_model("Llama"), config))


@pytest.mark.parametrize("beside", [BOTH, {"trainable_token_indices": {"embed_tokens": [1], "lm_head": [2]}}],
                         ids=["whole", "rows"])
def test_embedding_and_head_have_their_own_rate_which_follows_the_schedule_and_is_logged(beside: Any) -> None:
    config = SFTConfig(learning_rate=5e-5, embedding_learning_rate=5e-6, weight_decay=0.01)  # as in Unsloth's notebooks
    held = trained(**beside)
    optimizer, schedule = own_or_made(None, held, config, 10)
    named = {group.get("name"): [id(parameter) for parameter in group["params"]] for group in optimizer.param_groups}
    assert named == {name or None: [id(w.parameter) for w in held if w.group == name]
                     for name in ("", "embed_tokens", "lm_head")}
    for _ in range(5):  # of 10, so that half of each rate is left
        optimizer.step()
        schedule.step()
    assert learning_rates(optimizer) == pytest.approx(
        {"learning_rate": 2.5e-5, "learning_rate/embed_tokens": 2.5e-6, "learning_rate/lm_head": 2.5e-6})
    usual, _ = own_or_made(None, held, SFTConfig(learning_rate=5e-5), 10)
    assert {group["lr"] for group in usual.param_groups} == {5e-5}


def test_a_rate_that_would_have_no_effect_is_refused_by_name() -> None:
    config = GRPOConfig(embedding_learning_rate=5e-6)
    with pytest.raises(ValueError, match="embedding_learning_rate is 5e-06, and the model trains LoRA alone: name"):
        own_or_made(None, trained(), config, 10)
    held = trained(**BOTH)
    with pytest.raises(ValueError, match="embedding_learning_rate is 5e-06, and optimizers brings its own rates"):
        own_or_made((torch.optim.SGD(held.parameters, lr=0.1), None), held, config, 10)
    for wrong in (0, -1e-6, float("nan"), float("inf"), "5e-6"):
        with pytest.raises(ValueError, match=r"embedding_learning_rate is .*; it must be above 0, or None"):
            GRPOConfig(embedding_learning_rate=wrong)
