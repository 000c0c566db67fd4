"""Experts with biases, the clamped activation and LoRA against transformers' GptOssExperts and PEFT's own adapters."""

from typing import Any

import pytest
import torch
from accuracy import outcome
from mixtures import random
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from lowmem_grpo.kernels.frozen import FrozenStack
from lowmem_grpo.kernels.glu import ClampedSwiGLU
from lowmem_grpo.kernels.lora_factors import LoRA
from lowmem_grpo.kernels.routed_experts import routed_experts

pytestmark = pytest.mark.filterwarnings("ignore:.*_experts_implementation")
E, K, D, INNER, RANK = 8, 3, 32, 24, 4
NAMES = ["experts.gate_up_proj", "experts.down_proj"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = GptOssConfig(num_local_experts=E, hidden_size=D, intermediate_size=INNER)
        config._experts_implementation = "eager"
        self.experts = GptOssExperts(config)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y: Tensor = self.experts(x, ids, weights)
        return y


def adapted(adapters: list[str] = NAMES, dtype: torch.dtype = torch.float64) -> Any:
    """transformers' experts with PEFT's adapters; a third of the gates and ups lies beyond the limit."""
    block = Block()
    for seed, parameter in enumerate(block.parameters()):
        parameter.data = 2 * random(*parameter.shape, seed=seed)
    config = LoraConfig(r=RANK, lora_alpha=6, target_modules=[], target_parameters=adapters, init_lora_weights=False)
    return (get_peft_model(block, config) if adapters else block).to(dtype)


def adapters_of(model: nn.Module) -> dict[str, LoRA]:
    """PEFT's pairs as arguments of ours, by the parameter that each adapts."""
    found: dict[str, LoRA] = {}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            a, b = (getattr(module, name)["default"].weight for name in ("lora_A", "lora_B"))
            found[module.parameter_name.replace("_proj", "_lora")] = LoRA(a, b, module.scaling["default"])
    return found


def arguments(model: nn.Module, rows: int = 40, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of routed_experts with the weights of `model`; the last two experts take no row."""
    experts = next(module for module in model.modules() if isinstance(module, GptOssExperts))
    scores = random(rows, E - 2, seed=rows)
    values, ids = scores.softmax(-1).topk(K, -1)
    return {
        "x": random(rows, D, seed=1, dtype=dtype).requires_grad_(), "ids": ids,
        "weights": values.to(torch.promote_types(dtype, torch.float32)).requires_grad_(),
        **{name: FrozenStack.from_weights(getattr(experts, f"{name}_proj").detach().mT.contiguous())
           for name in ("gate_up", "down")},
        **{f"{name}_bias": getattr(experts, f"{name}_proj_bias").detach() for name in ("gate_up", "down")},
        "activation": ClampedSwiGLU(experts.alpha, experts.limit), **adapters_of(model),
    }


def theirs(model: nn.Module, given: dict[str, Any]) -> dict[str, Tensor]:
    """The output and gradients of PEFT's model for the arguments of ours."""
    def call(x: Tensor, weights: Tensor, **_: Any) -> Tensor:
        y: Tensor = model(x, given["ids"], weights)
        return y

    return outcome(call, given)


@pytest.mark.parametrize("adapters", [NAMES, NAMES[:1], NAMES[1:], []])
def test_outputs_and_gradients_are_those_of_transformers_with_pefts_adapters(adapters: list[str]) -> None:
    model = adapted(adapters)
    given = arguments(model)
    assert len(adapters_of(model)) == len(adapters)
    torch.testing.assert_close(outcome(routed_experts, given), theirs(model, given), rtol=1e-10, atol=1e-10)
