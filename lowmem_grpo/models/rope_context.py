"""Position embeddings whose frequencies depend on the length of a text, fixed for the context of a loaded model.

LongRoPE (Phi-3.5, Phi-4-mini; arXiv 2402.13753, section 3.2) has other factors beyond the length of pretraining.
transformers chooses by the longest position of a *forward pass*, so one long text of a micro-batch would change all
short ones. vLLM chooses by `max_model_len`, once; so do we, by `max_seq_length`, and CUDA graphs can be recorded.
"""

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

logger = logging.getLogger(__name__)
BY_LENGTH = ("dynamic", "longrope")  # kinds that transformers computes anew in a forward pass
FIXED = "default"  # the name under which it leaves frequencies as they are


def fix_frequencies(model: nn.Module, context: int) -> None:
    """Give a model's position embeddings the frequencies for texts of `context` tokens, whatever text comes. Warn where
    transformers would take others for a short text."""
    for rotary, layer_type, kind in by_length(model):
        of_layer: Any = rotary
        device = getattr(rotary, name("inv_freq", layer_type)).device
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
            of_layer.config, device, seq_len=context, layer_type=layer_type)
        setattr(rotary, name("inv_freq", layer_type), frequencies)
        setattr(rotary, name("attention_scaling", layer_type), scaling)
        of_layer.rope_type = FIXED if layer_type is None else {**of_layer.rope_type, layer_type: FIXED}
        settings = of_layer.config.rope_parameters
        say(context, settings if layer_type is None else settings[layer_type])


def by_length(model: nn.Module) -> Iterator[tuple[nn.Module, str | None, str]]:
    """Yield each position embedding of such a kind, with the type of layers it is for (None: for all) and the kind."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer_type, kind in list(kinds.items()) if isinstance(kinds, dict) else [(None, kinds)]:
            if kind in BY_LENGTH:
                yield module, layer_type, kind


def name(attribute: str, layer_type: str | None) -> str:
    return attribute if layer_type is None else f"{layer_type}_{attribute}"


def say(context: int, settings: dict[str, Any]) -> None:
    """Warn where a context beyond that of pretraining gives short texts the long factors."""
    original = settings.get("original_max_position_embeddings")
    if settings.get("rope_type") == "longrope" and original and context > original:
        logger.warning("LongRoPE: max_seq_length is %s, and the model was pretrained on texts of %s tokens, so texts "
                       "of every length use the long factors, as in vLLM. max_seq_length=%s keeps the short ones",
                       f"{context:,}", f"{original:,}", original)
