"""The weights of a decoder layer with their bytes in each form, and layers that are not all alike: other head sizes,
windows and inner sizes, and keys that several layers share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.memory.families import EXPERTS

FORMS = NF4, FP8, FP8_BLOCK, BITS_16 = "nf4", "fp8", "fp8-block", "16bit"  # in which weights are held
BLOCK, NESTED_BLOCK = 64, 256  # NF4: weights that share a scale, scales that share one of theirs
TABLES = 4 * (16 + 256 + 1)  # bytes: NF4's values, those of the scales, and their offset
GLOBAL_HEAD = 512  # in Gemma 4's layers without a window, where a config.json does not say it


@dataclass(frozen=True)
class Linear:
    """A weight (out, in) of a layer."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    lora: bool = True  # whether it is adapted where no target is named
    experts: int = 1  # so many of them lie in one stack
    taken: int = 1  # and a token goes through so many

    @property
    def weights(self) -> int:
        return self.experts * self.rows * self.columns

    @property
    def passed(self) -> int:
        """Numbers that a token is multiplied with."""
        return self.taken * self.rows * self.columns

    def bytes_in(self, form: str) -> int:
        """In one of FORMS: NF4 is doubly quantized; FP8 has a scale for each row, or for each block of 128 x 128."""
        scales = {FP8: self.rows, FP8_BLOCK: -(-self.rows // 128) * -(-self.columns // 128)}
        if form != NF4:
            return self.weights + 4 * scales[form] if form in scales else 2 * self.weights
        blocks = -(-self.weights // BLOCK)
        return -(-self.weights // 2) + blocks + 4 * -(-blocks // NESTED_BLOCK) + TABLES


@dataclass(frozen=True)
class LayerForm:
    """One layer of a model."""

    head_size: int  # K
    kv_heads: int  # H_kv
    inner: int  # I
    window: int | None
    own_keys: bool = True  # False: an earlier layer's keys and values serve
    own_values: bool = True  # False: the projection of keys is that of values too


@dataclass(frozen=True)
class DeltaForm:
    """The gated delta nets of a hybrid model; its other layers have attention."""

    layers: int  # that have one
    key_heads: int
    heads: int  # H, of values
    key_size: int
    value_size: int
    width: int  # W, of the convolution

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> "DeltaForm":
        """From a config's fields; without `layer_types` every `full_attention_interval`th layer has attention."""
        total, every = fields["num_hidden_layers"], fields.get("full_attention_interval") or 4
        kinds = fields.get("layer_types")
        count = total - total // every if kinds is None else list(kinds).count("linear_attention")
        return cls(count, fields["linear_num_key_heads"], fields["linear_num_value_heads"],
                   fields["linear_key_head_dim"], fields["linear_value_head_dim"], fields["linear_conv_kernel_dim"])

    @property
    def values(self) -> int:
        return self.heads * self.value_size

    @property
    def mixed(self) -> int:
        """C, numbers of a token's query, key and value."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def weight_bytes(self) -> int:
        """The bytes of a layer beside its projections: convolution, norm, decays."""
        return 2 * (self.mixed * self.width + self.value_size + 2 * self.heads)

    @property
    def state_bytes(self) -> int:
        """The bytes of a layer's states of one sequence: the rule's in float32, the convolution's in 16 bits."""
        return 4 * self.heads * self.key_size * self.value_size + 2 * self.mixed * (self.width - 1)


@dataclass(frozen=True)
class ExpertForm:
    """The experts of a mixture; layers without them have an MLP."""

    layers: int  # that have experts
    count: int  # E
    taken: int  # k, of which each token takes so many
    inner: int  # I

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> "ExpertForm":
        """From a config's fields: of Qwen3-MoE, every `decoder_sparse_step`th layer but those of `mlp_only_layers`."""
        every, without = fields.get("decoder_sparse_step") or 1, fields.get("mlp_only_layers") or ()
        layers = set(range(every - 1, fields["num_hidden_layers"], every)) - set(without)
        count = next(fields[name] for name in EXPERTS if fields.get(name))  # transformers renames what a file says
        return cls(len(layers), count, fields["num_experts_per_tok"], fields["moe_intermediate_size"])


def forms_of(fields: Mapping[str, Any]) -> tuple[LayerForm, ...]:
    """Every layer of a config with Gemma 4's fields, in order. `per_layer_config` names what differs in a layer, or in
    older files `global_head_dim` and `num_global_key_value_heads` what differs in those without a window."""
    layers, kinds = fields["num_hidden_layers"], fields["layer_types"]
    sharing = layers - (fields.get("num_kv_shared_layers") or 0)
    twice = 2 if fields.get("use_double_wide_mlp") else 1
    forms = []
    for number, kind in enumerate(kinds):
        full, shares = kind == "full_attention", number >= sharing
        own = own_fields(fields, number, full)
        forms.append(LayerForm(
            own.get("head_dim") or fields["head_dim"], own.get("num_key_value_heads") or fields["num_key_value_heads"],
            fields["intermediate_size"] * (twice if shares else 1), None if full else fields.get("sliding_window"),
            not shares, not (full and fields.get("attention_k_eq_v")),
        ))
    return tuple(forms)


def own_fields(fields: Mapping[str, Any], number: int, full: bool) -> Mapping[str, Any]:
    """Return the fields of a layer's own that a config names: by its number, or for layers with full attention."""
    each = fields.get("per_layer_config")
    if each is not None:
        return each.get(str(number), each.get(number)) or {}
    if not full:
        return {}
    heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
    return {"head_dim": fields.get("global_head_dim") or GLOBAL_HEAD, "num_key_value_heads": heads}
