"""The text model of a multimodal checkpoint: its config, and the names of its tensors.

Only transformers' class of the text model is loaded, so the other parts take no memory, and the rest of the package
sees a model like any other of its family.
"""

import copy
import logging
import re
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import logging as their_logging

from lowmem_grpo.memory.families import TEXT_NAMES

logger = logging.getLogger(__name__)
SKIPPED = ("llm_int8_skip_modules", "modules_to_not_convert", "ignore")  # config fields that list unquantized modules


def text_names(config: Any) -> dict[str, str]:
    """Return {pattern of stored names: replacement} if only the text part of the checkpoint is loaded; otherwise {}."""
    return TEXT_NAMES.get(str(config.model_type), {})


def text_part(config: Any) -> Any:
    """Return the config of the model to load: that of the text part, with the whole config's weight tying and
    quantization; `config` itself if there is no other part."""
    names = text_names(config)
    if not names:
        return config
    text = copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = bool(text.tie_word_embeddings or config.tie_word_embeddings)
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantization is not None:
        fields = dict(quantization if isinstance(quantization, dict) else quantization.to_dict())
        left = {key: [text_name(path, names) or path for path in fields[key]] for key in SKIPPED if fields.get(key)}
        text.quantization_config = fields | left
    return text


def text_name(stored: str, names: dict[str, str]) -> str | None:
    """Return the name in the text model of a stored tensor or module; None if it belongs to another part."""
    if not names or stored.startswith("lm_head"):
        return stored
    pattern = next((known for known in names if re.match(known, stored)), None)
    return None if pattern is None else re.sub(pattern, names[pattern], stored)


def read_model(path: str, config: Any, names: dict[str, str], **options: Any) -> Any:
    """Return the causal language model stored at `path`, or the text model of a multimodal checkpoint. There,
    transformers would list each tensor of the other parts as unexpected; we log only their number. ValueError if a
    tensor of the text model is missing."""
    if not names:
        return AutoModelForCausalLM.from_pretrained(path, config=config, trust_remote_code=False, **options)
    before = their_logging.get_verbosity()
    their_logging.set_verbosity_error()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, config=config, key_mapping=names, output_loading_info=True, trust_remote_code=False, **options)
    finally:
        their_logging.set_verbosity(before)
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{path} lacks {len(missing)} tensors of its text model, such as {missing[0]}. Fetch the "
                         "checkpoint again, or take one of text only")
    logger.info("of %s the text model is loaded: %d tensors of images or sounds are left out", path,
                len(info["unexpected_keys"]))
    return model
