"""Tokenizers with the chat templates of real models, and functions that serve as tools."""

from pathlib import Path

import trl
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import lowmem_grpo

TINY = Path(lowmem_grpo.__file__).parent / "assets" / "tiny"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def tokenizer_of(template: str, *special: str, plain: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """The embedded tokenizer with a template that TRL ships, and with tokens that are special or not."""
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.add_tokens(list(plain))
    return tokenizer


def weather(city: str, days: int = 1, *, unit: str | None = None) -> str:
    """Look up the weather.

    Args:
        city: Where.
        days: For how many days.
        unit: Celsius or Fahrenheit.
    """
    return f"{city}: sun for {days} days, in {unit}"
