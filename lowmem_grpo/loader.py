"""`FastLanguageModel` loads a model with its tokenizer and its rollout engine, and puts LoRA on it through peft."""

import difflib
import inspect
import logging
from typing import Any

import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from lowmem_grpo.engines.choice import VLLM, EngineKeeper, EngineSettings, choose_engine
from lowmem_grpo.engines.vllm.sampling_weights import SIXTEEN, check_four_bit
from lowmem_grpo.fast_model import FastModel, FastPeftModel, Loaded
from lowmem_grpo.models.dtypes import compute_dtype
from lowmem_grpo.models.fused_weights import fuse_weights
from lowmem_grpo.models.lean_modules import MLP_TILE, make_lean
from lowmem_grpo.models.lora_layers import use_kernel_layers
from lowmem_grpo.models.pretrained import TINY, Pretrained, linears_in_4bit, resolve
from lowmem_grpo.offload.activations import checkpointing_mode, enable_checkpointing
from lowmem_grpo.offload.embedding import embed_on_host
from lowmem_grpo.units import size_text

logger = logging.getLogger(__name__)

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OFF = (False, None)  # values of a refused option that request nothing

REFUSED = {
    "load_in_8bit": "use load_in_4bit=True, or False for 16 bit",
    "load_in_fp8": "use load_in_4bit=True, or False for 16 bit",
    "full_finetuning": "the base weights stay frozen here; train LoRA with get_peft_model",
    "trust_remote_code": "code from a model repository is never run; use an architecture that transformers ships",
    "rope_scaling": "set it in the model's config.json and raise max_seq_length",
    "use_exact_model_name": "model names are always taken as they are",
    "float8_kv_cache": "leave it out; the cache has the model's dtype",
    "qat_scheme": "leave it out",
    "modules_to_save": "only LoRA weights are trained; name modules in target_modules instead",
    "loftq_config": "leave it out; LoRA starts at zero",
    "layers_to_transform": "use target_modules with full names",
    "temporary_location": "leave it out",
}


class FastLanguageModel:
    """The loader, with the same names as in Unsloth."""

    @staticmethod
    def from_pretrained(
        model_name: str = TINY, max_seq_length: int = 2048, dtype: torch.dtype | str | None = None,
        load_in_4bit: bool = True, fast_inference: bool | str = False, max_lora_rank: int = 64,
        gpu_memory_utilization: float = 0.5, revision: str | None = None, token: str | None = None,
        device: str | None = None, kv_cache_bytes: int | None = None, max_num_seqs: int | None = None,
        enforce_eager: bool | None = None, offload_embedding: bool = False, sampling_weights: str | None = None,
        **options: Any,
    ) -> tuple[FastModel, Any]:
        """Load a causal language model by hub name or folder ("tiny" ships with the package), and its tokenizer.

        `load_in_4bit` quantizes to NF4 (double quantization) through bitsandbytes, one tensor at a time, on the CPU
        too. A checkpoint that is already in 4 bit loads as it is. dtype None means bfloat16 or float16, depending on
        the card, and float32 on the CPU.

        `fast_inference` names the rollout engine, which always samples with this model's own weights: "vllm",
        "transformers", True for vLLM if a checked version is installed, or False for transformers.
        `model.engine_choice` says which one it is and why. vLLM takes `gpu_memory_utilization` of the card, or
        `kv_cache_bytes` for its key-value cache. It decodes up to `max_num_seqs` sequences together (None: what a run
        samples at once, as far as the cache has room), and `enforce_eager=True` turns CUDA graphs off. The transformers
        engine reserves no memory and ignores these four. `sampling_weights="16bit"` lets vLLM dequantize 4-bit weights
        once for each phase of sampling. That is faster when many sequences are decoded together, and takes 2 bytes a
        weight until training begins; "4bit" never does it. None does it on a card if the key-value cache of the
        sequences that are decoded together still fits beside the weights, and never on the CPU.

        `offload_embedding` keeps an input embedding that is not tied to the head in host memory, and looks tokens up
        there. vLLM needs it on the device.

        Raises ValueError for what is not supported, EngineUnavailableError if "vllm" cannot be used, and OSError if
        there is no such model.
        """
        refuse(options, "from_pretrained")
        device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        if offload_embedding and fast_inference not in (False, "transformers"):
            raise ValueError(f"offload_embedding=True and fast_inference={fast_inference!r}: vLLM looks the embedding "
                             'up on the device. Leave one of them out, or sample with fast_inference="transformers"')
        keeper = EngineKeeper(
            max_seq_length, choose_engine(fast_inference, device),
            EngineSettings(gpu_memory_utilization, kv_cache_bytes, max_num_seqs, enforce_eager, sampling_weights),
            model_name,
        )
        stored = Pretrained(model_name, resolve(model_name), {"revision": revision, "token": token})
        model, tokenizer = stored.load(compute_dtype(dtype), device, load_in_4bit)
        check_context(model, max_seq_length)
        check_sampling_weights(sampling_weights, fast_inference, next(linears_in_4bit(model), None) is not None)
        if offload_embedding:
            logger.info("input embedding on the host: %s less on the device", size_text(embed_on_host(model)))
        if keeper.choice.name == VLLM or any(linears_in_4bit(model)):
            fuse_weights(model)  # so that one product serves for three, or one dequantization
        logger.info("engine: %s, sampling with the trainer's own weights (%s)", keeper.choice.name, keeper.choice.why)
        loaded = Loaded(model_name, tokenizer, max_seq_length, max_lora_rank, keeper, revision=revision)
        return FastModel(model, loaded), tokenizer

    @staticmethod
    def get_peft_model(
        model: FastModel, r: int = 16, target_modules: list[str] | str | None = None, lora_alpha: int = 16,
        lora_dropout: float = 0.0, bias: str = "none", use_gradient_checkpointing: bool | str = "offload",
        random_state: int = 3407, use_rslora: bool = False, max_seq_length: int | None = None,
        mlp_tile: int | None = None, **options: Any,
    ) -> FastPeftModel:
        """Put LoRA of rank r on `target_modules` (None: all linear layers), initialised from `random_state`.

        `use_gradient_checkpointing` is True (keep each layer's input on the device), "offload" (on the host; alias
        "unsloth") or False. With it, MLPs are computed in tiles of `mlp_tile` tokens (None: 4096), otherwise in one
        piece.
        Raises ValueError for what is not supported.
        """
        refuse(options, "get_peft_model")
        if not isinstance(model, FastModel):
            raise TypeError(f"get_peft_model takes what from_pretrained returned; got a {type(model).__name__}")
        if hasattr(model.inner, "peft_config"):
            raise ValueError("this model has LoRA already; load it again for a second adapter")
        if max_seq_length not in (None, model.loaded.max_seq_length):
            raise ValueError(f"max_seq_length is {max_seq_length}; the model was loaded with "
                             f"{model.loaded.max_seq_length}, change it there")
        if not 1 <= r <= model.loaded.max_lora_rank:
            raise ValueError(f"r is {r}; allowed is 1 to max_lora_rank={model.loaded.max_lora_rank} of from_pretrained")
        if bias != "none":
            raise ValueError(f'bias is {bias!r}; only "none" is supported')
        mode = checkpointing_mode(use_gradient_checkpointing)
        tile = check_tile(mlp_tile, mode)
        config = LoraConfig(
            r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, use_rslora=use_rslora, task_type="CAUSAL_LM",
            target_modules=check_targets(model.inner, target_modules or ALL_LINEAR),
        )
        use_kernel_layers(config, model.inner)
        model.close_engine()  # its modules are about to be wrapped
        with torch.random.fork_rng():
            torch.manual_seed(random_state)
            peft_model = FastPeftModel(model.inner, config)
        peft_model.loaded = model.loaded
        peft_model.loaded.offload = mode == "offload"
        make_lean(model.inner, tile)
        enable_checkpointing(model.inner, mode)
        return peft_model

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Evaluation mode."""
        return model.eval()

    @staticmethod
    def for_training(model: Any) -> Any:
        """Training mode."""
        return model.train()


def refuse(options: dict[str, Any], method: str) -> None:
    """Raise for every option of a FastLanguageModel method that requests something we do not support."""
    call = f"FastLanguageModel.{method}"
    for name, value in options.items():
        if name not in REFUSED:
            own = inspect.signature(getattr(FastLanguageModel, method)).parameters
            close = difflib.get_close_matches(name, [*REFUSED, *own], n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise TypeError(f"{call} has no option {name!r}{hint}")
        if value not in OFF:
            raise ValueError(f"{call}: {name}={value!r} is not supported; {REFUSED[name]}")


def check_context(model: PreTrainedModel, max_seq_length: int) -> None:
    """Raise ValueError if the requested context is longer than the model's."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and max_seq_length > longest:
        raise ValueError(f"max_seq_length is {max_seq_length}; this model's context is {longest}")


def check_sampling_weights(asked: str | None, fast_inference: bool | str, four_bit: bool) -> None:
    """Raise ValueError if the option has nothing to act on."""
    check_four_bit(asked, four_bit)
    if asked == SIXTEEN and fast_inference in (False, "transformers"):
        raise ValueError(f"sampling_weights is {asked!r} and fast_inference is {fast_inference!r}: only vLLM samples "
                         'with dequantized weights. Leave it out, or load with fast_inference="vllm"')


def check_tile(mlp_tile: int | None, checkpointing: bool | str) -> int | None:
    """The tokens in a tile of the MLP; None for one piece."""
    if mlp_tile is None:
        return MLP_TILE if checkpointing else None
    if mlp_tile < 1:
        raise ValueError(f"mlp_tile is {mlp_tile}; it must be at least 1")
    if not checkpointing:
        raise ValueError(f"mlp_tile is {mlp_tile} and use_gradient_checkpointing=False: tiles are computed again in "
                         "backward, and that is checkpointing. Leave one of them out")
    return mlp_tile


def check_targets(model: PreTrainedModel, targets: list[str] | str) -> list[str] | str:
    """The names, if they exist in the model and the frozen head is not among them."""
    if isinstance(targets, str):
        if targets != "all-linear":
            raise ValueError(f'target_modules is {targets!r}; allowed are a list of names and "all-linear"')
        return targets
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    missing = sorted(target for target in targets if target.rpartition(".")[2] not in names)
    if targets is ALL_LINEAR and missing:  # a family with other names, or with fused projections
        return "all-linear"
    if missing:
        raise ValueError(f"target_modules names {missing}, which this model does not have")
    if "lm_head" in targets:
        raise ValueError("target_modules names lm_head; the head stays frozen here, leave it out")
    return list(targets)
