"""How LocalBackend loads and trains a model: options by this package's names, and ART's `_internal_config`."""

import difflib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from lowmem_grpo.config.grpo import GRPOConfig
from lowmem_grpo.config.loading import FROM_PRETRAINED, GET_PEFT_MODEL, Fate, any_value, off
from lowmem_grpo.later import torch
from lowmem_grpo.loader import FastLanguageModel, check_options
from lowmem_grpo.models.named import find

CONTEXT = 8192  # tokens, where nobody says how long conversations are and the model can do as much
DEFAULTS: dict[str, Any] = {  # of GRPOConfig, where they differ from its own
    "learning_rate": 5e-6, "loss_type": "cispo", "lr_scheduler_type": "constant", "save_steps": 1,
    "save_total_limit": None, "kl_reference": "base",
}
OWN = {  # what the backend decides
    "output_dir": "it is path/project/name", "overwrite_output_dir": "every run goes on from its last checkpoint",
    "model_name": "it is the base_model of TrainableModel",
}
PARTS = ("init_args", "engine_args", "peft_args", "trainer_args")  # of `_internal_config`
OF_ENGINE = {"gpu_memory_utilization": "gpu_memory_utilization", "max_num_seqs": "max_num_seqs",
             "enforce_eager": "enforce_eager", "max_model_len": "max_seq_length", "dtype": "dtype",
             "revision": "revision", "max_lora_rank": "max_lora_rank",
             "kv_cache_dtype": "kv_cache_dtype"}
ENGINE: dict[str, Fate] = {
    **any_value("vLLM always sleeps while the model trains", "enable_sleep_mode"),
    **any_value("vLLM has no such option any more: it schedules each step", "num_scheduler_steps"),
    **any_value("nothing of it is printed", "disable_log_stats", "disable_log_requests", "enable_log_requests"),
    **any_value("what was computed of a conversation is always kept", "enable_prefix_caching"),
    **any_value("it samples with the trainer's own adapter", "enable_lora", "max_loras", "lora_target_modules"),
    **off("there is one device", "tensor_parallel_size", "pipeline_parallel_size", also=(1,)),
    **off("code from a model repository is never run", "trust_remote_code"),
    **any_value("a request says what it wants; what it leaves out is sampled as in training", "generation_config"),
}
CONFIG: dict[str, Fate] = {
    **off("there is one device, which samples and trains by turns", "trainer_gpu_ids", "inference_gpu_ids",
          also=([0],)),
    **off("training runs in this process", "tinker_args", "tinker_native_args"),
    **any_value("it samples with the trainer's own weights", "rollout_weights_mode"),
    **any_value("what transformers ships is loaded", "allow_unvalidated_arch"),
    **off("content is text", "chat_template_content_format", also=("auto", "string", "openai")),
    **off("tools are given to the template as OpenAI's schemas", "chat_template_tool_schema_format",
          also=("default", "vllm_openai")),
}


@dataclass
class ModelOptions:
    """The options of one model, by what takes them."""

    loading: dict[str, Any] = field(default_factory=dict)  # of FastLanguageModel.from_pretrained
    lora: dict[str, Any] = field(default_factory=dict)  # of FastLanguageModel.get_peft_model
    training: dict[str, Any] = field(default_factory=dict)  # of GRPOConfig
    chat_template: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "ModelOptions":
        """Options by name. TypeError for one that nobody knows; GRPOConfig and the loader refuse what they do not
        support."""
        made = cls()
        for name, value in options.items():
            if name in OWN:
                raise ValueError(f"LocalBackend: {name}={value!r} cannot be set; {OWN[name]}")
            made.home(name)[name] = value
        return made.checked()

    def checked(self) -> "ModelOptions":
        """These, if loader and trainer support them."""
        for method, options, fates in (("from_pretrained", self.loading, FROM_PRETRAINED),
                                       ("get_peft_model", self.lora, GET_PEFT_MODEL)):
            named = taken_by(method)
            check_options(FastLanguageModel, method, {name: value for name, value in options.items()
                                                      if name not in named}, fates)
        GRPOConfig(**DEFAULTS | self.training)
        return self

    def home(self, name: str) -> dict[str, Any]:
        """Where an option of this name belongs."""
        loading, lora = (taken_by(one) for one in ("from_pretrained", "get_peft_model"))
        training = {one.name for one in fields(GRPOConfig)} | set(GRPOConfig.unsupported) | set(GRPOConfig.renamed)
        for names, home in ((loading - lora, self.loading), ({"max_seq_length"}, self.loading), (lora, self.lora),
                            (training, self.training), ({*FROM_PRETRAINED} - {*GET_PEFT_MODEL}, self.loading),
                            ({*GET_PEFT_MODEL}, self.lora)):
            if name in names:
                return home
        close = difflib.get_close_matches(name, [*loading, *lora, *training], n=3)
        raise TypeError(f"LocalBackend has no option {name!r}{'; did you mean ' if close else ''}{', '.join(close)}"
                        f"{'?' if close else ''}")

    def with_config(self, config: Mapping[str, Any] | None, base_model: str) -> "ModelOptions":
        """These, and what a model's `_internal_config` says, which wins."""
        parts = {name: dict((config or {}).get(name) or {}) for name in PARTS}
        for name, value in (config or {}).items():
            refuse("_internal_config", name, value, CONFIG, {*PARTS, *TEMPLATES})
        named = parts["init_args"].pop("model_name", base_model)
        if named != base_model:
            raise ValueError(f"_internal_config: init_args.model_name is {named!r} and base_model is {base_model!r}; "
                             "give one name, as base_model")
        for name, value in parts["engine_args"].items():
            refuse("_internal_config: engine_args", name, value, ENGINE, {*OF_ENGINE, "model"})
        engine = {OF_ENGINE[name]: value for name, value in parts["engine_args"].items() if name in OF_ENGINE}
        parts["trainer_args"].pop("output_dir", None)
        kwargs = (config or {}).get("chat_template_kwargs")
        own = {"chat_template_kwargs": kwargs} if kwargs else {}
        return ModelOptions(
            self.loading | engine | parts["init_args"], self.lora | parts["peft_args"],
            self.training | parts["trainer_args"] | own, template_of(config or {}) or self.chat_template,
        ).checked()

    def settings(self, folder: Path) -> GRPOConfig:
        """The settings of a run in this folder."""
        return GRPOConfig(**DEFAULTS | self.training, output_dir=str(folder))

    def load(self, base_model: str) -> Any:
        """The model with its adapter. By default vLLM samples on a card, where it is installed, and the context is the
        model's own, but at most CONTEXT."""
        usual = {"fast_inference": torch.cuda.is_available(), "max_seq_length": context_of(base_model, self.loading)}
        bare, _ = FastLanguageModel.from_pretrained(base_model, **usual | self.loading)
        return self.adapt(bare)

    def adapt(self, model: Any) -> Any:
        """A loaded model with an adapter: its own, or a new one. Its tokenizer gets the chat template."""
        adapted = model if hasattr(model, "peft_config") else FastLanguageModel.get_peft_model(model, **self.lora)
        if self.chat_template is not None:
            adapted.loaded.tokenizer.chat_template = self.chat_template
        return adapted


TEMPLATES = ("chat_template", "chat_template_path", "chat_template_kwargs")


def template_of(config: Mapping[str, Any]) -> str | None:
    """The chat template of a config, as a text or by its file."""
    text, path = config.get("chat_template"), config.get("chat_template_path")
    if text is not None and path is not None:
        raise ValueError("_internal_config has chat_template and chat_template_path; give one of them")
    return text if path is None else Path(path).read_text(encoding="utf-8")


def refuse(owner: str, name: str, value: Any, fates: Mapping[str, Fate], known: set[str]) -> None:
    """ValueError for an option that asks for what is not done here, or that nobody knows."""
    if name not in known and name not in fates:
        raise ValueError(f"{owner}: {name} is not supported; leave it out. What is: {', '.join(sorted(known))}")
    if name not in known and not fates[name].harmless(value):
        raise ValueError(f"{owner}: {name}={value!r} is not supported; {fates[name].why}")


def taken_by(method: str) -> set[str]:
    """The options that a method of the loader takes by name."""
    parameters = inspect.signature(getattr(FastLanguageModel, method)).parameters
    return {*parameters} - {"model", "model_name", "options"}


def context_of(base_model: str, loading: Mapping[str, Any]) -> int | None:
    """The context of a model in tokens, at most CONTEXT; None, which is its own, where its config does not say."""
    where = {name: loading.get(name) for name in ("revision", "token", "cache_dir")}
    folder = Path(find(base_model, **where, local_files_only=bool(loading.get("local_files_only"))))
    if not (folder / "config.json").is_file():
        return CONTEXT
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    longest = config.get("text_config", config).get("max_position_embeddings")
    return None if longest is None else min(int(longest), CONTEXT)
