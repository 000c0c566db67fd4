"""The model families that were checked here: what their layers are, and which of our modules take their places.
`FAMILIES` has one row for each, under transformers' `model_type` of the text config. A model of another family trains
on transformers' own layers, if they can be packed. docs/families.md is made of it, tests/models/test_families.py tries
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SPLIT, FUSED = ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)
DELTA_IN, DELTA_OUT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj"  # in a gated delta net
GATE_UP, FUSED_GATE_UP = ("gate_proj", "up_proj"), ("gate_up_proj",)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names of their number in configs


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm: x / rms(x) * (offset + weight)."""

    kind: str  # transformers' class
    eps: str = "variance_epsilon"  # the attribute that holds its epsilon
    offset: float = 0.0
    round_once: bool = False  # with offset 0: the product is rounded, x / rms(x) is not
    lean: bool = True  # whether ours takes its place


@dataclass(frozen=True)
class MLP:
    """down(act(gate) * up)."""

    kind: str
    inner: tuple[str, ...] = GATE_UP  # the children that make gate and up
    lean: bool = True


@dataclass(frozen=True)
class Attention:
    """Causal attention of every layer."""

    kind: str
    inner: tuple[str, ...] = SPLIT  # the children that make q, k and v
    norm: Literal["", "heads", "whole"] = ""  # for q and k: none, each head by itself, or all heads together
    position: Literal["half", "pairs"] = "half"  # RoPE turns x[i] with x[i + R / 2], or x[2 i] with x[2 i + 1]
    turned: float = 1.0  # the share of a head that RoPE turns, where a config does not say it
    turns: str = ""  # the attribute that says whether RoPE is in a layer; "": it is in all
    stretched: bool = False  # queries far from the start grow, as the config's `llama_4_scaling_beta` says
    window: Literal["", "config", "layers"] = ""  # whether all layers, or those that the config names, have a window
    bias: bool | None = None  # on q, k and v; None: as the config's `attention_bias` says
    values_are_keys: bool = False  # layers without `v_proj` take their keys, before norm and RoPE, as values
    gated: bool = False  # `q_proj` makes a gate of the result beside each query
    lean: bool = True


@dataclass(frozen=True)
class ExpertBlock:
    """A router, and gated MLPs of which each token takes some."""

    kind: str  # transformers' class of router and experts together
    lean: bool = True


@dataclass(frozen=True)
class Family:
    """One row."""

    name: str  # as people call it
    attention: Attention
    mlp: MLP
    norm: Norm
    norms: int = 2  # norms of the hidden size in a layer
    unlike_layers: bool = False  # head sizes, windows and keys differ from layer to layer: see layer_forms.py
    buffers: tuple[str, ...] = ()  # what a checkpoint holds for a layer beside parameters
    vllm: str | None = None  # the class of vLLM's own that computes it with the trainer's tensors; None: it has none
    delta_net: str = ""  # transformers' class of the layers that have a gated delta net in place of attention
    experts: ExpertBlock | None = None  # in place of the MLP, in the layers that have them
    only_bfloat16: bool = False  # float16 overflows, so that a loss would be NaN
    turns: tuple[str, ...] = ()  # tokens that its chat template writes, each of which must be one token
    refused: str = ""  # why the family cannot be trained, and what to take


IM, GEMMA, INST = ("<|im_start|>", "<|im_end|>"), ("<start_of_turn>", "<end_of_turn>"), ("[INST]", "[/INST]")
TAKE = "take a model of a family that trains here (docs/families.md)"


def decoder(name: str, prefix: str, **others: Any) -> Family:
    """A family whose classes have one prefix, and no more differences than are given."""
    parts: dict[str, Any] = {"attention": Attention(f"{prefix}Attention"), "mlp": MLP(f"{prefix}MLP"),
                             "norm": Norm(f"{prefix}RMSNorm"), "vllm": f"{prefix}ForCausalLM"}
    return Family(name, **(parts | others))


def refused(name: str, attention: str) -> Family:
    """A family that is not trained, because of its attention."""
    return Family(name, Attention("", lean=False), MLP("", lean=False), Norm("", lean=False), vllm=None,
                  refused=f"its attention has {attention}, which no form of packed attention here computes; {TAKE}")


FAMILIES: dict[str, Family] = {
    "llama": decoder("Llama", "Llama", turns=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": decoder("Mistral", "Mistral", turns=INST,
                       attention=Attention("MistralAttention", window="config")),
    "qwen2": decoder("Qwen2, Qwen2.5", "Qwen2", turns=IM,
                     attention=Attention("Qwen2Attention", window="layers", bias=True)),
    "qwen3": decoder("Qwen3", "Qwen3", turns=IM, attention=Attention("Qwen3Attention", norm="heads", window="layers")),
    "gemma3_text": decoder("Gemma 3 (text)", "Gemma3", norms=4, turns=GEMMA, norm=Norm("Gemma3RMSNorm", "eps", 1.0),
                           attention=Attention("Gemma3Attention", norm="heads", window="layers")),
    "phi3": decoder("Phi-3, Phi-4", "Phi3", turns=("<|end|>", *IM), mlp=MLP("Phi3MLP", FUSED_GATE_UP),
                    attention=Attention("Phi3Attention", FUSED, window="config")),
    "smollm3": decoder(
        "SmolLM3", "SmolLM3", vllm=None, turns=IM,
        attention=Attention("SmolLM3Attention", turns="use_rope", window="layers")),
    "olmo2": decoder("OLMo 2", "Olmo2", vllm=None, norm=Norm("Olmo2RMSNorm", round_once=True),
                     attention=Attention("Olmo2Attention", norm="whole")),
    "olmo3": decoder("OLMo 3", "Olmo3", vllm=None, norm=Norm("Olmo3RMSNorm", round_once=True),
                     attention=Attention("Olmo3Attention", norm="whole", window="layers")),
    "granite": decoder("Granite 3, 4 (dense)", "Granite", turns=("<|start_of_role|>", "<|end_of_role|>")),
    "glm4": decoder("GLM-4", "Glm4", norms=4, turns=("<|user|>", "<|assistant|>"), mlp=MLP("Glm4MLP", FUSED_GATE_UP),
                    attention=Attention("Glm4Attention", position="pairs", turned=0.5)),
    "ministral3": decoder("Ministral 3", "Ministral3", turns=INST, attention=Attention(
        "Ministral3Attention", stretched=True, window="config")),
    "gemma4_text": decoder(
        "Gemma 4 (text)", "Gemma4", norms=4, turns=("<|turn>", "<turn|>"), unlike_layers=True,
        buffers=("layer_scalar",), mlp=MLP("Gemma4TextMLP"),
        norm=Norm("Gemma4RMSNorm", "eps", round_once=True), attention=Attention(
            "Gemma4TextAttention", norm="heads", window="layers", values_are_keys=True, lean=False),
    ),
    "qwen3_5_text": decoder(
        "Qwen3.5, Qwen3.6, Qwen3.8 (dense, text)", "Qwen3_5", norm=Norm("Qwen3_5RMSNorm", "eps", 1.0),
        attention=Attention("Qwen3_5Attention", norm="heads", turned=0.25, gated=True, lean=False),
        delta_net="Qwen3_5GatedDeltaNet", only_bfloat16=True, turns=IM,
    ),
    "qwen3_moe": decoder("Qwen3-MoE", "Qwen3Moe", turns=IM, experts=ExpertBlock("Qwen3MoeSparseMoeBlock"),
                         attention=Attention("Qwen3MoeAttention", norm="heads", window="config")),
    "exaone4": decoder("EXAONE 4", "Exaone4", attention=Attention(
        "Exaone4Attention", norm="heads", window="layers", lean=False)),
    "gemma2": refused("Gemma 2", "soft-capped scores"),
    "gpt_oss": refused("gpt-oss", "sinks"),
}

WHOLE, INSIDE = r"^model\.language_model\.", r"^language_model\."
# for a checkpoint with images or sounds: the names of its text model's tensors, and those in a checkpoint of text only
TEXT_NAMES: dict[str, dict[str, str]] = {
    "gemma4": {WHOLE: "model."},
    "mistral3": {INSIDE + r"model\.": "model.", INSIDE + "lm_head": "lm_head", WHOLE: "model."},
    "qwen3_5": {WHOLE: "model."},
}
# the other kinds with images that load, with all their parts: transformers has a causal language model of them
WHOLE_KINDS = ("gemma3", "gemma3n", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama", "phi4_multimodal",
               "qwen3_5_moe", "qwen4_exp")
IMAGES = ("{!r} is a model of images ({}), and images are not supported: only text is trained here. Take a text model, "
          "such as Qwen3 instead of Qwen3-VL, or one whose text part is loaded (docs/families.md): {}")


MULTIPLIED = ("hyperclovax",)  # families whose `logits_scaling` multiplies logits; that of others divides them
NO_FLOAT16 = ("{} overflows in float16: the loss would be NaN. Take bfloat16 (dtype=torch.bfloat16, bf16=True), which "
              "cards of sm_80 and later compute in, or dtype=torch.float32 with load_in_4bit=True on an older one")


def model_type_of(config: Any) -> str:
    """The `model_type` of the text part of a config, or of a config.json's fields; "" where it has none."""
    if isinstance(config, Mapping):
        return str((config.get("text_config") or config).get("model_type", ""))
    return str(config.get_text_config().model_type)


def has_experts(config: Any) -> bool:
    """Return whether a config, or a config.json's fields, describes a mixture of several experts."""
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    fields = fields.get("text_config") or fields
    return any((fields.get(name) or 1) > 1 for name in EXPERTS)


def family_of(config: Any) -> Family | None:
    """Return the row of a model's config, or of a config.json's fields; None for a family without one."""
    return FAMILIES.get(model_type_of(config))


def check_family(config: Any, name: str) -> str | None:
    """Return a note on a model without a row before it is loaded, else None; ValueError for a refused family."""
    check_images(config, name)
    row, kind = family_of(config), model_type_of(config)
    if row is not None and row.refused:
        raise ValueError(f"{name!r} is of the family {row.name}: {row.refused}")
    if row is not None:
        return None
    return (f"{name} is of a family that was not checked here ({kind or 'without a model_type'}): it trains on "
            "transformers' own layers, and the first pass refuses it if its sequences cannot be packed. See "
            "docs/families.md")


def check_images(config: Any, name: str) -> None:
    """Raise ValueError for a model of images that is no causal language model."""
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    kind = str(fields.get("model_type"))
    if fields.get("vision_config") and kind not in TEXT_NAMES and kind not in WHOLE_KINDS:
        label = next(iter(fields.get("architectures") or [kind]))
        raise ValueError(IMAGES.format(name, label, ", ".join(TEXT_NAMES)))


def check_float16(config: Any) -> None:
    """Raise ValueError for a model that cannot compute in float16."""
    row = family_of(config)
    if row is not None and row.only_bfloat16:
        raise ValueError(NO_FLOAT16.format(row.name))


def sampled_by(row: Family) -> str:
    """Return the engines that sample a family, in words."""
    return "vLLM and transformers" if row.vllm else "transformers"


def trained(by_vllm: bool = False) -> str:
    """The names of the families that train, as one list; with `by_vllm`, of those that vLLM samples."""
    return ", ".join(row.name for row in FAMILIES.values() if not row.refused and (row.vllm or not by_vllm))


def with_experts() -> str:
    """Return the names of the families with experts, in words."""
    return ", ".join(row.name for row in FAMILIES.values() if row.experts is not None)


def planned_as(config: Any, name: str, engine: str) -> dict[str, str]:
    """Return a plan's words for the family of a config, and for its engine; ValueError for a family that is refused."""
    said, row = check_family(config, name), family_of(config)
    if row is None:
        return {"family": said or ""}
    words = {"family": row.name, "sampled by": sampled_by(row)}
    if engine == "vllm" and not row.vllm:
        words["note"] = f"vLLM does not sample {row.name}: plan with --engine transformers"
    return words
