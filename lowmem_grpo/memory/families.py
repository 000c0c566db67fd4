"""The tested model families: the form of their layers, and which layers our modules replace. docs/families.md is
generated from `FAMILIES`, which is keyed by the `model_type` of transformers' text config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SPLIT, FUSED = ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)
DELTA_IN, DELTA_OUT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj"  # in a gated delta net
GATE_UP, FUSED_GATE_UP = ("gate_proj", "up_proj"), ("gate_up_proj",)

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config fields with the number of experts


@dataclass(frozen=True)
class Norm:
    """A root-mean-square norm: x / rms(x) * (offset + weight)."""

    kind: str  # transformers' class
    eps: str = "variance_epsilon"  # the attribute that holds its epsilon
    offset: float = 0.0
    round_once: bool = False  # with offset 0: only the product is rounded, not x / rms(x)
    lean: bool = True  # whether our module replaces it


@dataclass(frozen=True)
class MLP:
    """A gated MLP: down(act(gate) * up)."""

    kind: str
    inner: tuple[str, ...] = GATE_UP  # the children that make gate and up
    lean: bool = True


@dataclass(frozen=True)
class Attention:
    """The causal attention of a family's layers."""

    kind: str
    inner: tuple[str, ...] = SPLIT  # the children that make q, k and v
    norm: Literal["", "heads", "whole"] = ""  # norm of q and k: none, per head, or over all heads together
    # RoPE rotates x[i] with x[i + R / 2], or x[2 i] with x[2 i + 1]; "once": as "half", and cos and sin are (T, R / 2)
    position: Literal["half", "pairs", "once"] = "half"
    turned: float = 1.0  # the share of a head that RoPE rotates, if the config does not give it
    turns: str = ""  # the module attribute that tells whether a layer has RoPE; "": all layers have it
    stretched: bool = False  # queries are scaled up by position, with the config's `llama_4_scaling_beta`
    window: Literal["", "config", "layers"] = ""  # window: none, the config's in all layers, or in those it lists
    bias: bool | None = None  # on q, k and v; None: the config's `attention_bias`
    values_are_keys: bool = False  # layers without `v_proj` use their keys, before norm and RoPE, as values
    sinks: bool = False  # a learned score of each head takes a share of its probabilities
    gated: bool = False  # `q_proj` also outputs a gate for the attention result
    lean: bool = True


@dataclass(frozen=True)
class ExpertBlock:
    """A router with experts: gated MLPs, of which each token uses k."""

    kind: str  # transformers' class of the block of router and experts
    biased: bool = False  # router and experts have biases
    lean: bool = True
    router: str = "gate"  # the child that chooses experts
    pair: bool = False  # the block returns its gates too
    stacked: bool = False  # checkpoints hold all experts of a layer in one tensor (E, in, out), or in MXFP4
    lora: bool = False  # whether LoRA may go on experts too


@dataclass(frozen=True)
class Family:
    """One row of `FAMILIES`."""

    name: str  # the common name
    attention: Attention
    mlp: MLP
    norm: Norm
    layer: str = ""  # transformers' class of layers that are norm, attention, sum, norm, MLP, sum; "" for others
    norms: int = 2  # norms of the hidden size in a layer
    unlike_layers: bool = False  # head sizes, windows and keys differ between layers: see layer_forms.py
    buffers: tuple[str, ...] = ()  # tensors of a layer in the checkpoint that are not parameters
    vllm: str | None = None  # vLLM's model class, which computes it with the trainer's tensors; None: no such class
    delta_net: str = ""  # transformers' class of the gated delta net, in layers that have one instead of attention
    experts: ExpertBlock | None = None  # replaces the MLP in layers with experts
    only_bfloat16: bool = False  # float16 overflows, and the loss would be NaN
    turns: tuple[str, ...] = ()  # markers in its chat template, each of which must be a single token
    vision: bool = False  # the text part of models that are trained with images, whole: `FastVisionModel`
    refused: str = ""  # why the family cannot be trained, and what to use instead


IM, GEMMA, INST = ("<|im_start|>", "<|im_end|>"), ("<start_of_turn>", "<end_of_turn>"), ("[INST]", "[/INST]")
TAKE = "take a model of a family that trains here (docs/families.md)"


def decoder(name: str, prefix: str, pre_norm: bool = False, **others: Any) -> Family:
    """Return a Llama-like family whose classes share a prefix; `others` are the fields that differ."""
    parts: dict[str, Any] = {"layer": f"{prefix}DecoderLayer" * pre_norm, "mlp": MLP(f"{prefix}MLP"),
                             "attention": Attention(f"{prefix}Attention"),
                             "norm": Norm(f"{prefix}RMSNorm"), "vllm": f"{prefix}ForCausalLM"}
    return Family(name, **(parts | others))


PLAIN = decoder("a plain decoder", "")


def refused(name: str, attention: str) -> Family:
    """Return a family that cannot be trained because of its attention."""
    return Family(name, Attention("", lean=False), MLP("", lean=False), Norm("", lean=False), vllm=None,
                  refused=f"its attention has {attention}, which packed attention here does not support; {TAKE}")


FAMILIES: dict[str, Family] = {
    "llama": decoder("Llama", "Llama", pre_norm=True, turns=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": decoder("Mistral", "Mistral", pre_norm=True, turns=INST,
                       attention=Attention("MistralAttention", window="config")),
    "qwen2": decoder("Qwen2, Qwen2.5", "Qwen2", pre_norm=True, turns=IM,
                     attention=Attention("Qwen2Attention", window="layers", bias=True)),
    "qwen3": decoder("Qwen3", "Qwen3", pre_norm=True, turns=IM,
                     attention=Attention("Qwen3Attention", norm="heads", window="layers")),
    "qwen2_5_vl_text": decoder("Qwen2.5-VL", "Qwen2_5_VL", pre_norm=True, vllm=None, vision=True, turns=IM,
                               mlp=MLP("Qwen2MLP"),
                               attention=Attention("Qwen2_5_VLAttention", window="layers", bias=True)),
    "qwen3_vl_text": decoder("Qwen3-VL", "Qwen3VLText", pre_norm=True, vllm=None, vision=True, turns=IM,
                             attention=Attention("Qwen3VLTextAttention", norm="heads")),
    "gemma3_text": decoder("Gemma 3 (text)", "Gemma3", norms=4, turns=GEMMA, norm=Norm("Gemma3RMSNorm", "eps", 1.0),
                           attention=Attention("Gemma3Attention", norm="heads", window="layers")),
    "phi3": decoder("Phi-3, Phi-4", "Phi3", turns=("<|end|>", *IM), mlp=MLP("Phi3MLP", FUSED_GATE_UP),
                    attention=Attention("Phi3Attention", FUSED, window="config")),
    "smollm3": decoder("SmolLM3", "SmolLM3", pre_norm=True, vllm=None, turns=IM,
                       attention=Attention("SmolLM3Attention", turns="use_rope", window="layers")),
    "olmo2": decoder("OLMo 2", "Olmo2", vllm=None, norm=Norm("Olmo2RMSNorm", round_once=True),
                     attention=Attention("Olmo2Attention", norm="whole")),
    "olmo3": decoder("OLMo 3", "Olmo3", vllm=None, norm=Norm("Olmo3RMSNorm", round_once=True),
                     attention=Attention("Olmo3Attention", norm="whole", window="layers")),
    "granite": decoder("Granite 3, 4 (dense)", "Granite", turns=("<|start_of_role|>", "<|end_of_role|>")),
    "glm4": decoder("GLM-4", "Glm4", norms=4, turns=("<|user|>", "<|assistant|>"), mlp=MLP("Glm4MLP", FUSED_GATE_UP),
                    attention=Attention("Glm4Attention", position="pairs", turned=0.5)),
    "ministral3": decoder("Ministral 3", "Ministral3", pre_norm=True, turns=INST, attention=Attention(
        "Ministral3Attention", stretched=True, window="config")),
    "gemma4_text": decoder(
        "Gemma 4 (text)", "Gemma4", norms=4, turns=("<|turn>", "<turn|>"), unlike_layers=True,
        buffers=("layer_scalar",), mlp=MLP("Gemma4TextMLP"), norm=Norm("Gemma4RMSNorm", "eps", round_once=True),
        attention=Attention("Gemma4TextAttention", norm="heads", window="layers", values_are_keys=True, lean=False)),
    "qwen3_5_text": decoder(
        "Qwen3.5, Qwen3.6, Qwen3.8 (dense, text)", "Qwen3_5", norm=Norm("Qwen3_5RMSNorm", "eps", 1.0),
        attention=Attention("Qwen3_5Attention", norm="heads", turned=0.25, gated=True, lean=False),
        delta_net="Qwen3_5GatedDeltaNet", only_bfloat16=True, turns=IM),
    "qwen3_moe": decoder("Qwen3-MoE", "Qwen3Moe", pre_norm=True, turns=IM,
                         experts=ExpertBlock("Qwen3MoeSparseMoeBlock"),
                         attention=Attention("Qwen3MoeAttention", norm="heads", window="config")),
    "exaone4": decoder("EXAONE 4", "Exaone4", attention=Attention(
        "Exaone4Attention", norm="heads", window="layers", lean=False)),
    "gemma2": refused("Gemma 2", "soft-capped scores"),
    "deepseek_v4": refused("DeepSeek-V4", "keys of compressed tokens"),
    "gpt_oss": decoder(
        "gpt-oss", "GptOss", vllm=None, turns=("<|start|>", "<|message|>", "<|end|>"), only_bfloat16=True,
        mlp=MLP("", lean=False), norm=Norm("GptOssRMSNorm", round_once=True),
        experts=ExpertBlock("GptOssMLP", biased=True, router="router", pair=True, stacked=True, lora=True),
        attention=Attention("GptOssAttention", window="layers", position="once", sinks=True)),
}

WHOLE, INSIDE = r"^model\.language_model\.", r"^language_model\."
# for multimodal checkpoints: patterns of the text model's tensor names, and their form in a text-only checkpoint
TEXT_NAMES: dict[str, dict[str, str]] = {
    "gemma4": {WHOLE: "model."},
    "mistral3": {INSIDE + r"model\.": "model.", INSIDE + "lm_head": "lm_head", WHOLE: "model."},
    "qwen3_5": {WHOLE: "model."},
}
# other multimodal model types, which load with all their parts: transformers has a causal language model for them
WHOLE_KINDS = ("gemma3", "gemma3n", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama", "phi4_multimodal",
               "qwen3_5_moe", "qwen4_exp")
# multimodal model types that are trained with images: `FastVisionModel` loads them whole
VISION = tuple(kind.removesuffix("_text") for kind, row in FAMILIES.items() if row.vision)
# {pattern of their stored names: name in the loaded model}; checkpoints of transformers before 4.52 have the first two
STORED_VISION = {r"^visual\.": "model.visual.", r"^model\.(?!language_model\.|visual\.)": "model.language_model.",
                 r"^model\.": "model."}
TOWER = "model.visual"  # in their names
IMAGES = ("{!r} is a model of images ({}), and images are not supported in this family: only text is trained. Take "
          "Qwen2.5-VL or Qwen3-VL, a text model, or one whose text part is loaded (docs/families.md): {}")
WITH_VISION = ("{!r} is a model of images ({}). To train it with images, load it with FastVisionModel.from_pretrained; "
               "for text alone take a text model, such as Qwen3 instead of Qwen3-VL")
MULTIPLIED = ("hyperclovax",)  # families whose `logits_scaling` multiplies the logits; in others it divides them
NO_FLOAT16 = ("{} overflows in float16: the loss would be NaN. Take bfloat16 (dtype=torch.bfloat16, bf16=True), which "
              "cards of sm_80 and later compute in, or dtype=torch.float32 with load_in_4bit=True on an older one")


def model_type_of(config: Any) -> str:
    """Return the `model_type` of the text part of a config, or of a config.json's fields; "" if it has none."""
    if isinstance(config, Mapping):
        kind = str((config.get("text_config") or config).get("model_type", ""))
        return f"{kind}_text" if kind in VISION else kind  # older files of Qwen2.5-VL have no text_config
    return str(config.get_text_config().model_type)


def fields_of(config: Any) -> Mapping[str, Any]:
    """Return the fields of a transformers config. A mapping, such as a config.json's, is returned unchanged."""
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise ValueError(f"the config is {config!r}; give a config of transformers, or the fields of a config.json, as "
                         "planning.named_config(name) reads them")
    return config if isinstance(config, Mapping) else config.to_dict()


def has_experts(config: Any) -> bool:
    """Return whether a config, or a config.json's fields, describes a mixture of more than one expert."""
    fields = fields_of(config)
    fields = fields.get("text_config") or fields
    return any((fields.get(name) or 1) > 1 for name in EXPERTS)


def family_of(config: Any) -> Family | None:
    return FAMILIES.get(model_type_of(config))


def check_family(config: Any, name: str, vision: bool = False) -> str | None:
    """Return a warning if the model's family is not in `FAMILIES`, and None if it is. ValueError for a refused family,
    and for a multimodal model without a causal language model, unless it is trained with images (`vision`)."""
    check_images(config, name, vision)
    row, kind = family_of(config), model_type_of(config)
    if row is not None and row.refused:
        raise ValueError(f"{name!r} is of the family {row.name}: {row.refused}")
    if row is not None:
        return None
    return (f"{name} is of a family that was not checked here ({kind or 'without a model_type'}): it trains on "
            "transformers' own layers, and the first pass refuses it if its sequences cannot be packed. See "
            "docs/families.md")


def reads_images(config: Any) -> bool:
    """Return whether a config, or a config.json's fields, is of a family that is trained with images."""
    return str(fields_of(config).get("model_type")) in VISION


def check_images(config: Any, name: str, vision: bool = False) -> None:
    """Raise ValueError for an image model that has no causal language model, unless `vision` and it reads images."""
    fields = fields_of(config)
    kind = str(fields.get("model_type"))
    if fields.get("vision_config") and kind not in TEXT_NAMES and kind not in WHOLE_KINDS:
        label = next(iter(fields.get("architectures") or [kind]))
        if kind in VISION and vision:
            return
        if kind in VISION:
            raise ValueError(WITH_VISION.format(name, label))
        raise ValueError(IMAGES.format(name, label, ", ".join(TEXT_NAMES)))


def check_float16(config: Any) -> None:
    """Raise ValueError for a model that cannot compute in float16."""
    row = family_of(config)
    if row is not None and row.only_bfloat16:
        raise ValueError(NO_FLOAT16.format(row.name))


def sampled_by(row: Family) -> str:
    return "vLLM and transformers" if row.vllm else "transformers"


def trained(by_vllm: bool = False) -> str:
    """Return the names of the trainable families, separated by commas; with `by_vllm`, only those that vLLM samples."""
    return ", ".join(row.name for row in FAMILIES.values() if not row.refused and (row.vllm or not by_vllm))


def experts_in_mxfp4(config: Any) -> bool:
    """Return whether a config's family is published with its experts in MXFP4, all of a layer in one tensor."""
    row = family_of(config)
    return row is not None and row.experts is not None and row.experts.stacked


def lora_on_experts(config: Any) -> bool:
    """Return whether LoRA may go on the experts of a config's family."""
    row = family_of(config)
    return row is not None and row.experts is not None and row.experts.lora


def with_experts() -> str:
    return ", ".join(row.name for row in FAMILIES.values() if row.experts is not None)


def planned_as(config: Any, name: str, engine: str) -> dict[str, str]:
    """Return the entries of a plan's report on a config's family and engine; ValueError for a refused family."""
    said, row = check_family(config, name, vision=True), family_of(config)
    if row is None:
        return {"family": said or ""}
    words = {"family": row.name, "sampled by": sampled_by(row)}
    if engine == "vllm" and not row.vllm:
        words["note"] = f"vLLM does not sample {row.name}: plan with --engine transformers"
    return words
