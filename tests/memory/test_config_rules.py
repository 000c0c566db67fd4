"""A config.json may come from a stranger: each wrong field ends in one line that names it, and in bounded work."""

import json
from pathlib import Path
from typing import Any

import pytest
from tables import every_row

from lowmem_grpo.memory.cards import device
from lowmem_grpo.memory.config_rules import MOST_LABELS, MOST_LAYERS
from lowmem_grpo.memory.model_shape import ModelShape, named_config, read_config
from lowmem_grpo.memory.plan import RunSettings
from lowmem_grpo.memory.planner import plan

VALUES = [None, "x", -1, 0, 1e308, 10**400, [], {}, [1], True]
OTHERS = ("id2label", "num_labels", "layer_types", "rope_scaling", "quantization_config", "vision_config",
          "text_config", "sliding_window", "num_experts", "mlp_only_layers", "per_layer_config",
          "full_attention_interval")
ASKED = RunSettings(2048, engine="vllm", max_tokens=2048, spread=0.0, mlp_tile=1024, chunk_rows=256, head_groups=1,
                    host_embedding=False, optim="adamw_8bit", sampling_weights="4bit")
FAMILIES = ("gemma-4-e4b", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3.5-4b", "ministral-3-8b", "llama-3.2-3b")
VISION = {"model_type": "qwen3_vl", "vision_config": {
    "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 16, "out_hidden_size": 2560, "num_heads": 16,
    "depth": 24, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
    "text_config": named_config("qwen3-4b") | {"model_type": "qwen3_vl_text"}}


def faults(folder: Path, name: str, config: dict[str, Any], fields: dict[str, Any]) -> list[str]:
    """What is wrong with the ends of plans of `config`, with each value in each of `fields`, which are in it."""
    found = []
    for field in (*fields, *OTHERS):
        own = fields.get(field)
        for value in VALUES:
            fields[field] = value
            (folder / "config.json").write_text(json.dumps(config))
            try:
                plan(named_config(folder), ASKED, device("80GiB"))
            except ValueError as error:
                if field not in str(error) or "config.json" not in str(error) or len(str(error).splitlines()) > 1:
                    found.append(f"{name}, {field} {value!r:.20}: {error}")
        fields[field] = own
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_of_which_a_field_is_wrong_is_planned_or_refused_by_the_field(name: str, tmp_path: Path) -> None:
    config = named_config(name)
    assert faults(tmp_path, name, config, config.get("text_config", config)) == []


def test_a_tower_of_which_a_field_is_wrong_is_planned_or_refused_by_the_field(tmp_path: Path) -> None:
    config = json.loads(json.dumps(VISION))
    assert ModelShape.from_config(config).vision is not None
    assert faults(tmp_path, "vision", config, config["vision_config"]) == []


@every_row(("name", "fields", "words"), [
    ("gpt-oss-20b", {"num_hidden_layers": MOST_LAYERS + 1}, f"num_hidden_layers is .*from 1 to {MOST_LAYERS:,}"),
    *[("qwen3-4b", {field: 10**400}, f"{field} is 10+; it must be a whole number, from 1 to 2,147,483,648")
      for field in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "head_dim",
                    "max_position_embeddings")],
    *[("qwen3-4b", {"num_attention_heads": heads, "num_key_value_heads": None, "head_dim": None}, words)
      for heads, words in ((10**9, "num_attention_heads is 10+, more than hidden_size"),
                           (2**62, "num_attention_heads is [0-9]+; it must"))],
    ("gemma-4-e4b", {"num_kv_shared_layers": 42}, "num_kv_shared_layers is 42; .*from 0 to 41"),
    ("gemma-4-e4b", {"num_kv_shared_layers": 10**12}, "num_kv_shared_layers"),
    ("gemma-4-e4b", {"num_key_value_heads": [1]}, r"num_key_value_heads is \[1\]"),
    *[("gemma-4-e4b", {"sliding_window": value}, "sliding_window is") for value in ([1], {}, "x")],
    ("gemma-4-e4b", {"layer_types": ["full_attention"]}, "layer_types is .*num_hidden_layers, 42"),
    ("gemma-4-e4b", {"per_layer_config": {"3": {"head_dim": 1e308}}}, r"per_layer_config\['3'\]\.head_dim is"),
    ("gemma-4-e4b", {"per_layer_config": {"3": 5}}, "per_layer_config is"),
    ("qwen3.5-4b", {"full_attention_interval": 33}, "full_attention_interval is 33"),
    ("qwen3.5-4b", {"layer_types": ["linear_attention"] * 32}, "layer_types has linear_attention only"),
    ("qwen3.5-4b", {"linear_conv_kernel_dim": None}, "has no linear_conv_kernel_dim"),
    ("qwen3-30b-a3b", {"num_experts_per_tok": None}, "has no num_experts_per_tok"),
    ("qwen3-30b-a3b", {"decoder_sparse_step": [1]}, r"decoder_sparse_step is \[1\]"),
    ("qwen3-4b", {"rope_parameters": {"partial_rotary_factor": 1e308}}, "partial_rotary_factor is"),
    ("qwen3-4b", {"rope_theta": 10**400}, "rope_theta is"),
    ("qwen3-4b", {"num_labels": 10**9}, f"num_labels is 1000000000.*{MOST_LABELS:,}"),
    ("qwen3-4b", {"id2label": {"a": {}}}, "id2label is"), ("qwen3-4b", {"id2label": {"0": {}}}, "id2label is"),
])
def test_a_size_that_no_model_has_is_refused_by_its_field(
    name: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = named_config(name)
    (config.get("text_config") or config).update(fields)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"^.*config\.json: .*{words}") as refused:
        ModelShape.from_config(named_config(tmp_path))
    assert len(str(refused.value)) < 900


@pytest.mark.parametrize("fields", [
    {"num_key_value_heads": [2, 4], "intermediate_size": [64, 128], "num_hidden_layers": 2}, {"head_dim": None},
    {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "num_labels": 2, "architectures": None}, {"num_local_experts": 0},
    {"sliding_window": None, "layer_types": None, "rope_scaling": None}, {"moe_intermediate_size": [1536, 3072]},
], ids=str)
def test_what_published_configs_hold_is_read(fields: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(named_config("qwen3-4b") | fields))
    assert read_config(tmp_path / "config.json").items() >= fields.items()
