"""`FastLanguageModel` loads a model with its tokenizer and its rollout engine, and puts LoRA on it through peft.

Options, names and paths are checked before torch and the other heavy libraries are imported, which takes seconds.
"""

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_grpo.config.beside_lora import settings_beside
from lowmem_grpo.config.launcher import own_device
from lowmem_grpo.config.loading import (
    FROM_PRETRAINED,
    GET_PEFT_MODEL,
    LORA,
    NO_MODEL,
    NO_NAME,
    PLAIN,
    TRANSFORMERS,
    VLLM,
    EngineSettings,
    check_engine,
    form_of_weights,
    named_device,
    one_dtype,
)
from lowmem_grpo.config.unsupported import Table, refuse
from lowmem_grpo.engines.vllm.installed import refuse_absent
from lowmem_grpo.memory.cards import AUTO
from lowmem_grpo.memory.families import lora_on_experts, reads_images
from lowmem_grpo.models.gguf_file import digest_of
from lowmem_grpo.models.stored_model import check_stored, find, refuse_longer
from lowmem_grpo.utils import SEED, TRUTH, as_python, check_given, is_adapter, is_gguf, require, size_text, torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lowmem_grpo.fast_model import BareModel, FastPeftModel
    from lowmem_grpo.models.lora_targets import Targets

logger = logging.getLogger(__name__)

UNSLOTHS_LENGTH = 2048  # Unsloth's default of max_seq_length in get_peft_model, which has no effect there either


class FastLanguageModel:
    """The model loader, under Unsloth's names. config/loading.py says how Unsloth's other options are handled."""

    vision = False  # whether a model of images is loaded whole

    @classmethod
    def from_pretrained(
        cls, model_name: str | None = None, max_seq_length: int | None = 2048, dtype: "torch.dtype | str | None" = None,
        load_in_4bit: bool | None = None, fast_inference: bool | str | None = None, gpu_memory_utilization: float = 0.5,
        revision: str | None = None, token: str | None = None, device: str | None = None,
        kv_cache_bytes: int | None = None, max_num_seqs: int | None = None, enforce_eager: bool | None = None,
        block_size: int | None = None, offload_embedding: bool = False, sampling_weights: str | None = None,
        load_in_16bit: bool = False, load_in_fp8: bool | str = False, device_map: Any = None,
        cache_dir: str | None = None, local_files_only: bool = False, kv_cache_dtype: str = AUTO,
        torch_dtype: Any = None, gguf_file: str | None = None, min_pixels: int | None = None,
        max_pixels: int | None = None, **options: Any,
    ) -> tuple[Any, Any]:
        """Load a causal language model by hub name or folder ("tiny" ships with the package), and its tokenizer. The
        folder of a saved adapter loads its base and the adapter, ready to train and to sample.

        `gguf_file` is a GGUF file of llama.cpp in the folder or the repository; `model_name` may also be the path of
        one, or OWNER/NAME/FILE.gguf. Its tensors are decoded one by one, and rounded or quantized as any model's.

        `load_in_4bit` quantizes to NF4 (double quantization) through bitsandbytes, one tensor at a time, on the CPU
        too; None means True, unless `load_in_16bit` or `load_in_fp8`. `load_in_fp8` quantizes to 8-bit floats (e4m3) in
        the same way: True with a scale for each row, "block" with one for each 128 x 128 weights. Matrix products stay
        in 16 bits. A checkpoint already in NF4, NVFP4 or FP8 loads as it is. `max_seq_length` None is the model's
        whole context. `device_map` may name one device, as `device` does. dtype None means bfloat16 or float16,
        depending on the card, and float32 on the CPU; `torch_dtype` is its older name.

        `fast_inference` names the rollout engine, which always samples with this model's own weights: "vllm",
        "transformers", True for vLLM if a checked version is installed, or False for transformers. None means False,
        and a warning says if vLLM would be faster. `model.engine_choice` says which engine samples and why. vLLM takes
        `gpu_memory_utilization` of the card, or `kv_cache_bytes` for its key-value cache. It decodes up to
        `max_num_seqs` sequences together (None: all that a run samples at once, as far as the cache has room), and
        `enforce_eager=True` turns CUDA graphs off. (False insists on them, and is refused, with the reason, if decode
        steps cannot be captured.) Its cache keeps whole blocks of `block_size` tokens from one turn to the next (None:
        vLLM's default, or 32 on the CPU for a `max_seq_length` of at most 2,048). The transformers engine reserves no
        memory, and of these options takes only `enforce_eager`.

        `sampling_weights` is for models in 4 bits or FP8. "16bit" dequantizes their weights once per phase of sampling,
        and keeps the copy (2 bytes a weight) at least until training begins. This is faster when many sequences are
        decoded together; steps with only a few still read the quantized weights. "4bit" makes no such copy. None means
        "4bit" on the CPU. On a card, None means "16bit" if this is faster by the card's data sheet, and the key-value
        cache of the sequences that are decoded together still fits. (With the transformers engine, this holds only in
        runs, because their memory is planned; otherwise None means "4bit".)

        `kv_cache_dtype="fp8"` (e4m3, or "fp8_e5m2") lets vLLM hold keys and values in 8 bits: about twice as many
        tokens fit, but its log-probabilities differ a little more from the trainer's, which the parity gate measures.

        `min_pixels` and `max_pixels` bound the size to which a model of images resizes each image (None: as stored).

        `offload_embedding` keeps an input embedding that is not tied to the head in host memory, and looks tokens up
        there. vLLM needs it on the device.

        Raises ValueError for what is not supported, EngineUnavailableError if "vllm" cannot be used, and OSError if
        there is no such model.
        """
        dtype, torch_dtype = one_dtype(dtype, torch_dtype), None
        check_given(locals(), PLAIN)
        check_options(cls, "from_pretrained", options, FROM_PRETRAINED)
        if gguf_file is not None:
            model_name, gguf_file = named_gguf(model_name, gguf_file), None
        place = Path(model_name or "").expanduser()
        if model_name and is_adapter(place):
            arguments = {name: value for name, value in locals().items()
                     if name not in ("cls", "model_name", "options", "place")}
            from lowmem_grpo.fast_model import with_adapter  # imported after locals() was read

            return with_adapter(cls, place, arguments | options)
        form = form_of_weights(load_in_4bit, load_in_16bit, load_in_fp8)
        nobody_chose, fast_inference = fast_inference is None, fast_inference or False
        check_engine(fast_inference)
        if fast_inference == VLLM:
            refuse_absent()
        if offload_embedding and fast_inference not in (False, TRANSFORMERS):
            raise ValueError(f"offload_embedding=True and fast_inference={fast_inference!r}: vLLM looks the embedding "
                             'up on the device. Leave one of them out, or sample with fast_inference="transformers"')
        settings = EngineSettings(gpu_memory_utilization, kv_cache_bytes, max_num_seqs, enforce_eager, block_size,
                                  sampling_weights, kv_cache_dtype)
        settings.check_for(fast_inference)
        named = named_device(device, device_map)
        if model_name is None:
            raise TypeError(NO_NAME)
        where = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        path = find(model_name, **where)
        model_name = path if place.exists() and Path(path) == place.absolute() else model_name
        check_stored(path, model_name, dtype, max_seq_length, cls.vision)
        from lowmem_grpo.engines.choice import (
            EngineKeeper,
            check_cache_dtype,
            choose_engine,
            faster_engine,
            for_family,
            for_images,
            why_not_family,
        )
        from lowmem_grpo.engines.cuda_graphs import check_graphs
        from lowmem_grpo.engines.vllm.settings import check_four_bit
        from lowmem_grpo.fast_model import BareModel, Loaded
        from lowmem_grpo.memory.offload.embedding import embed_on_host, movable
        from lowmem_grpo.models.card_check import compute_dtype, larger_card, use_card
        from lowmem_grpo.models.fused_weights import fuse_weights
        from lowmem_grpo.models.pretrained import Pretrained, is_quantized

        cards = torch.cuda.device_count()
        device = own_device(cards) if named is None or (named == "cuda" and cards) else named
        use_card(device)
        if named in (None, "cuda") and (advice := larger_card(device)):
            logger.warning(advice)
        keeper = EngineKeeper(max_seq_length or 0, choose_engine(fast_inference, device), settings, model_name)
        stored = Pretrained(model_name, path, where, cls.vision)
        with stored.naming_the_model():
            config = stored.config()
        if cls.vision and reads_images(config):
            keeper.choice, nobody_chose = for_images(fast_inference), False
        keeper.choice, nobody_chose = for_family(keeper.choice, config), nobody_chose and not why_not_family(config)
        check_cache_dtype(settings, keeper.choice, device)
        if enforce_eager is False:
            with stored.naming_the_model():
                check_graphs(enforce_eager, keeper.choice.name, device, config, offload_embedding)
        model, tokenizer = stored.load(compute_dtype(dtype), device, form)
        keeper.max_seq_length = context = context_of(model, max_seq_length)
        check_four_bit(sampling_weights, is_quantized(model))
        if offload_embedding and not movable(model):
            logger.warning("offload_embedding=True changes nothing: %s ties its input embedding to its output head, "
                           "which is needed on the device", type(model).__name__)
        elif offload_embedding:
            logger.info("embeddings on the host: %s less on the device", size_text(embed_on_host(model)))
        if keeper.choice.name == VLLM or is_quantized(model):
            fuse_weights(model)  # q, k and v then share one product, or one dequantization
        logger.info("engine: %s, sampling with the trainer's own weights (%s)", keeper.choice.name, keeper.choice.why)
        if nobody_chose and (advice := faster_engine(device)):
            logger.warning(advice)
        embedding: Any = model.get_input_embeddings()
        loaded = Loaded(model_name, tokenizer, context, keeper, revision=revision, vocabulary=len(embedding.weight),
                        sha256=digest_of(path))
        if reads_images(model.config):
            from lowmem_grpo.models.vision_processor import load_processor

            loaded.processor = load_processor(path, tokenizer, min_pixels, max_pixels, **where)
        elif (min_pixels, max_pixels) != (None, None):
            raise ValueError("min_pixels and max_pixels bound images, and this model reads text; leave them out")
        return BareModel(model, loaded), loaded.processor or tokenizer

    @classmethod
    def get_peft_model(
        cls, model: "BareModel | None" = None, r: int = 16, target_modules: "Targets" = None, lora_alpha: int = 16,
        lora_dropout: float = 0.0, bias: str = "none", use_gradient_checkpointing: bool | str = "auto",
        random_state: int = 3407, use_rslora: bool = False, max_seq_length: int | None = None,
        mlp_tile: int | None = None, finetune_language_layers: bool = True, finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True, layers_to_transform: list[int] | int | None = None,
        finetune_last_n_layers: int | None = None, exclude_modules: "Targets" = None,
        layers_pattern: list[str] | str | None = None, rank_pattern: dict[str, int] | None = None,
        alpha_pattern: dict[str, int] | None = None, init_lora_weights: bool | str = True, **options: Any,
    ) -> "FastPeftModel":
        """Put LoRA of rank r on `target_modules` (None: all linear layers), initialised from `random_state`.

        `exclude_modules`, `layers_pattern`, `rank_pattern`, `alpha_pattern` and `init_lora_weights` (True, False,
        "gaussian", "orthogonal", "eva") mean what they mean in PEFT's LoraConfig.

        In gpt-oss, names of an MLP (`gate_proj`, `up_proj`, `down_proj`) put LoRA on all experts, and so do PEFT's
        `target_parameters`, beside `target_modules` (None: attention). Otherwise only attention is trained.

        `modules_to_save=["embed_tokens", "lm_head"]`, or these names in `target_modules`, trains embedding and head
        whole, and `trainable_token_indices` (ids, or a dict of ids by module) only the rows of these tokens. A tied
        embedding and head stay one matrix. Without these options, the rows of tokens that were added to the model
        (`add_new_tokens`, `resize_token_embeddings`) are trained.

        `finetune_attention_modules=False` omits the linear layers of attention, `finetune_mlp_modules=False` all
        others. `layers_to_transform` lists the layers, by number, that get LoRA; `finetune_last_n_layers` takes the
        last n.

        `use_gradient_checkpointing` is True (keep each layer's input on the device), "offload" (on the host), "auto"
        (as "offload", but on a card the last layers keep all activations if the run's memory plan has room; alias
        "unsloth") or False. Except with False, MLPs are computed in tiles of `mlp_tile` tokens (None: 4096, or on a
        card as many as the plan has room for). Raises ValueError for what is not supported. A second call with the same
        arguments, as in a notebook cell that is run twice, returns the model as it is.
        """
        asked = {name: value for name, value in locals().items() if name not in ("cls", "model")}
        parameters = options.get("target_parameters")
        on_experts = lora_on_experts(getattr(getattr(model, "inner", None), "config", {}))
        taken = {"target_parameters": None} if on_experts else {}  # `with_parameters` looks at them
        check_options(cls, "get_peft_model", options | taken, GET_PEFT_MODEL)
        check_given(dict.fromkeys(LORA) | options | locals(), LORA)
        require("random_state", random_state, SEED)
        for part, chosen in (("language_layers", finetune_language_layers), ("mlp_modules", finetune_mlp_modules),
                             ("attention_modules", finetune_attention_modules)):
            require(f"finetune_{part}", chosen, TRUTH)
        if model is None:
            raise TypeError(NO_MODEL)
        from peft import LoraConfig

        from lowmem_grpo.fast_model import check_bare, has_this_lora, with_lora
        from lowmem_grpo.models.lora_targets import Scope, check_plain, check_start, lora_targets, with_parameters

        if has_this_lora(model, asked):  # a notebook cell that was run twice
            return model
        check_bare(model)
        target_modules = with_parameters(model.inner, target_modules, parameters)
        if options.get("finetune_vision_layers") and model.loaded.processor is not None:
            raise ValueError("finetune_vision_layers=True: the tower of a model of images stays frozen here, as in "
                             "GRPO elsewhere; leave it out, which trains the language layers. Tower and language are "
                             "trained together by TRL's or Unsloth's SFT")
        tied = getattr(model.inner.config.get_text_config(), "tie_word_embeddings", False)
        target_modules, beside = settings_beside(target_modules, options, tied)
        if model.loaded.new_tokens and not {"modules_to_save", "trainable_token_indices"} & beside.keys():
            from lowmem_grpo.models.new_tokens import rows_to_train

            beside["trainable_token_indices"] = rows_to_train(model)
        scope = Scope(finetune_language_layers, finetune_attention_modules, finetune_mlp_modules, layers_to_transform,
                      finetune_last_n_layers)
        if max_seq_length not in (None, UNSLOTHS_LENGTH, model.loaded.max_seq_length):
            raise ValueError(f"max_seq_length is {max_seq_length}; the model was loaded with "
                             f"{model.loaded.max_seq_length}, change it there")
        start: Any = True if init_lora_weights in (None, "default") else init_lora_weights
        check_start(start)  # PEFT has its own words for "loftq"
        biases: Any = bias  # check_plain refuses all but "none"
        r, lora_alpha, lora_dropout, rank_pattern, alpha_pattern, layers_to_transform = as_python(
            [r, lora_alpha, lora_dropout, rank_pattern or {}, alpha_pattern or {}, layers_to_transform])
        config = LoraConfig(
            r=r, lora_alpha=lora_alpha, lora_dropout=lora_dropout, use_rslora=use_rslora, bias=biases,
            task_type="CAUSAL_LM",
            target_modules=lora_targets(model.inner, target_modules, scope, exclude_modules),
            exclude_modules=exclude_modules, layers_to_transform=layers_to_transform, layers_pattern=layers_pattern,
            rank_pattern=rank_pattern, alpha_pattern=alpha_pattern, init_lora_weights=start, **beside,
        )
        check_plain(config)
        made = with_lora(model, config, use_gradient_checkpointing, random_state, mlp_tile)
        made.loaded.lora_arguments = asked
        return made

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Switch the model to evaluation mode and return it."""
        return model.eval()

    @staticmethod
    def for_training(model: Any, use_gradient_checkpointing: bool | str = True) -> Any:
        """Switch the model to training mode. Gradient checkpointing stays as get_peft_model set it up."""
        from lowmem_grpo.memory.offload.activations import checkpointing_mode

        checkpointing_mode(use_gradient_checkpointing)
        return model.train()


class FastModel(FastLanguageModel):
    """FastLanguageModel under another of Unsloth's names. Only the text layers of a multimodal model are trained."""


class FastVisionModel(FastLanguageModel):
    """The loader of models of images (Qwen2.5-VL and Qwen3-VL), which also returns the processor. The language layers
    are trained, and the vision tower is frozen. Of other multimodal models the text part is loaded."""

    vision = True


def named_gguf(model_name: str | None, gguf_file: str) -> str:
    """Return the name of a GGUF file in a folder or repository. ValueError for a file of another kind."""
    if not is_gguf(gguf_file):
        raise ValueError(f"gguf_file is {gguf_file!r}; it must be a file whose name ends in .gguf, in the folder or "
                         "repository model_name")
    return f"{str(model_name or '.').rstrip('/')}/{gguf_file}"


def check_options(cls: type, method: str, options: dict[str, Any], table: Table) -> None:
    """Raise TypeError for an unknown option of a loader's method, ValueError for an unsupported value."""
    known = set(inspect.signature(getattr(cls, method)).parameters)
    refuse(options, table, known, f"{cls.__name__}.{method}")


def context_of(model: "PreTrainedModel", max_seq_length: int | None) -> int:
    """Return `max_seq_length` (None: the model's context). ValueError if the model's context is shorter or unknown."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_seq_length is None and longest is None:
        raise ValueError("max_seq_length is None, and the model's config does not say how long its context is; give "
                         "a number")
    refuse_longer(max_seq_length, longest)
    return int(max_seq_length or longest or 0)
