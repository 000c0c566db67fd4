"""Plans of hybrid models hold the states of gated delta nets and the keys of attention."""

import torch
from small_models import random_model

from lowmem_grpo.engines.kv_cache import GrowingCache
from lowmem_grpo.memory.model_shape import ModelShape
from lowmem_grpo.models.policy import Policy


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
