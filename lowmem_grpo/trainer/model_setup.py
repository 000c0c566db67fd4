"""The models that a trainer accepts: ours, those of transformers or PEFT, and names of models to load."""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem_grpo.config.beside_lora import check_trained
from lowmem_grpo.config.loading import EngineSettings
from lowmem_grpo.config.shared import TrainSettings
from lowmem_grpo.engines.choice import EngineKeeper, choose_engine
from lowmem_grpo.fast_model import BareModel, FastPeftModel, Loaded, with_lora, with_values_to_come
from lowmem_grpo.loader import FastLanguageModel, FastVisionModel
from lowmem_grpo.memory.families import check_images, has_experts, reads_images
from lowmem_grpo.models.card_check import use_card
from lowmem_grpo.models.experts import BROUGHT, routed_blocks, use_routed_blocks
from lowmem_grpo.models.fused_weights import fuse_weights
from lowmem_grpo.models.lora_targets import (
    Scope,
    check_modules_beside,
    check_plain,
    check_targets,
    lora_targets,
    with_parameters,
)
from lowmem_grpo.models.pretrained import Pretrained, is_quantized, keep_layout
from lowmem_grpo.models.stored_model import find, resolve, stored_fields
from lowmem_grpo.models.trained_set import adapter_values
from lowmem_grpo.models.vision_processor import load_processor
from lowmem_grpo.runs.adapter_file import PREFIX, layers_of, rank_of, scaling_of
from lowmem_grpo.runs.checkpoint_state import ADAPTER
from lowmem_grpo.runs.expert_names import named_in_model, settings_in_model

logger = logging.getLogger(__name__)
CONTEXT = 2048  # tokens, unless the model has fewer or the run needs more
ADVICE = ("load it with FastLanguageModel.from_pretrained and put LoRA on it with FastLanguageModel.get_peft_model, or "
          "pass peft_config=peft.LoraConfig(r=16, lora_alpha=16)")
NO_EFFECT = ("attn_implementation", "use_cache", "low_cpu_mem_usage")  # attention is ours
TRAINED = "lora_of_a_trainer"  # attribute of a base: the model with LoRA that an earlier trainer made of it
STANDARD = ("no peft_config: training a LoRA of rank %d on %s; merged weights by export. LoRA takes about ten times "
            "the learning_rate of full training")


@dataclass(frozen=True)
class Brought:
    """The model that a trainer was given, and the trainer's arguments that say how to load and train this model."""

    model: Any
    tokenizer: Any  # None: the model's own
    peft_config: Any
    quantization_config: Any
    settings: TrainSettings
    tokens: int  # the context that the run's settings need for prompt and completion

    def trainable(self) -> FastPeftModel:
        """Return the model with LoRA; TypeError or ValueError, with the remedy, if it cannot be trained here."""
        has_lora = isinstance(self.model, PeftModel)  # FastPeftModel is a subclass
        if has_lora and self.peft_config is not None:
            raise ValueError("peft_config is given, and the model has LoRA already; leave one of them out")
        if self.peft_config is not None:
            check_plain(self.peft_config)  # before anything is loaded or changed
        if not isinstance(self.model, str) and self.quantization_config is not None:
            raise ValueError("quantization_config is given, and the model is loaded already; say it where it is loaded")
        if not isinstance(self.model, str) and self.settings.model_init_kwargs:  # TRL's scripts give both
            logger.warning("model_init_kwargs has no effect, as the model is loaded already")
        own = self.model if isinstance(self.model, FastPeftModel) else self.of_earlier_trainer()
        if own is not None:
            _, values = plain_lora(own)
            put_values(own, values)
            own.enable_adapter_layers()
            return own
        return self.moved(self.model) if has_lora else self.with_new_lora(self.loaded())

    def with_new_lora(self, model: BareModel) -> FastPeftModel:
        """Return the model with a new LoRA, with the settings of peft_config or the default ones."""
        if self.peft_config is None:
            trained = FastLanguageModel.get_peft_model(
                model, random_state=self.settings.seed, use_gradient_checkpointing=self.checkpointing)
            layers = "attention" if has_experts(trained.config) else "all linear layers"
            logger.warning(STANDARD, vars(trained.peft_config[trained.active_adapter])["r"], layers)
        else:
            trained = with_lora(model, on_targets(self.peft_config, model), self.checkpointing, self.settings.seed)
        vars(model.inner)[TRAINED] = trained, copy.deepcopy(self.peft_config)
        return trained

    def of_earlier_trainer(self) -> FastPeftModel | None:
        """Return the model with the LoRA of an earlier trainer (a notebook cell run twice); None if there was none.
        Raise ValueError if the earlier trainer had another peft_config."""
        base = self.model.inner if isinstance(self.model, BareModel) else self.model
        trained, config = getattr(base, "__dict__", {}).get(TRAINED, (None, None))
        if trained is not None and config != self.peft_config:
            raise ValueError("the model has the LoRA of an earlier trainer, whose peft_config was another one; load "
                             "the model again")
        if trained is not None:
            logger.warning("the model has the LoRA of an earlier trainer, and goes on from it; load the model again to "
                           "begin anew")
        return trained

    @property
    def checkpointing(self) -> bool | str:
        return False if self.settings.gradient_checkpointing is False else "auto"

    def moved(self, model: PeftModel) -> FastPeftModel:
        """Return a model of our own around the base of a PEFT model, with its LoRA parameters (in 32 bits)."""
        config, values = in_own_names(*plain_lora(model))
        base: Any = model.get_base_model()
        check_base(base)
        modes = {path: module.training for path, module in base.named_modules()}
        for module in model.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.set_adapter([])  # else PEFT leaves the trained copy in the base
        model.unload()
        # The parameters stay the same objects, unless they have 16 bits, so the caller's model and optimizer use them.
        adapted = with_values_to_come(self.wrapped(base), copy.deepcopy(config), self.checkpointing)
        put_values(adapted, values)
        for path, module in base.named_modules():
            module.training = modes.get(path, module.training)
        return adapted

    def loaded(self) -> BareModel:
        """Return the model without LoRA, as our loader returns it."""
        if isinstance(self.model, str):
            return self.load()
        if isinstance(self.model, BareModel):
            return self.model
        check_base(self.model)
        return self.wrapped(self.model)

    def load(self) -> BareModel:
        """Load the model by its name, in 4 bits if `quantization_config` says so."""
        options = loading_options(self.settings.model_init_kwargs or {})
        four_bit = quantization(self.quantization_config or options.pop("quantization_config", None))
        where = {"revision": options.get("revision"), "token": options.get("token")}
        if (share := getattr(self.settings, "vllm_gpu_memory_utilization", None)) is not None:
            options["gpu_memory_utilization"] = share
        config = Pretrained(self.model, find(self.model, **where), where).config()
        loader = FastVisionModel if reads_images(config) else FastLanguageModel
        model, _ = loader.from_pretrained(
            self.model, max_seq_length=self.context(config),
            fast_inference="vllm" if getattr(self.settings, "use_vllm", False) else False, **options, **four_bit,
        )
        return model

    def context(self, config: Any) -> int:
        """Return the context in tokens: vllm_max_model_length, else what the run needs; at most the model's limit."""
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or CONTEXT
        wanted = getattr(self.settings, "vllm_max_model_length", None) or max(CONTEXT, self.tokens)
        return int(min(longest, wanted))

    def wrapped(self, model: Any) -> BareModel:
        """Freeze a plain transformers model and wrap it as our loader does."""
        use_card(str(model.device))
        name = str(model.config._name_or_path)
        name = str(Path(name).absolute()) if Path(name).is_dir() else name
        tokenizer = self.tokenizer or AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        keep_layout(model)
        if is_quantized(model):
            fuse_weights(model)
            if has_experts(model.config) and not any(routed_blocks(model)):
                raise ValueError(BROUGHT)
        use_routed_blocks(model)
        model.requires_grad_(False)
        context = self.context(model.config)
        keeper = EngineKeeper(context, choose_engine(False, str(model.device)), EngineSettings(0.5), name)
        processor = load_processor(name, tokenizer) if reads_images(model.config) else None
        return BareModel(model, Loaded(name, tokenizer, context, keeper, vocabulary=stored_rows(name),
                                       processor=processor))


def check_base(model: Any) -> None:
    """Raise TypeError if this is not a transformers model, and ValueError if it cannot be trained as it is."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; {ADVICE}")
    check_images(model.config, str(model.config._name_or_path), vision=True)
    stored = getattr(model.config, "quantization_config", None)
    if stored is not None and not is_quantized(model):
        raise ValueError(f"the model is quantized ({getattr(stored, 'quant_method', stored)}); allowed are 16 and "
                         "32 bits, 4 bits of bitsandbytes, FP8 and NVFP4 as FastLanguageModel.from_pretrained loads it")
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ValueError(f"the model lies on {', '.join(sorted(devices))}; load it on one device: "
                         "device_map={'': 0}")


def may_read_images(model: Any) -> bool:
    """Return whether a trainer's model reads images; True for a name on the hub, whose config is not known yet."""
    if isinstance(model, str | Path):
        fields = stored_fields(resolve(str(model)))
        return fields is None or reads_images(fields)
    config = getattr(model, "config", None)
    return hasattr(config, "to_dict") and reads_images(config)


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in `processing_class`, which may be a processor; TypeError if it has none."""
    if processing_class is None or isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    inside = getattr(processing_class, "tokenizer", None)
    if not isinstance(inside, PreTrainedTokenizerBase):
        raise TypeError(f"processing_class is a {type(processing_class).__name__}; pass a tokenizer of transformers")
    return inside


def stored_rows(name: str) -> int | None:
    """Return the number of rows of a stored model's embedding; None if the model is not found."""
    try:
        return int(AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config().vocab_size)
    except (OSError, ValueError):
        return None


def on_targets(settings: LoraConfig, model: BareModel) -> LoraConfig:
    """Return a copy of the LoRA settings with this model's module names as targets. If the settings name no targets,
    take PEFT's for the model type. ValueError if PEFT has none, or if the model lacks a named module."""
    config: Any = copy.deepcopy(settings)
    scope, modules = Scope(layers_to_transform=settings.layers_to_transform), config.target_modules
    if config.target_parameters:
        modules = with_parameters(model.inner, modules or [], config.target_parameters)
        config.target_parameters = None
    if modules is None:
        kind = str(model.inner.config.model_type)
        if kind not in PEFT_TARGETS:
            raise ValueError(f"peft_config names no target_modules, and PEFT has none for {kind!r}; name them, or take "
                             'target_modules="all-linear"')
        modules = PEFT_TARGETS[kind]
    targets = modules if isinstance(modules, str) else sorted(modules)
    chosen = lora_targets(model.inner, targets, scope, config.exclude_modules)
    config.target_modules = chosen if isinstance(chosen, str) else set(chosen)
    config.rank_pattern, config.alpha_pattern = config.rank_pattern or {}, config.alpha_pattern or {}
    config.task_type, config.inference_mode = "CAUSAL_LM", False
    return config


def loading_options(init_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Translate `from_pretrained` options of transformers to our loader's; ValueError if our loader lacks one."""
    names = {"dtype": "dtype", "torch_dtype": "dtype", "revision": "revision", "token": "token",
             "device_map": "device_map", "quantization_config": "quantization_config"}
    options: dict[str, Any] = {}
    for name, value in init_kwargs.items():
        if name in names:
            options[names[name]] = None if value == "auto" else value
        elif name not in NO_EFFECT and value not in (None, False):
            raise ValueError(f"model_init_kwargs: {name}={value!r} is not supported; leave it out, or load the model "
                             "with FastLanguageModel.from_pretrained")
    return {name: value for name, value in options.items() if value is not None}


def quantization(config: Any) -> dict[str, Any]:
    """Return our loader's options for a BitsAndBytesConfig (None: 16 or 32 bits). ValueError if it is not NF4."""
    if config is None:
        return {"load_in_4bit": False}
    if not isinstance(config, BitsAndBytesConfig) or not config.load_in_4bit or config.bnb_4bit_quant_type != "nf4":
        raise ValueError("quantization_config: allowed is transformers.BitsAndBytesConfig(load_in_4bit=True, "
                         "bnb_4bit_quant_type='nf4')")
    return {"load_in_4bit": True}


def plain_lora(model: PeftModel) -> tuple[LoraConfig, dict[str, nn.Parameter]]:
    """Return the settings and the parameters of the adapter "default". TypeError or ValueError if the model has other
    adapters (a FastPeftModel may have idle ones), trains more than plain LoRA, or has layers unlike its settings."""
    names = list(model.peft_config)
    if names not in ([], [ADAPTER]) and not (isinstance(model, FastPeftModel) and model.active_adapters == [ADAPTER]):
        raise ValueError(f"the model has the adapters {names}; one is trained, named {ADAPTER!r}: delete the others "
                         f"(model.delete_adapter), or load it with adapter_name={ADAPTER!r}")
    config: Any = model.peft_config.get(ADAPTER)
    if config is not None:
        check_plain(config)
    layers = {name.removeprefix(PREFIX): layer for name, layer in model.named_modules()
              if hasattr(layer, "lora_A") and ADAPTER in (*layer.lora_A, *layer.lora_embedding_A)}
    if not layers:
        raise ValueError("the model has no LoRA any more: merge_and_unload, unload or delete_adapter removed it; load "
                         "the model again")
    base: Any = model.get_base_model()
    check_targets(base, list(layers))
    if config is not None:
        check_modules_beside(base, config)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    check_trained(trained)
    if not trained:
        logger.warning("the model's adapter is frozen, as after is_trainable=False; it is trained all the same")
    for path, layer in layers.items():
        got, wanted = (layer.r[ADAPTER], layer.scaling[ADAPTER]), (rank_of(config, path), scaling_of(config, path))
        if layer.merged or got != wanted:
            raise ValueError(f"{path}: the adapter is merged, or has rank and scale {got} where its settings say "
                             f"{wanted}; unmerge it (model.unmerge_adapter()), or save it and load it again")
    return config, adapter_values(model, ADAPTER)


def in_own_names(config: LoraConfig, values: dict[str, Any]) -> tuple[LoraConfig, dict[str, nn.Parameter]]:
    """Return an adapter of PEFT with the names that LoRA on experts has here: PEFT puts it on parameters."""
    own, settings = copy.deepcopy(config), dict(vars(config))
    named: Any = named_in_model(values, settings, Path(str(config.base_model_name_or_path)))
    vars(own).update(settings_in_model(settings, [layer.removeprefix(PREFIX) for layer in layers_of(named)]))
    return own, named


def put_values(model: nn.Module, values: dict[str, nn.Parameter]) -> None:
    """Put each parameter into the model at its name, trainable: LoRA's and chosen rows in 32 bits, a whole matrix in
    the model's dtype for it, and one that has two names as one."""
    made: dict[int, nn.Parameter] = {}
    for name, held in values.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        wide = getattr(module, last).dtype if ".modules_to_save." in name else torch.promote_types(
            held.dtype, torch.float32)
        same = held if held.dtype == wide else made.setdefault(id(held), nn.Parameter(held.detach().to(wide)))
        setattr(module, last, same.requires_grad_(True))
