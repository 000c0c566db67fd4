"""Layers that are not all alike: other head sizes, windows and inner sizes, and keys that several layers share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GLOBAL_HEAD = 512  # of Gemma 4's layers without a window, where a config.json does not say it


@dataclass(frozen=True)
class LayerForm:
    """One layer of a model."""

    head_size: int  # K
    kv_heads: int  # H_kv
    inner: int  # I
    window: int | None
    own_keys: bool = True  # False: an earlier layer's keys and values serve
    own_values: bool = True  # False: the projection of keys is that of values too


def forms_of(fields: Mapping[str, Any]) -> tuple[LayerForm, ...]:
    """Every layer of a config with Gemma 4's fields, in order. `per_layer_config` names what differs in a layer, or in
    older files `global_head_dim` and `num_global_key_value_heads` what differs in those without a window."""
    layers, kinds = fields["num_hidden_layers"], fields["layer_types"]
    sharing = layers - (fields.get("num_kv_shared_layers") or 0)
    twice = 2 if fields.get("use_double_wide_mlp") else 1
    found = []
    for number, kind in enumerate(kinds):
        full, shares = kind == "full_attention", number >= sharing
        own = own_fields(fields, number, full)
        found.append(LayerForm(
            own.get("head_dim") or fields["head_dim"], own.get("num_key_value_heads") or fields["num_key_value_heads"],
            fields["intermediate_size"] * (twice if shares else 1), None if full else fields.get("sliding_window"),
            not shares, not (full and fields.get("attention_k_eq_v")),
        ))
    return tuple(found)


def own_fields(fields: Mapping[str, Any], number: int, full: bool) -> Mapping[str, Any]:
    """What is said of one layer only."""
    each = fields.get("per_layer_config")
    if each is not None:
        own: Mapping[str, Any] = each.get(str(number), each.get(number)) or {}
        return own
    if not full:
        return {}
    heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
    return {"head_dim": fields.get("global_head_dim") or GLOBAL_HEAD, "num_key_value_heads": heads}
