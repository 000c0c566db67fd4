"""LoRA on a loaded model, in our layers: a fresh adapter, a saved one, or that of a model which PEFT made."""

import copy
import logging
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, set_peft_model_state_dict
from torch import nn

from lowmem_grpo.config.loading import GET_PEFT_MODEL
from lowmem_grpo.fast_model import BareModel, FastPeftModel
from lowmem_grpo.models.lean_modules import MLP_TILE, make_lean
from lowmem_grpo.models.lora_layers import use_kernel_layers
from lowmem_grpo.models.lora_targets import check_config, check_targets
from lowmem_grpo.models.pretrained import tokenizer_beside
from lowmem_grpo.offload.activations import checkpointing_mode, enable_checkpointing
from lowmem_grpo.runs.adapter_file import (
    PREFIX,
    beyond_lora,
    check_for,
    layers_of,
    rank_of,
    read_adapter,
    refuse_variants,
    scaling_of,
    starts_plainly,
)
from lowmem_grpo.runs.checkpoint_state import ADAPTER
from lowmem_grpo.runs.saved_adapter import base_of_adapter
from lowmem_grpo.runs.whole_files import AdapterError

logger = logging.getLogger(__name__)
ADVICE = "leave it out, or train with TRL and these kernels (lowmem_grpo.integrations.trl)"
STARTS = ('True, False, "gaussian", "orthogonal" and "eva", which leave the base\'s '
          "weights as they are")


def check_bare(model: Any) -> None:
    """Raise TypeError or ValueError unless it is a loaded model without LoRA."""
    if not isinstance(model, BareModel | FastPeftModel):
        raise TypeError(f"get_peft_model takes what from_pretrained returned; got a {type(model).__name__}")
    if hasattr(model.inner, "peft_config"):
        raise ValueError("this model has LoRA already; load it again for a second adapter")


def check_plain(config: Any) -> None:
    """Raise TypeError for anything but a LoraConfig, and ValueError, by name, for one that asks for more than LoRA on
    linear layers of a causal language model."""
    if type(config) is not LoraConfig:
        raise TypeError(f"peft_config is a {type(config).__name__}; allowed is peft.LoraConfig")
    if str(getattr(config.task_type, "value", config.task_type)) not in ("None", "CAUSAL_LM"):
        raise ValueError(f'peft_config: task_type is {config.task_type!r}; allowed is "CAUSAL_LM"')
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    variant = next((name for name in ("use_dora", "lora_bias") if settings[name]), beyond_lora(settings))
    if variant is not None:
        advice = GET_PEFT_MODEL[variant].advice if variant in GET_PEFT_MODEL else "Only plain LoRA is trained."
        raise ValueError(f"peft_config: {variant}={settings[variant]!r} is not supported. {advice} Or {ADVICE}")
    if not starts_plainly(config.init_lora_weights):
        raise ValueError(f"peft_config: init_lora_weights={config.init_lora_weights!r} is not supported; allowed are "
                         f"{STARTS}")


def with_lora(
    model: BareModel, config: LoraConfig, checkpointing: bool | str = "offload", seed: int = 0,
    mlp_tile: int | None = None,
) -> FastPeftModel:
    """Put LoRA on a loaded model as PEFT does with these settings, drawn from the seed; ValueError where PEFT could
    not."""
    check_bare(model)
    mode = checkpointing_mode(checkpointing)
    tile = check_tile(mlp_tile, mode)
    check_config(model.inner, config)
    config.fan_in_fan_out = False  # as PEFT sets it on linear layers of its own
    use_kernel_layers(config, model.inner)
    model.close_engine()  # its modules are about to be wrapped
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft_model = FastPeftModel(model.inner, config)
    peft_model.loaded = model.loaded
    peft_model.loaded.offload, peft_model.loaded.mlp_tile = mode == "offload", mlp_tile
    make_lean(model.inner, tile)
    enable_checkpointing(model.inner, mode)
    return peft_model


def with_adapter(cls: Any, folder: Path, arguments: dict[str, Any]) -> tuple[FastPeftModel, Any]:
    """Return the base of a saved adapter with it, and the tokenizer beside it, or the base's. AdapterError for
    an adapter that is not plain LoRA, or that does not say its base."""
    (config, tensors), tokenizer = read_adapter(folder), tokenizer_beside(folder)
    refuse_variants(config, folder, "trained")
    record = base_of_adapter(folder)
    if record.model is None:
        raise AdapterError(f"the adapter in {folder} does not say its base model; load that, and then load_lora")
    own: dict[str, Any] = {"revision": arguments["revision"] or record.revision}
    if arguments["load_in_4bit"] is None and not arguments["load_in_16bit"] and not arguments["load_in_fp8"]:
        own |= {"load_in_4bit": record.load_in_4bit, "load_in_fp8": record.load_in_fp8 or False}
    model, _ = cls.from_pretrained(record.model, **arguments | own)
    check_targets(model.inner, [name.removeprefix(PREFIX) for name in layers_of(tensors)])
    adapted = with_values_to_come(model, config)
    check_for(adapted, folder)
    set_peft_model_state_dict(adapted, tensors)
    adapted.take_up(folder, tokenizer)
    return adapted, adapted.loaded.tokenizer


def with_values_to_come(model: BareModel, config: LoraConfig, checkpointing: bool | str = "offload") -> FastPeftModel:
    """Put LoRA on a loaded model whose values are set afterwards: they are drawn in the usual way."""
    start, config.init_lora_weights, config.inference_mode = config.init_lora_weights, True, False
    adapted = with_lora(model, config, checkpointing)
    config.init_lora_weights = start
    return adapted


# A model that PEFT made.

Factors = dict[str, tuple[nn.Parameter, nn.Parameter]]  # A and B of each layer, by its path in the base


def plain_lora(model: PeftModel) -> tuple[LoraConfig, Factors]:
    """Return the settings and the tensors of a model's only adapter. TypeError or ValueError where it has other
    adapters, where it trains more than plain LoRA, or where its layers are not as its settings say."""
    names = list(model.peft_config)
    if names != [ADAPTER]:
        raise ValueError(f"the model has the adapters {names}; one is trained, named {ADAPTER!r}: delete the others "
                         f"(model.delete_adapter), or load it with adapter_name={ADAPTER!r}")
    config: Any = model.peft_config[ADAPTER]
    check_plain(config)
    layers = {name.removeprefix(PREFIX): layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
    base: Any = model.get_base_model()
    check_targets(base, list(layers))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if other := next((name for name in trained if ".lora_" not in name), None):
        raise ValueError(f"the model trains {other} beside its LoRA; only LoRA is trained here: freeze it with "
                         "requires_grad_(False)")
    if not trained:
        logger.warning("the model's adapter was loaded with is_trainable=False; it is trained all the same")
    for path, layer in layers.items():
        got, wanted = (layer.r[ADAPTER], layer.scaling[ADAPTER]), (rank_of(config, path), scaling_of(config, path))
        if layer.merged or got != wanted:
            raise ValueError(f"{path}: the adapter is merged, or has rank and scale {got} where its settings say "
                             f"{wanted}; unmerge it (model.unmerge_adapter()), or save it and load it again")
    return config, {path: (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
                    for path, layer in layers.items()}


def with_factors(model: BareModel, config: LoraConfig, factors: Factors, checkpointing: bool | str) -> FastPeftModel:
    """Put the adapter of a model that PEFT made on its base: with the same parameters, unless they have 16 bits, so
    that the caller's model and optimizer go on with them."""
    adapted = with_values_to_come(model, copy.deepcopy(config), checkpointing)
    for path, sides in factors.items():
        layer: Any = model.inner.get_submodule(path)
        for factor, held in zip((layer.lora_A, layer.lora_B), sides, strict=True):
            wide = torch.promote_types(held.dtype, torch.float32)
            same = held if held.dtype == wide else nn.Parameter(held.detach().to(wide))
            factor[ADAPTER].weight = same.requires_grad_(True)
    return adapted


def check_tile(mlp_tile: int | None, checkpointing: bool | str) -> int | None:
    """Return the tokens in a tile of the MLP; None for one piece."""
    if mlp_tile is None:
        return MLP_TILE if checkpointing else None
    if mlp_tile < 1:
        raise ValueError(f"mlp_tile is {mlp_tile}; it must be at least 1")
    if not checkpointing:
        raise ValueError(f"mlp_tile is {mlp_tile} and use_gradient_checkpointing=False: tiles are computed again in "
                         "backward, and that is checkpointing. Leave one of them out")
    return mlp_tile
