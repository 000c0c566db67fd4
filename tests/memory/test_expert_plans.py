"""Plans of mixtures of experts: their weights, what a step on them holds, and Qwen3-30B-A3B on 24 GiB."""

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from memory import LiveStorage
from mixtures import problem

from bench.memory import weigh
from lowmem_grpo.memory import training_step
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.layer_forms import ExpertForm
from lowmem_grpo.memory.model_shape import ModelShape, named_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.planner import plan
from lowmem_grpo.memory.rows import build
from lowmem_grpo.memory.training_step import StepShape
from lowmem_grpo.utils import GIB

routed = import_module("lowmem_grpo.kernels.routed_experts")  # whose function has its name
NEAR = 0.05
NAME = "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize(("changes", "context"), [
    pytest.param({}, 8192, marks=pytest.mark.slow), ({"num_hidden_layers": 4}, 8192),
    ({"num_hidden_layers": 4, "mlp_only_layers": [1]}, 2048),  # a layer with an MLP, frozen
    ({"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}, 4096),
])
@pytest.mark.every(3)
def test_weights_are_planned_to_the_byte_and_a_step_within_five_percent(changes: dict[str, Any], context: int) -> None:
    config = named_config(NAME) | changes
    found = weigh.weigh(config, [context])
    settings = RunSettings(context, max_tokens=context, mlp_tile=4096, chunk_rows=1024, optim="adamw_8bit",
                           host_embedding=False)
    planned = build(ModelShape.from_config(config), settings, device("1024GiB"))
    rows = {row.name: row.train for row in planned.rows}
    assert rows["weights"] + rows["embedding"] + rows["head"] == found.weights
    assert rows["adapters"] == found.adapters and rows["gradients"] == found.gradients
    assert math.isclose(planned.train_allocated, found.device, rel_tol=NEAR)
    beside = found.device - found.activations
    assert math.isclose(planned.train_allocated - beside, found.activations, rel_tol=NEAR)


def test_thirty_billion_weights_take_sixteen_gib_and_train_on_24() -> None:
    planned = plan(named_config(NAME), RunSettings(2048, engine="transformers"), device("24GiB"))
    rows = {row.name: row.train for row in planned.rows}
    assert rows["weights"] + rows["embedding"] + rows["head"] <= 16 * GIB
    assert planned.fits and planned.concurrent_sequences == 8


def test_what_the_experts_hold_inside_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (training_step.PIECE, training_step.GROUPED_ROWS) == (routed.PIECE, routed.GROUPED_ROWS)
    monkeypatch.setattr("lowmem_grpo.kernels.nf4.REFERENCE_ELEMENTS", 2**12)  # temporaries of the CPU path
    tokens, experts = 4096, ExpertForm(1, 3, 2, 64)
    given = problem(tokens, (3, 2, 128, 64), dtype=torch.bfloat16)
    x, weights = given["x"].detach(), given["weights"].detach()
    with LiveStorage() as storage:
        routed.routed_backward(x, x, given["ids"], weights, *routed.flat(given["gate_up"], given["down"]))
    shape = ModelShape.from_config(named_config(NAME) | {"hidden_size": 128})
    step = StepShape(shape, RunSettings(tokens), tokens)
    assert 0.8 * storage.peak <= step.at_experts(experts) <= 1.3 * storage.peak


def test_experts_in_a_form_in_which_they_are_not_held_have_no_plan() -> None:
    with pytest.raises(ValueError, match=r"not held in FP8; plan it in 4 bits, or in 16"):
        ModelShape.from_config(named_config(NAME)).weight_bytes("fp8")
    with pytest.raises(ValueError, match=r"mixtral has several experts.*plans are made for Qwen3-MoE only"):
        ModelShape.from_config(named_config(NAME) | {"model_type": "mixtral", "num_local_experts": 8})
