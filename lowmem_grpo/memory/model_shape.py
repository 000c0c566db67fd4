"""The sizes in a model's config that determine its memory."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowmem_grpo.memory import families, layer_forms
from lowmem_grpo.memory.families import Family
from lowmem_grpo.memory.layer_forms import DeltaForm, ExpertForm, LayerForm, Linear

PAGED_BLOCK = 16  # tokens in a block of vLLM's KV cache on a GPU
NESTED_WEIGHTS = layer_forms.BLOCK * layer_forms.NESTED_BLOCK  # weights per nested scale
PLAIN = families.decoder("a plain decoder", "")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model: D hidden size, I inner size of the MLP, L layers, H query heads and H_kv key heads of size
    K, V vocabulary. If layers differ, `forms` has them all, and I, H_kv and K are those of the largest layer."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # the head shares the embedding's weight
    context: int | None  # `max_position_embeddings`
    model_type: str = ""
    attention_bias: bool = False
    window: int | None = None  # tokens in the sliding window
    own_keys: bool = True
    own_values: bool = True
    forms: tuple[LayerForm, ...] = ()
    per_layer: int = 0  # P, size of the per-layer embedding that each layer adds for a token; 0: none
    per_layer_vocabulary: int = 0  # rows of the per-layer embedding table, which is L P wide
    turned: float = 1.0  # the share of a head that RoPE rotates
    experts: ExpertForm | None = None  # for layers with experts instead of an MLP
    delta: DeltaForm | None = None  # for layers with a delta net instead of attention; in `each`, set for these only

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a config.json's fields, or a transformers config; ValueError for a model that cannot be planned."""
        fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        tied = bool(fields.get("tie_word_embeddings", False))
        fields = fields.get("text_config") or fields
        missing = [name for name in NEEDED if not isinstance(fields.get(name), int)]
        if missing:
            raise ValueError(f"the config has no {', '.join(missing)}; a decoder's config.json is needed")
        heads, kind = fields["num_attention_heads"], str(fields.get("model_type", ""))
        row, mixed = family_named(kind), families.has_experts(fields)
        if mixed and row.experts is None:
            raise ValueError(f"{kind} has several experts; of such models, plans are made for "
                             f"{families.with_experts()} only")
        bias, forms = row.attention.bias, layer_forms.forms_of(fields) if row.unlike_layers else ()
        shape = cls(
            fields["hidden_size"], fields["intermediate_size"], fields["num_hidden_layers"], heads,
            fields.get("num_key_value_heads") or heads, fields.get("head_dim") or fields["hidden_size"] // heads,
            fields["vocab_size"], tied or bool(fields.get("tie_word_embeddings", False)),
            fields.get("max_position_embeddings"), kind,
            bool(fields.get("attention_bias")) if bias is None else bias,
            fields.get("sliding_window") if fields.get("use_sliding_window", True) else None, forms=forms,
            per_layer=fields.get("hidden_size_per_layer_input") or 0,
            per_layer_vocabulary=fields.get("vocab_size_per_layer_input") or 0,
            turned=turned_share(fields, row), delta=DeltaForm.from_config(fields) if row.delta_net else None,
            experts=ExpertForm.from_config(fields) if mixed else None,
        )
        if not forms:
            return shape
        largest = max(forms, key=lambda form: form.own_keys * form.head_size * form.kv_heads)
        return replace(shape, head_size=largest.head_size, kv_heads=largest.kv_heads,
                       inner=max(form.inner for form in forms))

    def each(self) -> Iterator[tuple[int, "ModelShape"]]:
        """Yield (number of layers, shape) for each set of identical layers."""
        if self.delta is not None:
            yield self.delta.layers, replace(self, own_keys=False)
            yield self.layers - self.delta.layers, replace(self, delta=None)
        elif self.experts is not None:
            yield self.experts.layers, self
            if self.layers > self.experts.layers:
                yield self.layers - self.experts.layers, replace(self, experts=None)
        elif not self.forms:
            yield self.layers, self
        for form, count in Counter(self.forms).items():
            yield count, replace(self, head_size=form.head_size, kv_heads=form.kv_heads, inner=form.inner,
                                 window=form.window, own_keys=form.own_keys, own_values=form.own_values, forms=())

    @property
    def for_all_layers(self) -> int:
        """The values per token that all layers share: cosines and sines, per-layer inputs, shared keys and values."""
        if not self.forms:
            return 2 * self.turned_size
        lent = {(form.window, form.head_size * form.kv_heads) for form in self.forms if form.own_keys}
        shared = 0 if all(form.own_keys for form in self.forms) else sum(keys for _, keys in lent)
        return 2 * (sum({form.head_size for form in self.forms}) + shared) + self.layers * self.per_layer

    @property
    def turned_size(self) -> int:
        return int(self.head_size * self.turned)

    @property
    def family(self) -> Family:
        return family_named(self.model_type)

    @property
    def queries(self) -> int:
        """The size of a token's queries: H K."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """The size of a token's keys, and of its values: H_kv K."""
        return self.kv_heads * self.head_size

    def linears(self) -> Iterator[Linear]:
        """Yield each linear weight of a layer that can be quantized; `lora` marks those that get LoRA by default."""
        bias, lora = self.attention_bias, self.family.experts is None  # with experts, only attention gets LoRA
        if self.delta is not None:
            sizes = (self.delta.mixed, self.delta.values, self.delta.heads, self.delta.heads)
            yield from (Linear(name, rows, self.hidden) for name, rows in zip(families.DELTA_IN, sizes, strict=True))
            yield Linear(families.DELTA_OUT, self.hidden, self.delta.values)
        elif self.family.attention.inner == families.FUSED:
            yield Linear("qkv_proj", self.queries + 2 * self.keys, self.hidden, bias)
        else:
            yield Linear("q_proj", self.queries * (1 + self.family.attention.gated), self.hidden, bias)
            if self.own_keys:
                yield Linear("k_proj", self.keys, self.hidden, bias)
            if self.own_keys and self.own_values:
                yield Linear("v_proj", self.keys, self.hidden, bias)
        if self.delta is None:
            yield Linear("o_proj", self.hidden, self.queries)
        if self.experts is not None:
            many: dict[str, Any] = {"lora": False, "experts": self.experts.count, "taken": self.experts.taken}
            yield Linear("experts.gate_up_proj", 2 * self.experts.inner, self.hidden, **many)
            yield Linear("experts.down_proj", self.hidden, self.experts.inner, **many)
            return
        if self.family.mlp.inner == families.FUSED_GATE_UP:
            yield Linear("gate_up_proj", 2 * self.inner, self.hidden)
        else:
            yield Linear("gate_proj", self.inner, self.hidden, lora=lora)
            yield Linear("up_proj", self.inner, self.hidden, lora=lora)
        yield Linear("down_proj", self.hidden, self.inner, lora=lora)
        if self.per_layer:
            yield Linear("per_layer_input_gate", self.per_layer, self.hidden, lora=False)
            yield Linear("per_layer_projection", self.hidden, self.per_layer, lora=False)

    @property
    def linear_weights(self) -> int:
        return sum(count * sum(linear.weights for linear in shape.linears()) for count, shape in self.each())

    @property
    def sampler_weights(self) -> int:
        """The linear weights that the sampler may hold in 16 bits during sampling: all except experts."""
        return sum(count * sum(linear.weights for linear in shape.linears() if linear.experts == 1)
                   for count, shape in self.each())

    def has_form(self, form: str) -> bool:
        """Return whether the model's weights can be held in this form: experts cannot in FP8."""
        return self.experts is None or form not in (layer_forms.FP8, layer_forms.FP8_BLOCK)

    def weight_bytes(self, form: str) -> int:
        """Return the bytes of all layers and norms with linear weights in this form, without embeddings. ValueError for
        experts in FP8."""
        if not self.has_form(form):
            raise ValueError("a mixture of experts is not held in FP8; plan it in 4 bits, or in 16")
        layers = sum(count * shape.layer_bytes(form) for count, shape in self.each())
        angles = sum({shape.turned_size: 2 * 4 * (shape.turned_size // 2) for _, shape in self.each()}.values())
        return layers + 2 * self.hidden + angles + self.per_layer_bytes(form)

    def layer_bytes(self, form: str) -> int:
        """Return the bytes of one layer with its norms."""
        linears = sum(linear.bytes_in(form) for linear in self.linears())
        linears += self.offset_bytes() if form == layer_forms.NF4 else 0
        biases = 2 * sum(linear.rows for linear in self.linears() if linear.bias)
        return linears + biases + self.norm_bytes() + (2 * len(self.family.buffers))

    def norm_bytes(self) -> int:
        """Return the bytes of a layer's norms (hidden size, queries and keys), its router and a delta net's extras."""
        hidden = 2 * (self.family.norms + bool(self.per_layer)) * self.hidden
        hidden += 2 * self.experts.count * self.hidden if self.experts is not None else 0  # the router
        if self.delta is not None:
            return hidden + self.delta.weight_bytes
        if self.family.attention.norm == "whole":
            return hidden + 2 * (self.queries + self.keys)
        return hidden + (2 * (1 + self.own_keys) * self.head_size if self.family.attention.norm else 0)

    def per_layer_bytes(self, form: str) -> int:
        """Return the bytes of the per-layer embeddings' projection, norm and two scales, without their table; 0 if the
        model has none."""
        if not self.per_layer:
            return 0
        width = self.layers * self.per_layer
        projection = Linear("per_layer_model_projection", width, self.hidden)
        return projection.bytes_in(form) + 2 * self.per_layer + 2 * 2

    def groups(self) -> list[list[Linear]]:
        """Return the linears of a layer in groups, which the loader makes adjacent in NF4 to dequantize them in one
        call."""
        linears = {linear.name: linear for linear in self.linears()}
        form, groups = self.family, [[linear] for name, linear in linears.items() if name.startswith("per_layer")]
        delta = families.DELTA_IN, (families.DELTA_OUT,)
        for names in (*delta, form.attention.inner, ("o_proj",), form.mlp.inner, ("down_proj",)):
            group = [linears[name] for name in names if name in linears]
            whole = len(group) == len(names) and not any(linear.weights % NESTED_WEIGHTS for linear in group[:-1])
            groups += [group] if whole else [[linear] for linear in group]
        return groups

    def offset_bytes(self) -> int:
        """Return the extra bytes of adjacent weights' offsets, which are stored per nested block, not per weight."""
        side_by_side = (group for group in self.groups() if len(group) > 1)
        blocks = [-(-linear.weights // NESTED_WEIGHTS) for group in side_by_side for linear in group]
        return 4 * (sum(blocks) - len(blocks))

    @property
    def table_bytes(self) -> int:
        """The bytes of the embedding in 16 bits; an untied head takes the same again."""
        return 2 * self.vocabulary * self.hidden

    def host_bytes(self) -> int:
        """Return the bytes of the embeddings that can be offloaded to the host; a tied one is the head, and cannot."""
        per_layer = 2 * self.per_layer_vocabulary * self.layers * self.per_layer
        return per_layer + (0 if self.tied else self.table_bytes)

    def lora_weights(self, rank: int, least: int = 0) -> int:
        """Return the number of LoRA weights of this rank, on all linears that get it, in tensors of `least` or more."""
        sizes = (count * rank * side for count, shape in self.each() for linear in shape.linears() if linear.lora
                 for side in (linear.rows, linear.columns) if rank * side >= least)
        return sum(sizes)

    def kv_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Return the bytes of one sequence's keys and values, and of its states in layers without attention."""
        keys = 2 * itemsize * tokens * sum(count * shape.keys for count, shape in self.each() if shape.own_keys)
        return keys + self.states_bytes

    @property
    def states_bytes(self) -> int:
        """The bytes of one sequence's states in layers without attention, which do not depend on its length."""
        return 0 if self.delta is None else self.delta.layers * self.delta.state_bytes

    def paged_bytes(self, tokens: int, block: int = PAGED_BLOCK, itemsize: int = 2) -> int:
        """Return the bytes of one sequence in vLLM's KV cache, with `itemsize` bytes per number. For a hybrid model all
        pages have one size: each holds the keys and values of a block of tokens in all attention layers, or the states
        of as many layers without attention."""
        if self.delta is None:
            return self.kv_bytes(tokens, itemsize)
        block, attention = self.paged_block(block, itemsize), self.layers - self.delta.layers
        pages = -(-tokens // block) + -(-self.delta.layers // attention)
        return pages * attention * block * 2 * itemsize * self.keys

    def paged_block(self, block: int, itemsize: int = 2) -> int:
        """Return the tokens in a block of vLLM's KV cache: `block`, or in a hybrid model the least multiple of it whose
        keys and values are as large as a layer's states."""
        if self.delta is None:
            return block
        return block * -(-self.delta.state_bytes // (block * 2 * itemsize * self.keys))


def turned_share(fields: Mapping[str, Any], row: Family) -> float:
    """Return the share of a head that RoPE rotates; 1.0 if layers differ: their RoPE table spans the head."""
    if row.unlike_layers:
        return 1.0
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return float(rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or row.attention.turned)


def family_named(model_type: str) -> Family:
    return families.FAMILIES.get(model_type, PLAIN)
