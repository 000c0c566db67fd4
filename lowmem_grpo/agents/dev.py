"""ART's `dev`: what a program may write into `model._internal_config`. LocalBackend reads it, and refuses what has no
meaning here by its name."""

from typing import Any, TypedDict

from lowmem_grpo.agents.refused import missing

InitArgs = dict[str, Any]  # for FastLanguageModel.from_pretrained
EngineArgs = dict[str, Any]  # for vLLM
PeftArgs = dict[str, Any]  # for FastLanguageModel.get_peft_model
LoRAConfig = dict[str, Any]  # ART's names of the same: rank, alpha, dropout, init_weights
TrainerArgs = dict[str, Any]  # for GRPOConfig
OpenAIServerConfig = dict[str, Any]
ServerArgs = dict[str, Any]
TrainConfig = dict[str, Any]  # ART's experimental options of one call of train


class InternalModelConfig(TypedDict, total=False):
    """Options of a model, by the part that takes them."""

    init_args: InitArgs
    engine_args: EngineArgs
    peft_args: PeftArgs
    trainer_args: TrainerArgs
    chat_template: str
    chat_template_path: str
    chat_template_kwargs: dict[str, Any]


def __getattr__(name: str) -> Any:
    raise missing(__name__, name, sorted(known for known in globals() if known.endswith(("Args", "Config"))))
