"""What becomes of the options that Unsloth's loaders have and ours lack: which values change nothing here, and which
are refused. The options that are honoured are parameters of `loader.FastLanguageModel`."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowmem_grpo.memory.layer_forms import BITS_16, FP8, FP8_BLOCK, NF4


@dataclass(frozen=True)
class Fate:
    """Values for which `harmless` holds are accepted, because they change nothing here; others are refused."""

    why: str  # nothing changes, or what to do instead
    harmless: Callable[[Any], bool]


def any_value(why: str, *names: str) -> dict[str, Fate]:
    """Options that change nothing here, whatever they say."""
    return {name: Fate(why, lambda _: True) for name in names}


def off(advice: str, *names: str, also: tuple[Any, ...] = ()) -> dict[str, Fate]:
    """Options that may only be turned off: None, False, an empty value, or one of `also`."""
    return {name: Fate(advice, lambda value: is_off(value) or value in also) for name in names}


def one(advice: str, name: str, allowed: str) -> dict[str, Fate]:
    """An option that may only name one class or kind, or None."""
    return {name: Fate(advice, lambda value: value is None or named(value) == allowed)}


def is_off(value: Any) -> bool:
    """Whether an option with this value asks for nothing: None, False, or an empty text or collection."""
    return value is None or value is False or (isinstance(value, (dict, list, tuple, str)) and not value)


def named(value: Any) -> Any:
    """The name of a class, an enumeration's value, or the value itself."""
    return getattr(value, "__name__", getattr(value, "value", value))


WEIGHTS = "use load_in_4bit=True, load_in_fp8=True, or load_in_16bit=True"
IMAGES = "only text is trained here"
BOTH = {  # of from_pretrained and of get_peft_model
    **off("leave it out; weights are quantized to NF4 by load_in_4bit=True", "qat_scheme"),
    **off("LoRA is trained on linear layers; name modules in target_modules", "target_parameters"),
}
FROM_PRETRAINED: dict[str, Fate] = {
    **BOTH,
    **off(WEIGHTS, "load_in_8bit", "quantization_config"),
    **off("the base weights stay frozen here; train LoRA with get_peft_model", "full_finetuning"),
    **off("code from a model repository is never run; use an architecture that transformers ships",
          "trust_remote_code"),
    **off("set it in the model's config.json and raise max_seq_length", "rope_scaling"),
    **off('use kv_cache_dtype="fp8", its name in vLLM', "float8_kv_cache"),
    **off("the vocabulary stays as it is stored; leave it out", "resize_model_vocab"),
    **off("LoRA's weights are float32 anyway, and the base stays frozen; use dtype for the base",
          "float32_mixed_precision"),
    **off("only causal language models are trained", "num_labels"),
    **off(IMAGES + ", no speech; leave it out", "whisper_language", "whisper_task"),
    **off("transformers chooses the class by the model's config; leave it out", "auto_config", "model_types"),
    **one("transformers chooses the class by the model's config; leave it out", "auto_model", "AutoModelForCausalLM"),
    **off("the tokenizer is the model's own: for another one pass processing_class to the trainer", "tokenizer_name",
          "tokenizer_revision"),
    **off("use dtype, its newer name", "torch_dtype"),
    **off("there is one device, and the whole model lies on it; leave it out", "max_memory"),
    **off("layers are not replaced by others; leave it out", "model_patcher"),
    **any_value("an adapter of any rank can be trained, sampled with and loaded", "max_lora_rank"),
    **any_value("names are always taken as they are", "use_exact_model_name"),
    **any_value("the tokenizer is used as it is stored", "fix_tokenizer"),
    **any_value("LoRA's own random_state is the one of get_peft_model", "random_state"),
    **any_value("vLLM's statistics are never printed", "disable_log_stats"),
    **any_value("MLPs are computed in tiles wherever layers are checkpointed; see mlp_tile", "unsloth_tiled_mlp"),
    **any_value("only the text part of a model is used", "text_only"),
    **any_value("the model returns its logits whenever it is called", "return_logits"),
    **any_value("nothing is compiled", "fullgraph", "unsloth_force_compile"),
    **any_value("vLLM always sleeps while the model trains", "unsloth_vllm_standby"),
    **any_value("attention is packed, in one implementation for all models", "supports_sdpa", "attn_implementation"),
    **any_value("the mode is chosen in get_peft_model", "use_gradient_checkpointing"),
}
GET_PEFT_MODEL: dict[str, Fate] = {
    **BOTH,
    **off("only LoRA weights are trained; name modules in target_modules instead", "modules_to_save"),
    **off("leave it out; LoRA starts at zero", "loftq_config"),
    **off("layers are found by the model's own structure; leave it out", "layers_pattern"),
    **off("only plain LoRA is trained; use_rslora=True scales it by the root of the rank", "use_dora"),
    **one("only causal language models are trained; leave it out", "task_type", "CAUSAL_LM"),
    **off("LoRA starts at zero, with B = 0; leave it out", "init_lora_weights", also=(True, "default")),
    **any_value("nothing of a model but its text layers is trained", "finetune_vision_layers", "finetune_audio_layers"),
    **any_value("nothing is put aside on disk", "temporary_location"),
    **any_value("the embedding and the head stay frozen, tied or not", "ensure_weight_tying"),
}


def form_of_weights(load_in_4bit: bool | None, load_in_16bit: bool, load_in_fp8: bool | str | None) -> str:
    """The form that a loader's options ask for: FP8 or 16 bits where they say so, else NF4, unless `load_in_4bit` is
    False. ValueError for two answers."""
    if load_in_fp8 not in (None, False, True, "block"):
        raise ValueError(f'load_in_fp8 is {load_in_fp8!r}; it must be True (a scale for each row), "block" (one for '
                         "128 x 128 weights) or False")
    asked = {"load_in_4bit": load_in_4bit, "load_in_16bit": load_in_16bit, "load_in_fp8": load_in_fp8}
    given = [f"{name}={value!r}" for name, value in asked.items() if value]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other; give one of them")
    if load_in_fp8:
        return FP8 if load_in_fp8 is True else FP8_BLOCK
    return BITS_16 if load_in_16bit or load_in_4bit is False else NF4


def refuse(options: dict[str, Any], fates: dict[str, Fate], known: set[str], call: str) -> None:
    """Raise TypeError for an option that nobody knows, and ValueError for one that asks for what is not done here."""
    for name, value in options.items():
        if name not in fates:
            close = difflib.get_close_matches(name, [*fates, *known], n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise TypeError(f"{call} has no option {name!r}{hint}")
        if not fates[name].harmless(value):
            raise ValueError(f"{call}: {name}={value!r} is not supported; {fates[name].why}")
