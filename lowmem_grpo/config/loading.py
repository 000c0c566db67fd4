"""Options of Unsloth's loaders that ours lack, and the choice of weights, engine and device. This module needs no
library, so wrong values are refused before torch is imported."""

import re
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from lowmem_grpo import utils
from lowmem_grpo.config.beside_lora import BESIDE
from lowmem_grpo.config.unsupported import Table, any_value, off, only
from lowmem_grpo.memory.cards import AUTO, CACHE_DTYPES, in_8_bits
from lowmem_grpo.memory.layer_forms import BITS_16, FP8, FP8_BLOCK, NF4
from lowmem_grpo.utils import TRUTH, Rule, at_least, check_ranges, number, one_of, up_to

BOTH: Table = {  # options of from_pretrained and of get_peft_model
    **off("Leave it out; weights are quantized to NF4 by load_in_4bit=True.", "qat_scheme"),
    **off("LoRA is trained on linear layers; name modules in target_modules.", "target_parameters"),
    **off("All layers of the base stay on the card: plan with `lowmem-grpo plan`, and make room with load_in_4bit=True "
          "or a smaller model. Their inputs wait on the host with use_gradient_checkpointing=\"offload\".",
          "offload_layers", "block_swap_layers", "prefetch_depth"),
}
FROM_PRETRAINED: Table = BOTH | {
    **off("Use load_in_4bit=True, load_in_fp8=True, or load_in_16bit=True.", "load_in_8bit", "quantization_config"),
    **off("The base weights stay frozen here; train LoRA with get_peft_model.", "full_finetuning"),
    **off("Code from a model repository is never run; use an architecture that transformers ships.",
          "trust_remote_code"),
    **off("Set it in the model's config.json and raise max_seq_length.", "rope_scaling", "rope_parameters"),
    **off("vLLM reads as many tokens of prompts in a pass as the memory plan has room for; leave it out.",
          "max_num_batched_tokens"),
    **off("There is one device, and the whole model lies on it; leave it out.", "device_map_planner_kwargs",
          "max_memory"),
    **off("The model is resolved by its name alone; look at model.loaded.name afterwards.", "on_model_resolved"),
    **off('Use kv_cache_dtype="fp8", its name in vLLM.', "float8_kv_cache"),
    **off("LoRA's weights are float32 anyway, and the base stays frozen; use dtype for the base.",
          "float32_mixed_precision"),
    **off("Only causal language models are trained, on text; leave it out.", "num_labels", "whisper_language",
          "whisper_task"),
    **off("transformers chooses the class by the model's config; leave it out.", "auto_config", "model_types"),
    **only("transformers chooses the class by the model's config; leave it out.",
           auto_model=(None, "AutoModelForCausalLM")),
    **off("The tokenizer is the model's own: for another one pass processing_class to the trainer.", "tokenizer_name",
          "tokenizer_revision"),
    **off("Layers stay as they are stored; leave it out.", "model_patcher"),
    **off("Call model.resize_token_embeddings(n) or add_new_tokens after loading.", "resize_model_vocab"),
    **any_value("max_lora_rank", "random_state"),  # get_peft_model takes any rank, and the seed
    **any_value("use_exact_model_name", "fix_tokenizer", "text_only", "return_logits"),  # always done
    **any_value("disable_log_stats", "unsloth_vllm_standby"),  # stats are never printed, standby is always on
    **any_value("unsloth_tiled_mlp", "use_gradient_checkpointing"),  # chosen in get_peft_model
    **any_value("fullgraph", "unsloth_force_compile"),  # nothing is compiled
    **any_value("supports_sdpa", "attn_implementation"),  # one attention for packed sequences serves all models
}
GET_PEFT_MODEL: Table = BOTH | BESIDE | {
    **off("Leave it out; LoRA starts at zero.", "loftq_config"),
    **off("use_gradient_checkpointing chooses the layers: it is \"auto\", \"offload\", True or False.",
          "checkpoint_skip_layers"),
    **off("Only plain LoRA is trained; use_rslora=True scales it by the root of the rank.", "use_dora"),
    **off("Only plain LoRA is trained; leave it out.", "lora_bias", "layer_replication", "alora_invocation_tokens",
          "arrow_config", "corda_config", "kasa_config", "lora_ga_config", "monteclora_config", "velora_config",
          "use_bdlora", "use_qalora"),
    **off("Give it in peft.LoraConfig, as peft_config of the trainer.", "eva_config"),
    **off("The adapter is trained; leave it out.", "inference_mode"),
    **only("Only causal language models are trained; leave it out.", task_type=(None, "CAUSAL_LM")),
    **any_value("finetune_vision_layers", "finetune_audio_layers"),  # only the text layers are trained
    **any_value("temporary_location"),  # there are no temporary files
    **any_value("fan_in_fan_out", "megatron_config", "megatron_core"),  # they only concern layers other than nn.Linear
}


DTYPE: Rule = ('float32, bfloat16, float16 or "auto"', lambda value: str(value).removeprefix("torch.") in (
    "float32", "bfloat16", "float16", "auto", "float", "half"))  # the last two are torch's aliases
MOST_RANK = 1 << 16
PLAIN: dict[str, Rule] = {  # options of from_pretrained
    "model_name": utils.PATH, "gguf_file": utils.TEXT, "max_seq_length": at_least(1, Integral), "dtype": DTYPE,
    **dict.fromkeys(("load_in_4bit", "load_in_16bit"), utils.TRUTH), "revision": utils.TEXT, "cache_dir": utils.PATH,
    **dict.fromkeys(("local_files_only", "offload_embedding"), utils.TRUTH),
}
LORA: dict[str, Rule] = {  # options of get_peft_model, and those that a LoraConfig has too
    "r": up_to(MOST_RANK, Integral), "lora_alpha": utils.POSITIVE, "lora_dropout": utils.DECAY,
    "random_state": utils.SEED, "use_rslora": utils.TRUTH,
    "target_modules": utils.TEXTS, **dict.fromkeys(("exclude_modules", "layers_pattern"), utils.PATTERNS),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), utils.PATTERN_NUMBERS),
    "layers_to_transform": utils.WHOLES, "finetune_last_n_layers": utils.WHOLE,
    "modules_to_save": utils.NAMES, "trainable_token_indices": utils.ROWS, "ensure_weight_tying": utils.TRUTH,
}
NO_NAME = ('from_pretrained needs model_name: a name on the hub, such as "Qwen/Qwen2.5-1.5B-Instruct", a folder, or '
           '"tiny", the embedded model that shows how things work')
NO_MODEL = ("get_peft_model needs the model that from_pretrained returned: model, tokenizer = "
            "FastLanguageModel.from_pretrained(model_name=...), then FastLanguageModel.get_peft_model(model)")


def one_dtype(dtype: Any, torch_dtype: Any) -> Any:
    """Return the dtype, passed as `dtype` or as `torch_dtype`; TypeError if both are passed."""
    if dtype is not None and torch_dtype is not None:
        raise TypeError("dtype and torch_dtype are two names of the same; give one of them")
    return torch_dtype if dtype is None else dtype


def form_of_weights(load_in_4bit: bool | None, load_in_16bit: bool, load_in_fp8: bool | str | None) -> str:
    """Return the format of the weights (NF4, 16 bits or FP8) that the options select; ValueError for several."""
    if load_in_fp8 not in (None, False, True, "block"):
        raise ValueError(f'load_in_fp8 is {load_in_fp8!r}; it must be True (a scale for each row), "block" (one for '
                         "128 x 128 weights) or False")
    asked = {"load_in_4bit": load_in_4bit, "load_in_16bit": load_in_16bit, "load_in_fp8": load_in_fp8}
    chosen = [f"{name}={value!r}" for name, value in asked.items() if value]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} contradict each other; give one of them")
    if load_in_fp8:
        return FP8 if load_in_fp8 is True else FP8_BLOCK
    return BITS_16 if load_in_16bit or load_in_4bit is False else NF4


TRANSFORMERS, VLLM = "transformers", "vllm"
ENGINES = (True, False, TRANSFORMERS, VLLM)
FOUR, SIXTEEN = "4bit", "16bit"  # forms of weights for sampling
ANYWHERE = (None, "auto", "balanced", "balanced_low_0", "sequential", "unsloth")  # device maps that name no device
GPU_SHARE = number("in (0, 1]", lambda value: 0 < value <= 1)
DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class EngineUnavailableError(RuntimeError):
    """The engine cannot be used as the settings ask; the message says why and what to do."""


@dataclass(frozen=True)
class EngineSettings:
    """The options of vLLM's engine. The transformers engine reserves no memory, and takes only `enforce_eager` and
    `sampling_weights`."""

    gpu_memory_utilization: float = 0.5  # share of the card's memory in use, with the KV cache
    kv_cache_bytes: int | None = None  # size of the KV cache, instead of gpu_memory_utilization
    max_num_seqs: int | None = None  # sequences decoded together; None: all that a run samples at once
    enforce_eager: bool | None = None  # True: no CUDA graphs. None: CUDA graphs on a card
    block_size: int | None = None  # tokens of a cache block. None: vLLM's own; 32 for short contexts on the CPU
    sampling_weights: str | None = None  # "16bit": 4-bit weights are dequantized to sample. None: if there is room
    kv_cache_dtype: str = AUTO  # the model's dtype, or 8-bit floats (CACHE_DTYPES)

    RANGES: ClassVar[dict[str, Rule]] = {
        "gpu_memory_utilization": GPU_SHARE, "enforce_eager": TRUTH,
        "kv_cache_bytes": at_least(1, int), "max_num_seqs": at_least(1, int),
        "block_size": at_least(1, int), "sampling_weights": one_of(FOUR, SIXTEEN),
        "kv_cache_dtype": one_of(*CACHE_DTYPES),
    }

    def __post_init__(self) -> None:
        check_ranges(self)

    def check_for(self, fast_inference: bool | str) -> None:
        """Raise ValueError for a setting that has no effect in the engine named by `fast_inference`."""
        if self.in_8_bits and fast_inference in (False, TRANSFORMERS):
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype!r} and fast_inference is {fast_inference!r}: "
                             "only vLLM holds its cache in 8 bits, the transformers engine in the model's dtype. "
                             'Leave it out, or load with fast_inference="vllm"')

    @property
    def in_8_bits(self) -> bool:
        return in_8_bits(self.kv_cache_dtype)


def check_engine(fast_inference: bool | str) -> None:
    """Raise ValueError for an unknown engine."""
    if fast_inference not in ENGINES:
        raise ValueError(f'fast_inference is {fast_inference!r}; allowed are True, False, "transformers" and "vllm"')


def named_device(device: str | None, device_map: Any) -> str | None:
    """Return the device that the options name, or None without one; ValueError for several or unknown devices."""
    if isinstance(device_map, dict):
        places = {str(place) for place in device_map.values()}
        if len(places) != 1:
            raise ValueError(f"device_map is {device_map!r}: a model lies on one device here; leave it out")
        device_map = next(iter(device_map.values()))
    mapped = None if device_map in ANYWHERE else str(device_map)
    mapped = f"cuda:{mapped}" if mapped is not None and mapped.isdigit() else mapped
    named = None if device is None else str(device)
    if named is not None and mapped not in (None, named):
        raise ValueError(f"device is {device!r} and device_map names {mapped!r}; give one of them")
    if mapped is not None and not DEVICE.fullmatch(mapped):
        allowed = ", ".join(repr(place) for place in ANYWHERE if place)
        raise ValueError(f"device_map is {device_map!r}; allowed are {allowed}, and one device such as 'cuda:0' or "
                         "'cpu'")
    if named is not None and not DEVICE.fullmatch(named):
        raise ValueError(f"device is {device!r}; allowed are 'cpu', 'cuda' and one card such as 'cuda:0'")
    return named or mapped
