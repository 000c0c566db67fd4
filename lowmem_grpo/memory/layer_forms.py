"""The linear weights of a decoder layer: their bytes in each form, and the instructions of their decode kernels. Also
the sizes of layers in models whose layers differ."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowmem_grpo.memory.families import EXPERTS, Family

NF4, FP8, FP8_BLOCK, MXFP4, BITS_16 = "nf4", "fp8", "fp8-block", "mxfp4", "16bit"  # how weights are stored, see FORMS
NVFP4 = "nvfp4"
BLOCK, NESTED_BLOCK = 64, 256  # NF4: weights per scale, and scales per nested scale
TABLES = 4 * (16 + 256 + 1)  # bytes: NF4's code table, that of the quantized scales, and their offset
GLOBAL_HEAD = 512  # default head size of Gemma 4's layers without a window
# Instructions per weight of the decode kernels, counted in their compiled loops (tests/bench/test_kernels.py counts
# those in 4 bits): form -> least compute capability -> {most rows: instructions} (no tensor cores before sm_80, no e4m3
# type before sm_89).
DECODE_INSTRUCTIONS = {
    "nf4": {80: {8: 5.0, 16: 6.3, 32: 8.8, 64: 7.8}, 75: {1: 8.0, 8: 17.6, 16: 35.2, 24: 52.8, 32: 70.4, 40: 88.0},
            0: {1: 8.0, 8: 17.6, 16: 35.2, 24: 52.8, 32: 70.4}},
    "fp8": {89: {8: 5.3, 32: 6.0, 64: 8.6}, 80: {8: 12.7, 32: 13.3, 64: 15.8},
            75: {1: 15.4, 8: 24.7, 16: 49.4, 24: 74.1, 32: 98.8}, 0: {1: 15.4, 8: 24.7, 16: 49.4, 24: 74.1}},
    "nvfp4": {80: {8: 11.6, 16: 12.4, 32: 14.5, 64: 14.2}, 75: {1: 12.6, 8: 22.1, 16: 44.2, 24: 66.3, 32: 88.4},
              0: {1: 12.6, 8: 22.1, 16: 44.2, 24: 66.3}},
}


@dataclass(frozen=True)
class Linear:
    """A linear weight (out, in) of a layer, or a stack of experts' weights."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    lora: bool = True  # whether it gets LoRA by default
    experts: int = 1  # matrices in the stack
    taken: int = 1  # matrices of the stack that each token uses
    stored: str = ""  # the form in which its checkpoint stores it, which is kept; "": that of the model

    @property
    def weights(self) -> int:
        return self.experts * self.rows * self.columns

    @property
    def passed(self) -> int:
        """The number of weights that each token is multiplied with."""
        return self.taken * self.rows * self.columns

    @property
    def biases(self) -> int:
        return self.bias * self.experts * self.rows

    def form_in(self, form: str) -> str:
        """Return the form of this weight in a model of this form."""
        return self.stored or (BITS_16 if FORMS[form].only_experts and self.experts == 1 else form)

    def bytes_in(self, form: str, word: int = 2) -> int:
        """Return the bytes in this form; without one, a weight takes `word` bytes."""
        return word * self.weights if self.form_in(form) == BITS_16 else FORMS[self.form_in(form)].nbytes(self)


@dataclass(frozen=True)
class WeightForm:
    """A form in which weights are stored, as plans see it."""

    words: str
    bits: int  # of a weight, without scales
    nbytes: Callable[[Linear], int]
    joined: Callable[[Linear], int] = lambda linear: 0  # more bytes if the weight lies beside others
    instructions: Mapping[int, Mapping[int, float]] = field(default_factory=dict)  # of its decode kernel, if it has one
    narrow: bool = False  # this kernel is launched as in `few_rows.narrow_launch`
    experts: bool = True  # experts may be stored so
    only_experts: bool = False  # the other linears of such a model are in 16 bits


def nf4_bytes(linear: Linear) -> int:
    blocks = -(-linear.weights // BLOCK)
    return -(-linear.weights // 2) + blocks + 4 * -(-blocks // NESTED_BLOCK) + TABLES


FORMS = {
    NF4: WeightForm(
        "NF4, double quantization", 4, nf4_bytes,
        lambda linear: 4 * (-(-linear.weights // (BLOCK * NESTED_BLOCK)) - 1),  # an offset per nested block, not one
        DECODE_INSTRUCTIONS[NF4], narrow=True),
    FP8: WeightForm("FP8, a scale for each row", 8, lambda linear: linear.weights + 4 * linear.rows,
                    instructions=DECODE_INSTRUCTIONS[FP8], experts=False),
    FP8_BLOCK: WeightForm(
        "FP8, a scale for each block", 8,
        lambda linear: linear.weights + 4 * -(-linear.rows // 128) * -(-linear.columns // 128),
        instructions=DECODE_INSTRUCTIONS[FP8], experts=False),
    MXFP4: WeightForm("MXFP4, as they are stored, other linears in 16 bits", 4,
                      lambda linear: -(-linear.weights // 2) + -(-linear.weights // 32), only_experts=True),
    NVFP4: WeightForm("NVFP4", 4, lambda linear: linear.weights // 2 + linear.weights // 16 + 4 * linear.rows,
                      instructions=DECODE_INSTRUCTIONS[NVFP4], narrow=True, experts=False),
    BITS_16: WeightForm("16 bits", 16, lambda linear: 2 * linear.weights),
}


def block_outputs(outputs: int, rows: int, form: str) -> int:
    """Return the outputs per block of the decode kernel, as in `few_rows.narrow_launch` and `decode_launch`."""
    if FORMS[form].narrow:
        return 16 if rows <= 32 else 32
    return 64 if outputs >= 8192 and rows <= 32 else 32


@dataclass(frozen=True)
class LayerForm:
    """The sizes of one layer in a model whose layers differ."""

    head_size: int  # K
    kv_heads: int  # H_kv
    inner: int  # I
    window: int | None
    own_keys: bool = True  # False: it uses an earlier layer's keys and values
    own_values: bool = True  # False: the key projection also gives the values


@dataclass(frozen=True)
class DeltaForm:
    """The sizes of the gated delta nets of a hybrid model; its other layers have attention."""

    layers: int  # number of layers with a delta net
    key_heads: int
    heads: int  # H, value heads
    key_size: int
    value_size: int
    width: int  # W, the convolution's width

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> "DeltaForm":
        """Read a config's fields; without `layer_types`, every `full_attention_interval`th layer has attention."""
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
        """C, the size of a token's query, key and value together."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def weight_bytes(self) -> int:
        """The bytes of a layer's weights besides its projections: convolution, norm, decays."""
        return 2 * (self.mixed * self.width + self.value_size + 2 * self.heads)

    @property
    def state_bytes(self) -> int:
        """The bytes of one sequence's states in a layer: the delta rule's in float32, the convolution's in 16 bits."""
        return 4 * self.heads * self.key_size * self.value_size + 2 * self.mixed * (self.width - 1)


@dataclass(frozen=True)
class ExpertForm:
    """The sizes of a mixture of experts; layers without experts have an MLP."""

    layers: int  # number of layers with experts
    count: int  # E, experts of a layer
    taken: int  # k, experts that each token uses
    inner: int  # I, of one expert

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> "ExpertForm":
        """Read a config's fields. `decoder_sparse_step` and `mlp_only_layers` say which layers have experts."""
        every, without = fields.get("decoder_sparse_step") or 1, fields.get("mlp_only_layers") or ()
        layers = set(range(every - 1, fields["num_hidden_layers"], every)) - set(without)
        count = next(fields[name] for name in EXPERTS if fields.get(name))  # transformers renames the file's field
        inner = fields.get("moe_intermediate_size") or fields["intermediate_size"]
        return cls(len(layers), count, fields["num_experts_per_tok"], inner)


@dataclass(frozen=True)
class VisionForm:
    """The sizes of a tower of images, which is frozen in 16 bits."""

    weight_bytes: int
    side: int  # pixels along a side of what one feature shows
    levels: int  # features of an image's place that later layers add (deep stack)

    @classmethod
    def from_config(cls, fields: Mapping[str, Any]) -> "VisionForm":
        """Read the `vision_config` of Qwen2.5-VL, whose MLPs are gated and whose norms have no bias, or of Qwen3-VL."""
        size, inner, patch = fields["hidden_size"], fields["intermediate_size"], fields["patch_size"]
        merge, stacked = fields.get("spatial_merge_size") or 2, fields.get("deepstack_visual_indexes")
        together, gated = size * merge**2, stacked is None
        norm, mlps = (1, 3) if gated else (2, 2)  # vectors, and matrices beside as many biases
        patches = size * (3 * (fields.get("temporal_patch_size") or 2) * patch**2 + (0 if gated else 1))
        block = 4 * size * (size + 1) + mlps * size * inner + (mlps - 1) * inner + size + 2 * norm * size
        merger = together * (together + 1) + (together + 1) * fields["out_hidden_size"]
        places, levels = (0 if gated else fields["num_position_embeddings"] * size), len(stacked or ())
        weights = patches + places + fields["depth"] * block + (1 + levels) * merger + norm * (size + levels * together)
        angles = 2 * 4 * (size // fields["num_heads"] // 4)
        return cls(2 * weights + angles, patch * merge, levels)

    def tokens(self, pixels: int) -> int:
        """Return the tokens of a square image of so many pixels, whose sides are rounded to whole features."""
        return max(1, round(math.sqrt(pixels) / self.side)) ** 2


def forms_of(fields: Mapping[str, Any]) -> tuple[LayerForm, ...]:
    """Return every layer of a config with Gemma 4's fields, in order. `per_layer_config` has the fields that differ for
    a layer; older configs have `global_head_dim` and `num_global_key_value_heads` for the layers without a window."""
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
    """Return the fields that a config overrides for one layer, by its number or because it has full attention."""
    each = fields.get("per_layer_config")
    if each is not None:
        return each.get(str(number), each.get(number)) or {}
    if not full:
        return {}
    heads = fields.get("num_global_key_value_heads") if fields.get("attention_k_eq_v") else None
    return {"head_dim": fields.get("global_head_dim") or GLOBAL_HEAD, "num_key_value_heads": heads}


def turned_share(fields: Mapping[str, Any], row: Family) -> float:
    """Return the share of a head that RoPE rotates. If layers differ, it is 1.0: their RoPE table spans the head."""
    if row.unlike_layers:
        return 1.0
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return float(rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or row.attention.turned)
