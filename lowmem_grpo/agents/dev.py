"""ART's `dev`: the options of `model._internal_config`. `ModelOptions` sorts them by loading, LoRA and training."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypedDict

from lowmem_grpo.agents.refused import missing
from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.loading import FROM_PRETRAINED, GET_PEFT_MODEL
from lowmem_grpo.config.unsupported import Table, any_value, off, refuse
from lowmem_grpo.loader import FastLanguageModel, check_options
from lowmem_grpo.models.stored_model import find, stored_fields

CONTEXT = 8192  # tokens, unless the options say otherwise or the model has fewer
DEFAULTS: dict[str, Any] = {  # for settings of GRPOConfig, where they differ from its own defaults
    "learning_rate": 5e-6, "loss_type": "cispo", "lr_scheduler_type": "constant", "save_steps": 1,
    "save_total_limit": None, "kl_reference": "base",
}
OWN = {  # options that the backend sets itself
    "output_dir": "it is path/project/name", "overwrite_output_dir": "every run goes on from its last checkpoint",
    "model_name": "it is the base_model of TrainableModel",
}
PARTS = ("init_args", "engine_args", "peft_args", "trainer_args")  # in `_internal_config`
TEMPLATES = ("chat_template", "chat_template_path", "chat_template_kwargs")
LORA = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "init_weights": "init_lora_weights"}
CONFIG: Table = {  # the rest of `_internal_config`
    **off("There is one device, which samples and trains by turns.", "trainer_gpu_ids", "inference_gpu_ids",
          also=([0],)),
    **off("Training runs in this process.", "tinker_args", "tinker_native_args"),
    **any_value("rollout_weights_mode", "allow_unvalidated_arch"),  # the engine samples with the trainer's weights
    **off("Content is text.", "chat_template_content_format", also=("auto", "string", "openai")),
    **off("Tools are given to the template as OpenAI's schemas.", "chat_template_tool_schema_format",
          also=("default", "vllm_openai")),
}
ENGINE: Table = {  # vLLM's options that the loader lacks
    **any_value("model", "enable_lora", "max_loras", "lora_target_modules"),  # the trainer's model and adapter
    **any_value("enable_sleep_mode", "enable_prefix_caching"),  # always on
    **any_value("num_scheduler_steps", "disable_log_requests", "enable_log_requests", "generation_config"),
    **off("There is one device.", "tensor_parallel_size", "pipeline_parallel_size", also=(1,)),
}
InitArgs = dict[str, Any]  # for FastLanguageModel.from_pretrained
EngineArgs = dict[str, Any]  # for vLLM
PeftArgs = dict[str, Any]  # for FastLanguageModel.get_peft_model
LoRAConfig = dict[str, Any]  # the same under ART's names: rank, alpha, dropout, init_weights
TrainerArgs = dict[str, Any]  # for GRPOConfig
OpenAIServerConfig = dict[str, Any]
ServerArgs = dict[str, Any]
TrainConfig = dict[str, Any]  # ART's experimental options of one `train` call
NAMES = ("EngineArgs", "InitArgs", "InternalModelConfig", "LoRAConfig", "OpenAIServerConfig", "PeftArgs", "ServerArgs",
         "TrainConfig", "TrainerArgs")


class InternalModelConfig(TypedDict, total=False):
    """The options of `_internal_config`, for loading, vLLM, LoRA, training and the chat template."""

    init_args: InitArgs
    engine_args: EngineArgs
    peft_args: PeftArgs
    trainer_args: TrainerArgs
    chat_template: str
    chat_template_path: str
    chat_template_kwargs: dict[str, Any]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name, NAMES)


@dataclass
class ModelOptions:
    """The options of one model, by the function that takes them."""

    loading: dict[str, Any] = field(default_factory=dict)  # for FastLanguageModel.from_pretrained
    lora: dict[str, Any] = field(default_factory=dict)  # for FastLanguageModel.get_peft_model
    training: dict[str, Any] = field(default_factory=dict)  # for GRPOConfig
    chat_template: str | None = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for options that the loader or the trainer does not support."""
        for method, options, fates in (("from_pretrained", self.loading, FROM_PRETRAINED),
                                       ("get_peft_model", self.lora, GET_PEFT_MODEL)):
            check_options(FastLanguageModel, method, without(options, taken_by(method)), fates)
        GRPOConfig(**DEFAULTS | self.training)

    @classmethod
    def from_names(cls, options: Mapping[str, Any]) -> "ModelOptions":
        """Sort options by the function that takes them. TypeError for an unknown option, ValueError for one in OWN."""
        if own := {*options} & {*OWN}:
            name = min(own)
            raise ValueError(f"LocalBackend: {name}={options[name]!r} cannot be set; {OWN[name]}")
        training = {*GRPOConfig.unsupported, *GRPOConfig.renamed, *(setting.name for setting in fields(GRPOConfig))}
        takers = [  # the first that knows an option's name takes it
            ("loading", taken_by("from_pretrained")), ("lora", taken_by("get_peft_model")), ("training", training),
            ("lora", {*GET_PEFT_MODEL}), ("loading", {*FROM_PRETRAINED}),
        ]
        known = set().union(*(names for _, names in takers))
        refuse(without(options, known), {}, known, "LocalBackend")
        parts: dict[str, Any] = {"loading": {}, "lora": {}, "training": {}}
        for name, value in options.items():
            parts[next(part for part, names in takers if name in names)][name] = value
        return cls(**parts)

    def with_config(self, config: Mapping[str, Any] | None, base_model: str) -> "ModelOptions":
        """Return these options, overridden by a model's `_internal_config`."""
        config, known = config or {}, {*PARTS, *TEMPLATES}
        refuse(without(config, known), CONFIG, known, "_internal_config")
        init, engine, lora, training = (dict(config.get(name) or {}) for name in PARTS)
        named = init.pop("model_name", base_model)
        if named != base_model:
            raise ValueError(f"_internal_config: init_args.model_name is {named!r} and base_model is {base_model!r}; "
                             "give one name, as base_model")
        known = {"max_model_len", *taken_by("from_pretrained"), *FROM_PRETRAINED}
        refuse(without(engine, known), ENGINE, known, "_internal_config: engine_args")
        loading = {"max_seq_length" if name == "max_model_len" else name: value
                   for name, value in without(engine, ENGINE).items()}
        training.pop("output_dir", None)
        if kwargs := config.get("chat_template_kwargs"):
            training["chat_template_kwargs"] = kwargs
        return ModelOptions(self.loading | loading | init, self.lora | lora, self.training | training,
                            template_of(config) or self.chat_template)

    def settings(self, folder: Path) -> GRPOConfig:
        return GRPOConfig(**DEFAULTS | self.training, output_dir=str(folder))

    def load(self, base_model: str) -> Any:
        """Return the model with its adapter. By default vLLM samples if there is a GPU and vLLM is installed, and the
        context length is the model's own, at most CONTEXT."""
        from torch import cuda

        usual = {"fast_inference": cuda.is_available(), "max_seq_length": context_of(base_model, self.loading)}
        bare, _ = FastLanguageModel.from_pretrained(base_model, **usual | self.loading)
        return self.adapt(bare)

    def adapt(self, model: Any) -> Any:
        """Add an adapter to a loaded model that has none, set the tokenizer's chat template, and return the model."""
        adapted = model if hasattr(model, "peft_config") else FastLanguageModel.get_peft_model(model, **self.lora)
        if self.chat_template is not None:
            adapted.loaded.tokenizer.chat_template = self.chat_template
        return adapted


def template_of(config: Mapping[str, Any]) -> str | None:
    text, path = config.get("chat_template"), config.get("chat_template_path")
    if text is not None and path is not None:
        raise ValueError("_internal_config has chat_template and chat_template_path; give one of them")
    return text if path is None else Path(path).expanduser().read_text(encoding="utf-8")


def without(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def taken_by(method: str) -> set[str]:
    """Return the options that a method of the loader takes by name."""
    parameters = inspect.signature(getattr(FastLanguageModel, method)).parameters
    return {*parameters} - {"model", "model_name", "options"}


def context_of(base_model: str, loading: Mapping[str, Any]) -> int | None:
    """Return a model's context in tokens, at most CONTEXT; None if config.json has no max_position_embeddings."""
    where = {name: loading.get(name) for name in ("revision", "token", "cache_dir")}
    config = stored_fields(find(base_model, **where, local_files_only=bool(loading.get("local_files_only"))))
    if config is None:
        return CONTEXT
    longest = config.get("text_config", config).get("max_position_embeddings")
    return None if longest is None else min(int(longest), CONTEXT)


def with_lora(config: Mapping[str, Any] | None, lora: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an `_internal_config` with ART's `lora_config` among its `peft_args`."""
    whole = dict(config or {})
    named = {LORA.get(name, name): value for name, value in (lora or {}).items()}
    return whole | ({"peft_args": {**whole.get("peft_args", {}), **named}} if named else {})
