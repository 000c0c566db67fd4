"""Plans of hybrid models: gated delta nets' weights, adapters and states, and what a step on them holds."""

import math
from typing import Any

import pytest
import torch
from small_models import random_model
from transformers import Qwen3_5TextConfig

from bench.memory import weigh
from lowmem_grpo.engines.kv_cache import GrowingCache
from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.rows import build
from lowmem_grpo.models.policy import Policy

NEAR = 0.05
NARROWER = {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True}


def config_of(**changes: Any) -> dict[str, Any]:
    """Four layers with the sizes that transformers gives by default, which are those of a model of 9B."""
    fields = Qwen3_5TextConfig(num_hidden_layers=4, pad_token_id=0, **changes).to_dict()
    return {name: value for name, value in fields.items() if name in (
        "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "vocab_size", "tie_word_embeddings", "max_position_embeddings", "rope_parameters",
        "layer_types", "pad_token_id") or name.startswith("linear_")}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "chunk"), [({}, 64), (NARROWER, 256)], ids=["as by default", "narrower"])
def test_a_step_holds_what_was_planned_within_five_percent(changes: dict[str, Any], chunk: int) -> None:
    config, tokens = config_of(**changes), 1024
    found = weigh.weigh(config, [tokens], weigh.Features(logits_chunk=chunk))
    settings = RunSettings(tokens, max_tokens=tokens, mlp_tile=4096, chunk_rows=chunk, optim="adamw_8bit",
                           host_embedding=False)
    planned = build(ModelShape.from_config(config), settings, device("1024GiB"))
    rows = {row.name: row.train for row in planned.rows}
    assert rows["adapters"] == found.adapters
    assert math.isclose(rows["weights"] + rows["embedding"] + rows["head"], found.weights, rel_tol=1e-6)
    assert math.isclose(planned.train_allocated, found.device, rel_tol=NEAR)


def test_states_and_keys_of_a_sequence_are_planned_to_the_byte() -> None:
    model = random_model("Qwen3_5").to(torch.bfloat16)
    policy, cache = Policy(model), GrowingCache()
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        policy.backbone(input_ids=ids, past_key_values=cache, use_cache=True)
    assert cache.nbytes == ModelShape.from_config(model.config).kv_bytes(10)
    fields = model.config.to_dict()
    without = {name: value for name, value in fields.items() if name != "layer_types"}
    assert ModelShape.from_config(without) == ModelShape.from_config(fields)
