"""Gradients in float64, to compare what must not depend on packing, order or splits."""

from typing import Any

import peft
import torch
from small_models import random_model, with_adapter
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lowmem_grpo import GRPOConfig
from lowmem_grpo.losses.loss_types import LOSS_TYPES
from lowmem_grpo.models.policy import Policy
from lowmem_grpo.train.grpo_objective import GRPOObjective
from lowmem_grpo.train.learner import Learner
from lowmem_grpo.types import RolloutGroup


def exact() -> peft.PeftModel:
    """A model that computes all of it in float64; transformers' own norms are in float32, whatever the weights are."""
    model = random_model("Llama")
    for name, norm in [(n, m) for n, m in model.named_modules() if isinstance(m, LlamaRMSNorm)]:
        made = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
        made.weight = norm.weight
        model.set_submodule(name, made)
    return with_adapter(model).double()


def learner(policy: Policy, **settings: Any) -> Learner:
    """With micro-batches as large as the step, unless `settings` say otherwise."""
    chosen: dict[str, Any] = {"loss_type": "grpo", "epsilon": 0.2, "per_device_train_batch_size": 64} | settings
    config = GRPOConfig(**{name: value for name, value in chosen.items()
                           if name != "epsilon" or LOSS_TYPES[chosen["loss_type"]].token_loss.__name__ == "clipped"})
    optimizer = torch.optim.SGD(policy.trainable, lr=0.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return Learner(policy, config, GRPOObjective(config), optimizer, scheduler)


def gradient(policy: Policy, groups: list[RolloutGroup], **settings: Any) -> Tensor:
    """Of the step's loss, all parameters in one row."""
    made = learner(policy, **settings)
    policy.model.zero_grad()
    made.forward_backward(groups)
    assert not made.guard.bad
    return row(policy.model)


def row(model: Any) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])
    assert found.isfinite().all() and found.abs().max() > 1e-4
    return found


def close(found: Tensor, expected: Tensor, allowed: float = 1e-10) -> None:
    assert (found - expected).norm() <= allowed * expected.norm()
