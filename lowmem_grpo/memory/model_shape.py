"""The sizes in a model's config that determine its memory, and the configs that ship with the package."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowmem_grpo.memory import families, layer_forms
from lowmem_grpo.memory.config_rules import OF_CONFIG, OF_OTHERS, check_fields, check_plan
from lowmem_grpo.memory.families import Family
from lowmem_grpo.memory.layer_forms import MXFP4, DeltaForm, ExpertForm, LayerForm, Linear, VisionForm
from lowmem_grpo.utils import bytes_of, read_json

PAGED_BLOCK = 16  # tokens in a block of vLLM's KV cache on a GPU
NESTED_WEIGHTS = layer_forms.BLOCK * layer_forms.NESTED_BLOCK  # weights per nested scale
SHAPES = files("lowmem_grpo") / "assets" / "shapes"
VARIANT = re.compile(r"(-(instruct|base|it|chat|unsloth|bnb|4bit|bf16|[0-9]{4}))+$")  # endings with the same shape
NAMESAKES = {"phi-4": "phi-4-14b", "meta-llama-3.1-8b": "llama-3.1-8b", "meta-llama-3.3-70b": "llama-3.3-70b",
             "olmo-3-7b-think": "olmo-3-7b", "ministral-3-8b-reasoning": "ministral-3-8b",
             "qwen3.5-27b": "qwen3.6-27b", "qwen3.8-27b": "qwen3.6-27b"}  # same shape, other weights


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model: hidden size D, inner size I of the MLP, L layers, H query heads and H_kv key heads of size
    K, vocabulary V. If layers differ, `forms` lists all layers, and I, H_kv and K are those of the largest layer."""

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
    vision: VisionForm | None = None  # of a model that reads images
    word: int = 2  # bytes of a number that is not quantized
    stored: str = ""  # the form in which its checkpoint stores experts, which are kept so; "": that of the model

    @classmethod
    def from_config(cls, config: Any) -> "ModelShape":
        """Read a config.json's fields, or a transformers config; ValueError for a model that cannot be planned."""
        whole = families.fields_of(config)
        check_plan(whole)
        fields = whole.get("text_config") or whole
        heads, kind, images = fields["num_attention_heads"], families.model_type_of(whole), families.reads_images(whole)
        row, mixed = families.FAMILIES.get(kind, families.PLAIN), families.has_experts(fields)
        bias, forms = row.attention.bias, layer_forms.forms_of(fields) if row.unlike_layers else ()
        shape = cls(
            fields["hidden_size"], fields["intermediate_size"], fields["num_hidden_layers"], heads,
            fields.get("num_key_value_heads") or heads, fields.get("head_dim") or fields["hidden_size"] // heads,
            fields["vocab_size"], bool(whole.get("tie_word_embeddings") or fields.get("tie_word_embeddings")),
            fields.get("max_position_embeddings"), kind, bool(fields.get("attention_bias")) if bias is None else bias,
            fields.get("sliding_window") if fields.get("use_sliding_window", True) else None, forms=forms,
            per_layer=fields.get("hidden_size_per_layer_input") or 0,
            per_layer_vocabulary=fields.get("vocab_size_per_layer_input") or 0,
            turned=layer_forms.turned_share(fields, row), experts=ExpertForm.from_config(fields) if mixed else None,
            delta=DeltaForm.from_config(fields) if row.delta_net else None,
            vision=VisionForm.from_config(whole["vision_config"]) if images else None,
            stored=MXFP4 if MXFP4 in str((whole.get("quantization_config") or {}).get("quant_method")) else "",
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
        """The number of values per token that layers share: cosines and sines, per-layer inputs, keys and values."""
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
        return families.FAMILIES.get(self.model_type, families.PLAIN)

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
        attention, gate_up = self.family.attention, self.family.mlp.inner
        if self.delta is not None:
            sizes = (self.delta.mixed, self.delta.values, self.delta.heads, self.delta.heads)
            yield from (Linear(name, rows, self.hidden) for name, rows in zip(families.DELTA_IN, sizes, strict=True))
            yield Linear(families.DELTA_OUT, self.hidden, self.delta.values)
        else:
            outputs = {"q_proj": self.queries * (1 + attention.gated), "k_proj": self.own_keys * self.keys,
                       "v_proj": self.own_keys * self.own_values * self.keys,
                       "qkv_proj": self.queries + 2 * self.keys}
            yield from (Linear(name, outputs[name], self.hidden, self.attention_bias) for name in attention.inner
                        if outputs[name])
            yield Linear("o_proj", self.hidden, self.queries, self.attention_bias and attention.bias is None)
        if self.experts is not None:
            many: dict[str, Any] = {"lora": False, "experts": self.experts.count, "taken": self.experts.taken,
                                    "stored": self.stored,
                                    "bias": self.family.experts is not None and self.family.experts.biased}
            yield Linear("experts.gate_up_proj", 2 * self.experts.inner, self.hidden, **many)
            yield Linear("experts.down_proj", self.hidden, self.experts.inner, **many)
            return
        lora = self.family.experts is None  # with experts, only attention gets LoRA
        yield from (Linear(name, 2 * self.inner // len(gate_up), self.hidden, lora=lora) for name in gate_up)
        yield Linear("down_proj", self.hidden, self.inner, lora=lora)
        if self.per_layer:
            yield Linear("per_layer_input_gate", self.per_layer, self.hidden, lora=False)
            yield Linear("per_layer_projection", self.hidden, self.per_layer, lora=False)

    def all_linears(self) -> Iterator[tuple[int, Linear]]:
        """Yield (number of layers, linear weight) for the linear weights of all layers."""
        return ((count, linear) for count, shape in self.each() for linear in shape.linears())

    @property
    def linear_weights(self) -> int:
        return sum(count * linear.weights for count, linear in self.all_linears())

    @property
    def sampler_weights(self) -> int:
        """The number of linear weights that the sampler may hold in 16 bits during sampling: all except experts."""
        return sum(count * linear.weights for count, linear in self.all_linears() if linear.experts == 1)

    def has_form(self, form: str) -> bool:
        """Return whether the model's weights can be stored in this form, which not all experts can."""
        return self.experts is None or layer_forms.FORMS[form].experts

    def weight_bytes(self, form: str) -> int:
        """Return the bytes of all weights but embeddings, with linears in this form; ValueError for experts without."""
        if not self.has_form(form):
            held = form.partition("-")[0].upper()
            raise ValueError(f"a mixture of experts is not held in {held}; plan it in 4 bits, or in 16")
        layers = sum(count * shape.layer_bytes(form) for count, shape in self.each())
        angles = sum({shape.turned_size: 2 * 4 * (shape.turned_size // 2) for _, shape in self.each()}.values())
        projection = Linear("per_layer_model_projection", self.layers * self.per_layer, self.hidden)
        two_scales = self.word * (self.per_layer + 2)  # with the norm
        per_layer = projection.bytes_in(form, self.word) + two_scales if self.per_layer else 0
        return layers + self.word * self.hidden + angles + per_layer

    def layer_bytes(self, form: str) -> int:
        """Return the bytes of one layer with its norms."""
        linears = sum(linear.bytes_in(form, self.word) + self.word * linear.biases for linear in self.linears())
        side_by_side = (group for group in self.groups() if len(group) > 1)
        linears += sum(layer_forms.FORMS[form].joined(linear) for group in side_by_side for linear in group)
        return linears + self.norm_bytes() + self.word * len(self.family.buffers)

    def norm_bytes(self) -> int:
        """Return the bytes of a layer's norms, sinks and router and, in a delta net, all weights except projections."""
        hidden = self.word * (self.family.norms + bool(self.per_layer)) * self.hidden
        hidden += self.word * self.heads * self.family.attention.sinks
        if self.experts is not None and self.family.experts is not None:  # the router
            hidden += self.word * self.experts.count * (self.hidden + self.family.experts.biased)
        if self.delta is not None:
            return hidden + self.delta.weight_bytes
        heads = {"": 0, "heads": (1 + self.own_keys) * self.head_size, "whole": self.queries + self.keys}
        return hidden + self.word * heads[self.family.attention.norm]

    def groups(self) -> list[list[Linear]]:
        """Return a layer's linears in groups. The loader stores a group's NF4 weights for one call to dequantize."""
        linears = {linear.name: linear for linear in self.linears()}
        form, groups = self.family, [[linear] for name, linear in linears.items() if name.startswith("per_layer")]
        delta = families.DELTA_IN, (families.DELTA_OUT,)
        for names in (*delta, form.attention.inner, ("o_proj",), form.mlp.inner, ("down_proj",)):
            group = [linears[name] for name in names if name in linears]
            whole = len(group) == len(names) and not any(linear.weights % NESTED_WEIGHTS for linear in group[:-1])
            groups += [group] if whole else [[linear] for linear in group]
        return groups

    @property
    def table_bytes(self) -> int:
        """The bytes of the embedding. A head that is not tied to it takes as many again."""
        return self.word * self.vocabulary * self.hidden

    def host_bytes(self) -> int:
        """Return the bytes of the embeddings that can be offloaded to the host. One tied to the head cannot."""
        per_layer = self.word * self.per_layer_vocabulary * self.layers * self.per_layer
        return per_layer + (0 if self.tied else self.table_bytes)

    def lora_weights(self, rank: int, least: int = 0, experts: bool = False) -> int:
        """Return the number of LoRA weights; with `experts`, also those of an adapter for each of them. A tensor (A or
        B) with fewer than `least` weights is not counted."""
        return sum(count * numbers for count, linear in self.all_linears() if linear.lora or (
            experts and linear.experts > 1) for side in (linear.rows, linear.columns)
            if (numbers := linear.experts * rank * side) >= least)

    def kv_bytes(self, tokens: int, itemsize: int | None = None) -> int:
        """Return the bytes of one sequence's keys and values, and of its states in layers without attention."""
        keys = sum(count * shape.keys for count, shape in self.each() if shape.own_keys)
        return 2 * (itemsize or self.word) * tokens * keys + self.states_bytes

    @property
    def states_bytes(self) -> int:
        """The bytes of one sequence's states in layers without attention, which do not depend on its length."""
        return 0 if self.delta is None else self.delta.layers * self.delta.state_bytes

    def paged_bytes(self, tokens: int, block: int = PAGED_BLOCK, itemsize: int = 2) -> int:
        """Return the bytes of one sequence in vLLM's KV cache, with `itemsize` bytes per number. All pages of a hybrid
        model have one size. With A attention layers, a page holds their keys and values of a block of tokens, or the
        states of A layers without attention."""
        if self.delta is None:
            return self.kv_bytes(tokens, itemsize)
        block, attention = self.paged_block(block, itemsize), self.layers - self.delta.layers
        pages = -(-tokens // block) + -(-self.delta.layers // attention)
        return pages * attention * block * 2 * itemsize * self.keys

    def paged_block(self, block: int, itemsize: int = 2) -> int:
        """Return the tokens in a block of vLLM's KV cache: `block` or, in a hybrid model, its least multiple whose keys
        and values are as large as a layer's states."""
        if self.delta is None:
            return block
        return block * -(-self.delta.state_bytes // (block * 2 * itemsize * self.keys))


def named_shapes() -> list[str]:
    return sorted(entry.name.removesuffix(".json") for entry in SHAPES.iterdir())


def named_config(name: str | Path) -> dict[str, Any]:
    """Return the fields of a model's config.json, by its name here or on the hub, or by a folder or file. Case, owner,
    and endings such as -Instruct are ignored. The ValueError for an unknown name lists similar ones."""
    name = str(name) if isinstance(name, Path) else name
    if not isinstance(name, str) or not name:
        raise ValueError(f"the model is {name!r}; give one of {', '.join(named_shapes())}, or a folder with a "
                         "config.json")
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ValueError(f"no model {name!r}: the folder holds no config.json")
    if path.is_dir() or path.suffix == ".json":
        return read_config(path / "config.json" if path.is_dir() else path)
    short = shape_name(name)
    if short is None:
        close = difflib.get_close_matches(plain_name(name), named_shapes(), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else "."
        raise ValueError(f"no model {name!r}{hint} Give one of {', '.join(named_shapes())}, or a folder with a "
                         "config.json")
    return json.loads((SHAPES / f"{short}.json").read_text())


def shape_name(name: str) -> str | None:
    """Return the name of the shipped config for a model of this name; None if there is none."""
    plain = NAMESAKES.get(plain_name(name), plain_name(name))
    return plain if plain in named_shapes() else None


def plain_name(name: str) -> str:
    """Return a model's name in lower case, without its owner and without endings that do not change the shape."""
    return VARIANT.sub("", name.rpartition("/")[2].lower())


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json, and check it and the other settings beside it; ValueError names the file, and
    the field that no model can have so."""
    fields = read_fields(path)
    text = fields.get("text_config") or {}
    for part in (fields, text):
        check_fields(path, part, OF_CONFIG)
    for name, rules in OF_OTHERS.items():
        if (beside := path.with_name(name)).is_file():
            check_fields(beside, read_fields(beside) | {"vocab_size": (text or fields).get("vocab_size")}, rules)
    return fields


def read_fields(path: Path) -> dict[str, Any]:
    """Return the object in a model's JSON file. ValueError, with the file, if there is none."""
    try:
        fields = read_json(bytes_of(path), nul=True, any_number=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a model's {path.name}: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no object of fields; a model's {path.name} is needed")
    return fields
