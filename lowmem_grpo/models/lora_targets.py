"""Choose the linear layers that get LoRA: by module name, and by the requested kinds and numbers of layers."""

import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel

from lowmem_grpo.config.beside_lora import WHOLE, check_targets_of_lora
from lowmem_grpo.config.loading import GET_PEFT_MODEL
from lowmem_grpo.memory.families import DELTA_IN, DELTA_OUT, GATE_UP, SPLIT, family_of, has_experts, lora_on_experts
from lowmem_grpo.models.expert_lora import check_settings
from lowmem_grpo.models.experts import STACKS, ExpertStack
from lowmem_grpo.runs.adapter_file import SEQ_CLS, beyond_lora, check_patterns, check_values, starts_plainly

logger = logging.getLogger(__name__)
ALL_LINEAR = [*SPLIT, "o_proj", *GATE_UP, "down_proj"]
OF_SOME = {  # names of linear layers that only some families have
    *ALL_LINEAR, *DELTA_IN, DELTA_OUT, "qkv_proj", "gate_up_proj", "in_proj", "w1", "w2", "w3", "c_attn", "c_fc",
    "c_proj", "fc1", "fc2", "linear_1", "linear_2", "query", "key", "value", "dense", "query_key_value",
    "dense_h_to_4h", "dense_4h_to_h", "Wqkv", "Wi", "Wo", "x_proj", "dt_proj", "shared_mlp.input_linear",
    "shared_mlp.output_linear",
}
ATTENTION = re.compile(r"\.(\w*attn\w*|\w*attention\w*)\.")  # part of the path of every linear layer of attention
NO_EXPERTS = ("target_modules names {}. In a mixture of experts, LoRA goes on attention only; the experts and their "
              "router stay frozen. Leave these names out: target_modules={}")
OF_EXPERTS = "gpt-oss"  # the family with LoRA on experts
ON_EXPERTS = {part: f"experts.{name}" for name, parts in STACKS.items() for part in (name, *parts)}  # name: module
ONE_OF_TWO = ("target_modules names {} without {}. They are one matrix in the experts of this model, with one LoRA: "
              "name both, or gate_up_proj")
NO_PARAMETERS = ("target_parameters={!r}: LoRA is trained on linear layers, and on the experts' gate_up_proj and "
                 "down_proj of {}. Name modules in target_modules")
STARTS = 'True, False, "gaussian", "orthogonal" and "eva", which leave the base\'s weights as they are'
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Targets = list[str] | str | None


@dataclass(frozen=True)
class Scope:
    """The part of the decoder that is trained; fields have Unsloth's names."""

    finetune_language_layers: bool = True
    finetune_attention_modules: bool = True
    finetune_mlp_modules: bool = True
    layers_to_transform: list[int] | int | None = None  # numbers of layers; None: all
    finetune_last_n_layers: int | None = None

    def __post_init__(self) -> None:
        if not self.finetune_language_layers:
            raise ValueError("finetune_language_layers=False leaves nothing to train: only the text layers of a model "
                             "are trained here. Leave it out")
        if not (self.finetune_attention_modules or self.finetune_mlp_modules):
            raise ValueError("finetune_attention_modules and finetune_mlp_modules are both False, which leaves nothing "
                             "to train; set one of them to True")
        if self.layers_to_transform is not None and self.finetune_last_n_layers is not None:
            raise ValueError("layers_to_transform and finetune_last_n_layers both choose layers; give one of them")
        if self.finetune_last_n_layers is not None and self.finetune_last_n_layers < 1:
            raise ValueError(f"finetune_last_n_layers is {self.finetune_last_n_layers}; it must be at least 1, or None")

    def layers(self, count: int) -> range | list[int]:
        """Return the indices of the trained layers among `count`; ValueError for an index that does not exist."""
        if self.finetune_last_n_layers is not None:
            return range(max(0, count - self.finetune_last_n_layers), count)
        asked = self.layers_to_transform
        chosen = range(count) if asked is None or asked == [] else [asked] if isinstance(asked, int) else list(asked)
        if wrong := [number for number in chosen if not 0 <= number < count]:
            raise ValueError(f"layers_to_transform names layer {wrong[0]}; the model has the layers 0 to {count - 1}")
        return chosen

    def takes(self, path: str) -> bool:
        """Return whether the linear layer at this path is trained."""
        return self.finetune_attention_modules if ATTENTION.search(path) else self.finetune_mlp_modules


def lora_targets(model: PreTrainedModel, targets: Targets, scope: Scope, exclude: Targets = None) -> list[str] | str:
    """Return `target_modules` for PEFT: module names, "all-linear" or a pattern, or paths of layers if these cannot
    express the scope. ValueError for unknown names, or if nothing is left to train."""
    if targets is not None and not targets:
        raise ValueError(f"target_modules is {targets!r}, which names nothing to train: name layers, such as "
                         '["q_proj", "v_proj"], or take "all-linear"')
    chosen = check_targets(model, targets, exclude) if targets else usual_targets(model)
    by_peft = scope.layers_to_transform is None or isinstance(chosen, list)  # PEFT can leave out layers by number
    complete = replace(scope, layers_to_transform=None) == Scope()
    if complete and by_peft and model.config.get_text_config() is model.config:
        return chosen
    adapted = adapted_layers(model, LoraConfig(target_modules=chosen))
    paths = [path for path in decoder_linears(model, scope, adaptable(model)) if path in adapted]
    if not paths:
        raise ValueError(f"target_modules={targets!r} names no layer of the part of the model that is to be trained; "
                         "finetune_attention_modules, finetune_mlp_modules or layers_to_transform leave it out")
    return paths


def with_parameters(model: Any, targets: Targets, parameters: Any) -> Targets:
    """Return the targets and the experts' matrices that PEFT's `target_parameters` names, as modules. ValueError for
    other parameters."""
    if not parameters:
        return targets
    names = list(parameters) if not isinstance(parameters, str) else [parameters]
    if not lora_on_experts(model.config) or any(name.rpartition(".")[2] not in STACKS for name in names):
        raise ValueError(NO_PARAMETERS.format(parameters, OF_EXPERTS))
    if isinstance(targets, str) and targets != "all-linear":
        raise ValueError(f"target_modules is the pattern {targets!r} and target_parameters is {parameters!r}; list the "
                         "names in target_modules, or let the pattern match the experts too")
    others = usual_targets(model) if targets is None or targets == "all-linear" else targets
    paths = [path for path, module in model.named_modules() if isinstance(module, ExpertStack)]
    if missing := [name for name in names if not any(f".{path}".endswith(f".{name}") for path in paths)]:
        raise ValueError(f"target_parameters names {missing}, which this model does not have; its experts are "
                         f"{paths[0]} to {paths[-1]}")
    return [*others, *names]


def check_plain(config: Any) -> None:
    """Raise TypeError for anything but a LoraConfig. Raise ValueError, with the option's name, if the config asks for
    more than LoRA on linear layers of a causal language model."""
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(f"peft_config is a {type(config).__name__}: Prompt-learning is not supported; allowed is "
                         "peft.LoraConfig")
    if type(config) is not LoraConfig:
        raise TypeError(f"peft_config is a {type(config).__name__}; allowed is peft.LoraConfig")
    if (kind := str(getattr(config.task_type, "value", config.task_type))) not in ("None", "CAUSAL_LM"):
        other = ", that of a reward model, which RewardTrainer trains" if kind == SEQ_CLS else ""
        raise ValueError(f'peft_config: task_type is {config.task_type!r}{other}; allowed is "CAUSAL_LM"')
    check_values(config)
    if config.bias != "none":
        raise ValueError(f'bias={config.bias!r}: only "none" is supported')
    settings = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    if all(name.rpartition(".")[2] in STACKS for name in settings["target_parameters"] or ()):
        del settings["target_parameters"]  # `with_parameters` looks at the model
    variant = next((name for name in ("use_dora", "lora_bias") if settings[name]), beyond_lora(settings))
    if variant is not None:
        advice = GET_PEFT_MODEL[variant].advice if variant in GET_PEFT_MODEL else "Only plain LoRA is trained."
        raise ValueError(f"peft_config: {variant}={settings[variant]!r} is not supported. {advice} Or leave "
                         "it out, or train with TRL and these kernels (lowmem_grpo.integrations.trl)")
    check_start(config.init_lora_weights)


def check_start(start: Any) -> None:
    """Raise ValueError for `init_lora_weights` that would change the base's weights, or that PEFT lacks."""
    if not starts_plainly(start):
        raise ValueError(f"peft_config: init_lora_weights={start!r} is not supported; allowed are {STARTS}")


def check_config(model: Any, config: LoraConfig) -> None:
    """Raise ValueError if PEFT, with these settings and this model, would fail half way or adapt nothing. Warn about
    rank and alpha patterns that match no layer."""
    if config.layers_to_transform is not None:
        Scope(layers_to_transform=config.layers_to_transform).layers(len(model.get_decoder().layers))
    check_modules_beside(model, config)
    adapted = adapted_layers(model, config)
    if not adapted:
        chosen = {name: getattr(config, name) for name in ("target_modules", "exclude_modules", "layers_to_transform",
                                                           "layers_pattern")}
        named = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value is not None)
        raise ValueError(f"{named} leave no layer of this model to put LoRA on; correct the names")
    if stacks := [path for path, module in adapted.items() if isinstance(module, ExpertStack)]:
        check_settings(config)
        logger.info("LoRA goes on %d linear layers and %d stacks of experts", len(adapted) - len(stacks), len(stacks))
    if config.init_lora_weights == "orthogonal":
        check_orthogonal([config.r, *(config.rank_pattern or {}).values()], adapted)
    for name in ("rank_pattern", "alpha_pattern"):
        keys = getattr(config, name) or {}
        used = {get_pattern_key(list(keys), path) for path in adapted}
        for key in keys.keys() - used:
            logger.warning("%s: %r matches no layer with LoRA, and changes nothing", name, key)


def check_modules_beside(model: Any, config: LoraConfig) -> None:
    """Raise ValueError if LoRA's settings train beside it what cannot be trained in this model."""
    if config.modules_to_save or config.trainable_token_indices:
        from lowmem_grpo.models.trained_embedding import check_beside

        check_beside(model, config)


def check_orthogonal(ranks: list[int], adapted: dict[str, Any]) -> None:
    """Raise ValueError if PEFT cannot initialise orthogonally: with odd ranks, or on quantized weights."""
    if odd := next((rank for rank in ranks if rank % 2), None):
        raise ValueError(f'init_lora_weights="orthogonal" needs even ranks, and one is {odd}; choose an even rank, or '
                         "init_lora_weights=True")
    if not all(module.weight.dtype in FLOATS for module in adapted.values()):
        raise ValueError('init_lora_weights="orthogonal" needs a base in 16 or 32 bits, in PEFT too; load it with '
                         "load_in_16bit=True, or leave the start out")


def adapted_layers(model: Any, config: LoraConfig) -> dict[str, Any]:
    """Return {path: module} of the modules that PEFT adapts with these settings. ValueError for patterns that take for
    ever."""
    check_patterns(config, (path for path, _ in model.named_modules()), "LoRA")
    if config.target_modules == "all-linear":
        head = model.get_output_embeddings()
        linear = [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
        config = LoraConfig(target_modules=linear, exclude_modules=config.exclude_modules)
    return {path: module for path, module in model.named_modules() if check_target_module_exists(config, path)}


def decoder_linears(model: Any, scope: Scope, kinds: Any = nn.Linear) -> list[str]:
    """Return the paths of the text decoder's linear layers, or modules of other kinds, that are in the scope."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder.layers)
    starts = tuple(f"{prefix}.{number}." for number in scope.layers(len(decoder.layers)))
    return [name for name, module in model.named_modules()
            if isinstance(module, kinds) and name.startswith(starts) and scope.takes(name)]


def adaptable(model: PreTrainedModel) -> Any:
    """Return the kinds of modules that LoRA goes on in this model."""
    return (nn.Linear, ExpertStack) if lora_on_experts(model.config) else nn.Linear


def usual_targets(model: PreTrainedModel) -> list[str] | str:
    """Return the default targets: the names of all linear layers of the decoder or, in a mixture of experts, of
    attention only; "all-linear" for a family with other or fused names."""
    family = family_of(model.config)
    if family is not None and family.experts is not None:
        return [*family.attention.inner, "o_proj"]
    names = [*ALL_LINEAR, *((*DELTA_IN, DELTA_OUT) if family is not None and family.delta_net else ())]
    return names if names_of(model).issuperset(names) else "all-linear"


def names_of(model: PreTrainedModel) -> set[str]:
    return {name.rpartition(".")[2] for name, _ in model.named_modules() if name}


def check_targets(model: PreTrainedModel, targets: list[str] | str, exclude: Targets = None) -> list[str] | str:
    """Return the targets, without names that only other families have (a warning says which, as PEFT does not).
    ValueError if a name is unknown or no name is the model's, or if one is the head, the embedding, an expert or a
    router."""
    if has_experts(model.config):
        left = with_names_of_experts if lora_on_experts(model.config) else check_experts_left
        targets = left(usual_targets(model), targets)
    if isinstance(targets, str):
        if targets != "all-linear":
            check_targets(model, paths_of(model, targets, exclude))
        return targets
    names = names_of(model)
    if missing := sorted(target for target in targets if target.rpartition(".")[2] not in names):
        paths = decoder_linears(model, Scope(), adaptable(model))
        own = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))
        if {*missing} - OF_SOME or len(missing) == len(targets):
            raise ValueError(f"target_modules names {missing}, which this model does not have; its linear layers are "
                             f"{own}")
        logger.warning("target_modules names %s, which only other families have: there is no LoRA for them. The "
                       "linear layers of this model are %s", ", ".join(missing), own)
    check_targets_of_lora(targets)
    return [target for target in targets if target not in missing]


def paths_of(model: PreTrainedModel, pattern: str, exclude: Targets = None) -> list[str]:
    """Return the paths of the modules that a pattern matches and `exclude` does not; ValueError if there are none, or
    one is not a linear layer."""
    allowed = 'allowed are a list of names, "all-linear", and a pattern of whole paths, such as ".*\\.(q|v)_proj"'
    named = adapted_layers(model, LoraConfig(target_modules=pattern, exclude_modules=exclude))
    other = next((path for path, module in named.items() if not isinstance(module, adaptable(model))), None)
    if other is not None or not named:
        problem = "no module's whole path" if other is None else f"{other or 'the model'!r}, which is no linear layer"
        raise ValueError(f"target_modules is {pattern!r}, a pattern that matches {problem}; {allowed}")
    return list(named)


def with_names_of_experts(attention: list[str] | str, targets: list[str] | str) -> list[str] | str:
    """Return the targets with the experts' own modules for the names that dense models have; "all-linear" becomes all
    of attention, as in PEFT, since experts are no linear layers. ValueError for one of gate and up without the other,
    and for the router."""
    if isinstance(targets, str):
        return attention if targets == "all-linear" else targets
    named = {target.rpartition(".")[2] for target in targets}
    if len(one := named.intersection(GATE_UP)) == 1 and "gate_up_proj" not in named:
        raise ValueError(ONE_OF_TWO.format(*one, *({*GATE_UP} - one)))
    if "router" in named:
        raise ValueError("target_modules names the router, which stays frozen: leave it out")
    return list(dict.fromkeys(on_experts(target) for target in targets))


def on_experts(target: str) -> str:
    """Return the experts' own module for a dense model's name, in the same layer where the name says which."""
    parent, dot, last = target.rpartition(".")
    return target if ".experts." in f".{target}" else f"{parent}{dot}{ON_EXPERTS.get(last, last)}"


def check_experts_left(attention: list[str] | str, targets: list[str] | str) -> list[str] | str:
    """Return the targets for a mixture of experts, where only attention is allowed; "all-linear" becomes all of
    attention. ValueError for other targets."""
    if isinstance(attention, str):  # a family without a row: its experts are not nn.Linear, so never adapted
        return targets
    if targets == "all-linear":
        return attention
    others = [] if isinstance(targets, str) else sorted(name for name in targets if name.rpartition(".")[2] not in {
        *attention, *WHOLE})
    if others:
        raise ValueError(NO_EXPERTS.format(", ".join(others), attention))
    return targets
