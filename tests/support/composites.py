"""Checkpoints of text models with images and sounds beside them, as people download them; small and random."""

import shutil
from pathlib import Path
from typing import Any

from families import family_model
from small_models import SHAPE, TINY
from transformers import (
    AutoTokenizer,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

TINY_PART = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
             "head_dim": 8, "patch_size": 4}
COMPOSITES: dict[str, tuple[type[Any], type[Any], str, dict[str, Any]]] = {  # config, model, text family, other parts
    "gemma4": (Gemma4Config, Gemma4ForConditionalGeneration, "gemma4_text", {
        "vision_config": TINY_PART | {"num_key_value_heads": 2, "position_embedding_size": 16},
        "audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}}),
    "mistral3": (Mistral3Config, Mistral3ForConditionalGeneration, "ministral3", {
        "vision_config": TINY_PART | {"model_type": "pixtral", "image_size": 16}, "tie_word_embeddings": False}),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, "qwen3_5_text", {
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
                          "out_hidden_size": SHAPE["hidden_size"], "num_position_embeddings": 16, "patch_size": 4}}),
}


def composite(kind: str) -> PreTrainedModel:
    """A model in float32 with every part; that of text is the small model of its family."""
    config, model, family, parts = COMPOSITES[kind]
    text: Any = family_model(family)
    whole: PreTrainedModel = model(config(text_config=text.config.to_dict(), **parts)).eval()
    whole.get_decoder().load_state_dict(text.get_decoder().state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    return whole


def saved_composite(kind: str, folder: Path) -> Path:
    """A folder with the model and the embedded tokenizer, as the hub would have it."""
    composite(kind).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder
