"""Names that people import from Unsloth: aliases of our names, functions without effect here, and refused names."""

import logging
from typing import Any

from lowmem_grpo import utils

logger = logging.getLogger(__name__)

ALIASES = {  # Unsloth's name: ours
    "is_bf16_supported": "is_bfloat16_supported", "UnslothTrainer": "SFTTrainer",
    "UnslothTrainingArguments": "SFTConfig", "FastTextModel": "FastLanguageModel",
    **dict.fromkeys(
        (f"Fast{family}Model" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Granite", "FalconH1")),
        "FastLanguageModel",
    ),
}
TEXT = "Only text is trained here: "
IMAGES = "Images are trained with GRPO here (docs/images.md), not with SFT: "
REFUSED = {name: advice for names, advice in {
    "UnslothVisionDataCollator": IMAGES + "leave the collator out, and pass rows with images to GRPOTrainer.",
    "process_vision_info": IMAGES + "GRPOTrainer and fast_generate read the pictures of messages themselves.",
    "FastSentenceTransformer": TEXT + "sentence embeddings are not; use the library sentence-transformers.",
    "FastDiffusionModel": TEXT + "images are not; use the library diffusers.",
    "SyntheticDataKit": "No data is made here; use Meta's synthetic-data-kit itself, and load what it wrote.",
    "RawTextDataLoader": "Load texts with datasets.load_dataset('text', data_files=...), and pass them to SFTTrainer.",
    "QGaloreConfig": "The base weights stay frozen here; train LoRA with get_peft_model.",
    "OnlineDPOTrainer OnlineDPOConfig CPOTrainer CPOConfig BCOTrainer BCOConfig NashMDTrainer NashMDConfig XPOTrainer "
    "XPOConfig TPOTrainer TPOConfig":
        "Take DPOTrainer (loss_type='bco_pair' is BCO's), ORPOTrainer or KTOTrainer; or GRPOTrainer, which samples.",
    "PRMTrainer PRMConfig": "Rewards of steps are not trained here: train a reward model of whole texts with "
                            "RewardTrainer, or pay turns of an environment.",
    "PPOTrainer PPOConfig": "Train with GRPOTrainer, whose groups give the baseline; GRPOConfig("
                            "advantage_estimator='gae') gives it a critic (docs/preferences.md).",
    "GKDTrainer GKDConfig MiniLLMTrainer MiniLLMConfig GOLDTrainer GOLDConfig SSDTrainer SSDConfig":
        "A teacher's distribution is learnt on the student's own completions: with DistillationTrainer, or with "
        "SDFTTrainer and SDPOTrainer from the model itself. For other texts take SFTTrainer.",
    "AsyncGRPOTrainer AsyncGRPOConfig":
        "There is no second card that samples: train with GRPOTrainer, where train_while_sampling=True trains on "
        "finished groups while others are sampled.",
    "GRPOWithReplayBufferTrainer": "Train with GRPOTrainer, and set replay_buffer_size.",
    "GRPOWithReplayBufferConfig": "Take GRPOConfig, and set replay_buffer_size.",
    "launch_openenv is_port_open":
        "No server of OpenEnv is started here: start it yourself, and give its client to "
        "lowmem_grpo.environments.openenv.OpenEnv as environment_factory (docs/environments.md).",
    "Benchmarker check_signal_escape_patterns":
        "Code that a model wrote is not run in the trainer's own process, where it could reach everything: call "
        "lowmem_grpo.create_locked_down_function(code), whose calls run in a sandbox, or use "
        "rewards.code_passes_tests.",
    "to_sharegpt apply_chat_template":
        "Make the rows yourself: dataset.map(lambda row: {'messages': [{'role': 'user', 'content': ...}, {'role': "
        "'assistant', 'content': ...}]}); SFTTrainer applies the tokenizer's chat template to `messages`.",
}.items() for name in names.split()}


def refuse_name(name: str) -> None:
    """Raise UnsupportedError, with what to use instead, for a name of Unsloth's or TRL's that we lack."""
    utils.refuse_name(name, "lowmem_grpo", REFUSED)


def refused_class(name: str) -> type:
    """Return a class of that name, since scripts import more than they use. Calling or subclassing it raises
    UnsupportedError, with what to use instead."""
    def refuse(*_: Any, **__: Any) -> None:
        refuse_name(name)

    return type(name, (), {"__doc__": REFUSED[name], "__init__": refuse, "__init_subclass__": refuse})


def PatchFastRL(*args: Any, **kwargs: Any) -> None:  # noqa: N802 - Unsloth's name
    """Do nothing: GRPOTrainer of lowmem_grpo needs no patch."""
    logger.info("PatchFastRL does nothing here: GRPOTrainer of lowmem_grpo needs no patch")


def PatchDPOTrainer(*args: Any, **kwargs: Any) -> None:  # noqa: N802 - Unsloth's name
    """Do nothing: the trainers on preferences need no patch."""
    logger.info("PatchDPOTrainer does nothing here: DPOTrainer, ORPOTrainer and KTOTrainer need no patch")


PatchKTOTrainer = PatchDPOTrainer


def unsloth_train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
    return trainer.train(*args, **kwargs)
