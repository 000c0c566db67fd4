"""Rules for the fields of a model's config.json and of the files beside it, which may come from strangers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lowmem_grpo.memory.families import (
    EXPERTS,
    FAMILIES,
    PLAIN,
    Family,
    has_experts,
    model_type_of,
    reads_images,
    with_experts,
)
from lowmem_grpo.utils import OF_KINDS, TEXTS, TRUTH, WHOLE, Rule, check_given, number, one_of, require, up_to, within

MOST_LAYERS, MOST, MOST_LABELS = 1024, 2**31, 2**14  # transformers takes a second for as many labels
SIZE, SIZE_OR_0 = up_to(MOST, int), within(0, MOST, int)
SIZES: Rule = (f"{SIZE[0]}, or a list of them", lambda value: all(
    SIZE[1](each) for each in (value if isinstance(value, list | tuple) and value else [value])))
RATE = number("above 0, and at most 1e300", lambda value: 0 < value <= 1e300)
OBJECT: Rule = ("an object of fields", lambda value: isinstance(value, dict))
ROPES = ("rope_parameters", "rope_scaling")
ROPE: dict[str, Rule] = {  # in all layers, or in a kind of layers
    **dict.fromkeys(("factor", "rope_theta"), RATE),
    "partial_rotary_factor": number("above 0, and at most 1", lambda value: 0 < value <= 1),
    **dict.fromkeys(("rope_type", "type"), OF_KINDS[str]),
}
OF_CONFIG: dict[str, Rule] = {  # in any model; what is missing or null is the family's default
    **dict.fromkeys(("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings"), SIZE),
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "head_dim"), SIZES),
    **dict.fromkeys(EXPERTS, SIZE_OR_0), "num_hidden_layers": up_to(MOST_LAYERS, int),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), RATE),
    **{name: ROPE[name] for name in ("rope_theta", "partial_rotary_factor")},
    **dict.fromkeys((*ROPES, "quantization_config", "text_config", "vision_config"), OBJECT),
    **dict.fromkeys(("model_type", "hidden_act", "transformers_weights"), OF_KINDS[str]), "tie_word_embeddings": TRUTH,
    "architectures": TEXTS, "layer_types": TEXTS, "num_labels": within(0, MOST_LABELS, int),
    "id2label": (f"an object of labels by their numbers, {MOST_LABELS:,} at most", lambda value: (
        isinstance(value, dict) and len(value) <= MOST_LABELS and all(
            str(key).isdecimal() and not isinstance(label, dict | list) for key, label in value.items()))),
}
OF_OTHERS: dict[str, dict[str, Rule]] = {  # the same for the files beside it
    "generation_config.json": {},
    "tokenizer_config.json": {
        "model_max_length": number("above 0", lambda value: value > 0), "padding_side": one_of("left", "right"),
        "chat_template": ("a text, or a list of named texts", lambda value: isinstance(value, str | list | dict)),
        **dict.fromkeys(("eos_token", "pad_token"), ("a text", lambda value: isinstance(value, str | dict))),
    },
}
LINEAR = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
          "linear_conv_kernel_dim")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
OF_LAYER = dict.fromkeys(("num_key_value_heads", "head_dim"), SIZE)  # which `per_layer_config` may have too
OF_PLAN: dict[str, Rule] = OF_LAYER | {  # in a model that is planned
    **dict.fromkeys((*LINEAR, "intermediate_size", "full_attention_interval", "decoder_sparse_step",
                     "num_global_key_value_heads", "global_head_dim", "num_experts_per_tok"), SIZE),
    **dict.fromkeys(("sliding_window", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
                     "num_kv_shared_layers", "moe_intermediate_size"), SIZE_OR_0),
    "mlp_only_layers": ("a list of whole numbers", lambda value: isinstance(value, list | tuple)
                        and all(map(WHOLE[1], value))),
    "per_layer_config": ("an object of fields by layers", lambda value: OBJECT[1](value) and all(
        own is None or OBJECT[1](own) for own in value.values())),
}
OF_VISION: dict[str, Rule] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "patch_size", "out_hidden_size", "num_heads"), SIZE),
    "depth": up_to(MOST_LAYERS, int), "num_position_embeddings": SIZE, "spatial_merge_size": SIZE,
    "temporal_patch_size": SIZE, "deepstack_visual_indexes": OF_PLAN["mlp_only_layers"],
}


def check_fields(path: Path, fields: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise ValueError, with the file, for a field that would end in a division by zero, NaN or a wrong type."""
    try:
        check_types(fields, rules)
        heads, groups = (fields.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise ValueError(f"num_key_value_heads is {groups}, of which num_attention_heads, {heads}, is no multiple")
        most, ends = fields.get("vocab_size") or MOST, fields.get("eos_token_id")
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and not (WHOLE[1](end) and 0 <= end < most):
                raise ValueError(f"eos_token_id has {end!r:.80}; token ids are 0 to {most - 1}")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_types(fields: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise ValueError for a field of a wrong type or size."""
    check_given({name: fields.get(name) for name in rules}, rules)
    for name in ROPES if rules is OF_CONFIG else ():
        whole = fields.get(name) or {}
        for rope in filter(OBJECT[1], (whole, *whole.values())):
            check_given({f"{name}.{part}": rope.get(part) for part in ROPE},
                        {f"{name}.{part}": rule for part, rule in ROPE.items()})


def check_plan(whole: Mapping[str, Any]) -> None:
    """Raise ValueError for a config of which no plan can be made: a field is missing, or of a wrong type or size."""
    try:
        check_types(whole, OF_CONFIG)
        fields = whole.get("text_config") or whole
        check_types(fields, OF_CONFIG)
        row, experts = FAMILIES.get(kind := model_type_of(whole), PLAIN), has_experts(fields)
        if experts and row.experts is None:
            names = ", ".join(fields.keys() & {*EXPERTS})
            raise ValueError(f"model_type {kind} has several experts ({names}); of such models, plans are made for "
                             f"{with_experts()} only")
        check_types(fields, OF_PLAN)
        check_inner(fields, "per_layer_config", OF_LAYER)
        check_needed(fields, [*NEEDED, *[*OF_LAYER, "layer_types"] * row.unlike_layers, *LINEAR * bool(row.delta_net),
                              *["num_experts_per_tok"] * experts])
        check_layers(fields, row)
        if reads_images(whole):
            check_vision(whole.get("vision_config"))
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None


def check_inner(fields: Mapping[str, Any], name: str, rules: Mapping[str, Rule]) -> None:
    """Raise ValueError for a wrong value in the objects within a field."""
    for key, inner in (fields.get(name) or {}).items():
        check_given({f"{name}[{key!r:.20}].{part}": (inner or {}).get(part) for part in rules},
                    {f"{name}[{key!r:.20}].{part}": rule for part, rule in rules.items()})


def check_needed(fields: Mapping[str, Any], needed: Iterable[str]) -> None:
    if missing := [name for name in needed if fields.get(name) is None]:
        raise ValueError(f"it has no {', '.join(missing)}; a decoder's config.json is needed")


def check_layers(fields: Mapping[str, Any], row: Family) -> None:
    """Raise ValueError for sizes that leave heads without numbers, or a model without keys and values."""
    layers, heads, kinds = fields["num_hidden_layers"], fields["num_attention_heads"], fields.get("layer_types")
    if not fields.get("head_dim") and heads > fields["hidden_size"]:
        raise ValueError(f"num_attention_heads is {heads}, more than hidden_size, {fields['hidden_size']}")
    if (row.unlike_layers or row.delta_net) and kinds is not None and (isinstance(kinds, str) or len(kinds) != layers):
        raise ValueError(f"layer_types is {kinds!r:.80}; num_hidden_layers, {layers}, is the number of its entries")
    if row.unlike_layers:
        require("num_kv_shared_layers", fields.get("num_kv_shared_layers") or 0, within(0, layers - 1, int))
    if row.delta_net and kinds is None and (every := fields.get("full_attention_interval") or 4) > layers:
        raise ValueError(f"full_attention_interval is {every}, more than num_hidden_layers, {layers}")
    if row.delta_net and kinds is not None and {*kinds} == {"linear_attention"}:
        raise ValueError("layer_types has linear_attention only; a layer with full_attention is needed")


def check_vision(fields: Any) -> None:
    """Raise ValueError for a `vision_config` of which no plan can be made."""
    require("vision_config", fields, OBJECT)
    check_types(fields, OF_VISION)
    stacked = fields.get("deepstack_visual_indexes") is not None
    check_needed(fields, [*OF_VISION][:6] + ["num_position_embeddings"] * stacked)
