"""The numbers of a model's config that decide its memory, and the models whose configs ship with the package."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from lowmem_grpo.memory.families import (
    DELTA_IN,
    DELTA_OUT,
    FAMILIES,
    FUSED,
    FUSED_GATE_UP,
    Family,
    decoder,
    has_experts,
)
from lowmem_grpo.memory.layer_forms import DeltaForm, LayerForm, forms_of

FORMS = NF4, FP8, FP8_BLOCK, BITS_16 = "nf4", "fp8", "fp8-block", "16bit"  # in which weights are held
BLOCK, NESTED_BLOCK = 64, 256  # NF4: weights that share a scale, scales that share one of theirs
TABLES = 4 * (16 + 256 + 1)  # bytes: NF4's values, those of the scales, and their offset
PLAIN = decoder("a plain decoder", "")
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
VARIANT = re.compile(r"-(instruct|base|it|chat|unsloth|bnb|4bit|bf16)$")
NAMESAKES = {"phi-4": "phi-4-14b", "meta-llama-3.1-8b": "llama-3.1-8b", "meta-llama-3.3-70b": "llama-3.3-70b"}


@dataclass(frozen=True)
class Linear:
    """A weight (out, in) of a layer."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    lora: bool = True  # whether it is adapted where no target is named

    @property
    def weights(self) -> int:
        return self.rows * self.columns

    @property
    def nf4_bytes(self) -> int:
        """In NF4 with double quantization."""
        blocks = -(-self.weights // BLOCK)
        return -(-self.weights // 2) + blocks + 4 * -(-blocks // NESTED_BLOCK) + TABLES

    def bytes_in(self, form: str) -> int:
        """In one of FORMS: FP8 has a scale for each row, or for each block of 128 x 128."""
        scales = {FP8: self.rows, FP8_BLOCK: -(-self.rows // 128) * -(-self.columns // 128)}
        if form in scales:
            return self.weights + 4 * scales[form]
        return self.nf4_bytes if form == NF4 else 2 * self.weights


@dataclass(frozen=True)
class ModelShape:
    """D hidden size, I inner size of the MLP, L layers, H query heads and H_kv key heads of K numbers, V vocabulary.

    Where layers are not alike, `forms` has them all, and I, H_kv and K are those of the largest.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # the head is the embedding
    context: int | None  # the longest that the model was made for
    model_type: str = ""
    attention_bias: bool = False
    window: int | None = None  # tokens that a layer with a sliding window sees
    own_keys: bool = True
    own_values: bool = True
    forms: tuple[LayerForm, ...] = ()
    per_layer: int = 0  # P, numbers that each layer takes of a token beside its input; 0: none
    per_layer_vocabulary: int = 0  # rows of the table of these, which is L P wide
    delta: DeltaForm | None = None  # of the layers without attention, where there are such; in `each`, of these only

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """From a config.json's fields, or a transformers config; ValueError where they describe no dense decoder."""
        fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        fields = fields.get("text_config") or fields
        missing = [name for name in NEEDED if not isinstance(fields.get(name), int)]
        if missing:
            raise ValueError(f"the config has no {', '.join(missing)}; a decoder's config.json is needed")
        if has_experts(fields):
            raise ValueError(f"{fields.get('model_type')} has several experts; plans are made for dense models only")
        heads, kind = fields["num_attention_heads"], str(fields.get("model_type", ""))
        row = family_named(kind)
        bias, forms = row.attention.bias, forms_of(fields) if row.unlike_layers else ()
        found = cls(
            fields["hidden_size"], fields["intermediate_size"], fields["num_hidden_layers"], heads,
            fields.get("num_key_value_heads") or heads, fields.get("head_dim") or fields["hidden_size"] // heads,
            fields["vocab_size"], bool(fields.get("tie_word_embeddings", False)),
            fields.get("max_position_embeddings"), kind,
            bool(fields.get("attention_bias")) if bias is None else bias,
            fields.get("sliding_window") if fields.get("use_sliding_window", True) else None, forms=forms,
            per_layer=fields.get("hidden_size_per_layer_input") or 0,
            per_layer_vocabulary=fields.get("vocab_size_per_layer_input") or 0,
            delta=DeltaForm.of(fields) if row.delta_net else None,
        )
        if not forms:
            return found
        largest = max(forms, key=lambda form: form.own_keys * form.head_size * form.kv_heads)
        return replace(found, head_size=largest.head_size, kv_heads=largest.kv_heads,
                       inner=max(form.inner for form in forms))

    def each(self) -> Iterator[tuple[int, "ModelShape"]]:
        """The shapes of layers that are alike, and how many layers have each."""
        if self.delta is not None:
            yield self.delta.layers, replace(self, own_keys=False)
            yield self.layers - self.delta.layers, replace(self, delta=None)
        elif not self.forms:
            yield self.layers, self
        for form, count in Counter(self.forms).items():
            yield count, replace(
                self, head_size=form.head_size, kv_heads=form.kv_heads, inner=form.inner, window=form.window,
                own_keys=form.own_keys, own_values=form.own_values, forms=(),
            )

    @property
    def for_all_layers(self) -> int:
        """Numbers of a token that all layers share while a micro-batch is computed: cosines and sines of the positions,
        those that each layer takes beside its input, and keys and values of layers that serve later ones."""
        if not self.forms:
            return 2 * self.head_size
        lent = {(form.window, form.head_size * form.kv_heads) for form in self.forms if form.own_keys}
        shared = 0 if all(form.own_keys for form in self.forms) else sum(keys for _, keys in lent)
        return 2 * (sum({form.head_size for form in self.forms}) + shared) + self.layers * self.per_layer

    @property
    def family(self) -> Family:
        """The row of its family."""
        return family_named(self.model_type)

    @property
    def queries(self) -> int:
        """Numbers that a token's queries hold: H K."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Numbers that a token's keys hold, and its values: H_kv K."""
        return self.kv_heads * self.head_size

    def linears(self) -> Iterator[Linear]:
        """The weights of one layer that are quantized and take LoRA."""
        bias = self.attention_bias
        if self.delta is not None:
            sizes = (self.delta.mixed, self.delta.values, self.delta.heads, self.delta.heads)
            yield from (Linear(name, rows, self.hidden) for name, rows in zip(DELTA_IN, sizes, strict=True))
            yield Linear(DELTA_OUT, self.hidden, self.delta.values)
        elif self.family.attention.inner == FUSED:
            yield Linear("qkv_proj", self.queries + 2 * self.keys, self.hidden, bias)
        else:
            yield Linear("q_proj", self.queries * (1 + self.family.attention.gated), self.hidden, bias)
            if self.own_keys:
                yield Linear("k_proj", self.keys, self.hidden, bias)
            if self.own_keys and self.own_values:
                yield Linear("v_proj", self.keys, self.hidden, bias)
        if self.delta is None:
            yield Linear("o_proj", self.hidden, self.queries)
        if self.family.mlp.inner == FUSED_GATE_UP:
            yield Linear("gate_up_proj", 2 * self.inner, self.hidden)
        else:
            yield Linear("gate_proj", self.inner, self.hidden)
            yield Linear("up_proj", self.inner, self.hidden)
        yield Linear("down_proj", self.hidden, self.inner)
        if self.per_layer:
            yield Linear("per_layer_input_gate", self.per_layer, self.hidden, lora=False)
            yield Linear("per_layer_projection", self.hidden, self.per_layer, lora=False)

    @property
    def linear_weights(self) -> int:
        """Numbers in the linear layers of all decoder layers, biases aside."""
        return sum(count * sum(one.weights for one in shape.linears()) for count, shape in self.each())

    def weight_bytes(self, form: str) -> int:
        """Of all layers and norms, with linear layers in this form; embedding and head are apart."""
        layers = sum(count * shape.layer_bytes(form) for count, shape in self.each())
        angles = sum({shape.head_size: 2 * 4 * (shape.head_size // 2) for _, shape in self.each()}.values())
        return layers + 2 * self.hidden + angles + self.per_layer_bytes(form)

    def layer_bytes(self, form: str) -> int:
        """Of one layer with its norms."""
        linears = sum(one.bytes_in(form) for one in self.linears())
        linears += self.offset_bytes() if form == NF4 else 0
        biases = 2 * sum(one.rows for one in self.linears() if one.bias)
        return linears + biases + self.norm_bytes() + (2 * len(self.family.buffers))

    def norm_bytes(self) -> int:
        """Of a layer's norms: those of the hidden size, and those of queries and keys."""
        hidden = 2 * (self.family.norms + bool(self.per_layer)) * self.hidden
        if self.delta is not None:
            return hidden + self.delta.weight_bytes
        if self.family.attention.norm == "whole":
            return hidden + 2 * (self.queries + self.keys)
        return hidden + (2 * (1 + self.own_keys) * self.head_size if self.family.attention.norm else 0)

    def per_layer_bytes(self, form: str) -> int:
        """Of the table that gives each layer numbers of its own, and of what is added to them; two scales."""
        if not self.per_layer:
            return 0
        width = self.layers * self.per_layer
        projection = Linear("per_layer_model_projection", width, self.hidden)
        table = 2 * self.per_layer_vocabulary * width
        return table + projection.bytes_in(form) + 2 * self.per_layer + 2 * 4

    def groups(self) -> list[list[Linear]]:
        """The linears of a layer that the loader lays side by side in NF4, one dequantization for each group."""
        linears = {one.name: one for one in self.linears()}
        form, found = self.family, [[one] for name, one in linears.items() if name.startswith("per_layer")]
        for names in (DELTA_IN, (DELTA_OUT,), form.attention.inner, ("o_proj",), form.mlp.inner, ("down_proj",)):
            group = [linears[name] for name in names if name in linears]
            whole = len(group) == len(names) and all(one.weights % (BLOCK * NESTED_BLOCK) == 0 for one in group[:-1])
            found += [group] if whole else [[one] for one in group]
        return found

    def offset_bytes(self) -> int:
        """Of a layer's weights side by side: one offset for each nested block, in place of one for each weight."""
        blocks = [-(-one.weights // (BLOCK * NESTED_BLOCK)) for group in self.groups() if len(group) > 1
                  for one in group]
        return 4 * (sum(blocks) - len(blocks))

    @property
    def table_bytes(self) -> int:
        """The embedding, and the head likewise, in 16 bits."""
        return 2 * self.vocabulary * self.hidden

    def lora_weights(self, rank: int) -> int:
        """Numbers of LoRA on all linears."""
        return rank * sum(count * sum(one.rows + one.columns for one in shape.linears() if one.lora)
                          for count, shape in self.each())

    def kv_bytes(self, tokens: int) -> int:
        """Of keys and values of one sequence in 16 bits, and of its states in layers without attention."""
        keys = 2 * 2 * tokens * sum(count * shape.keys for count, shape in self.each() if shape.own_keys)
        return keys + (self.delta.layers * self.delta.state_bytes if self.delta is not None else 0)


def family_named(model_type: str) -> Family:
    """The row of a family; where there is none, that of a plain decoder."""
    return FAMILIES.get(model_type, PLAIN)


def named_shapes() -> list[str]:
    """The names that ship with the package."""
    return sorted(entry.name.removesuffix(".json") for entry in (files("lowmem_grpo") / "assets" / "shapes").iterdir())


def named_config(name: str) -> dict[str, Any]:
    """The config.json of a model by its name here or on the hub, or of a folder or file.

    Case, the owner, and endings such as -Instruct do not matter. ValueError names what comes close.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return read_config(path / "config.json" if path.is_dir() else path)
    short = shape_name(name)
    if short is None:
        close = difflib.get_close_matches(plain_name(name), named_shapes(), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"no model {name!r}; {hint}Give one of {', '.join(named_shapes())}, or a folder with a config.json"
        )
    found: dict[str, Any] = json.loads((files("lowmem_grpo") / "assets" / "shapes" / f"{short}.json").read_text())
    return found


def shape_name(name: str) -> str | None:
    """The shipped shape that a name means; None where there is none."""
    plain = plain_name(name)
    plain = NAMESAKES.get(plain, plain)
    return plain if plain in named_shapes() else None


def plain_name(name: str) -> str:
    """Lower case, without the owner and without endings that do not change the shape."""
    plain = name.rpartition("/")[2].lower()
    while (shorter := VARIANT.sub("", plain)) != plain:
        plain = shorter
    return plain


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a config.json; ValueError says why it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a model's config.json: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object of fields; a model's config.json is needed")
    return found
