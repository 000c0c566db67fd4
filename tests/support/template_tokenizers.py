"""Tokenizers for the chat templates that TRL ships: byte-level BPE, with the marks that each template writes; the
embedded one with such a template; and one of characters, with rows of prompts."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import trl
from small_models import TINY
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
SPECIAL = re.compile(r"<\|[^<>{}'\"\s|]+\|>|<\uff5c[^<>]+?\uff5c>|<\|[a-z_\"]+\|?>|<[a-z_]+\|>|<(?:start|end)_of_\w+>|"
                     r"</s>|<sop>|\[gMASK\]|\[/?INST\]")
UNSAID = ("<|endoftext|>", "<|begin|>", "<|user|>", "<|observation|>")  # special tokens that no template need write
NAMED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # no special ones
ENDS = (  # the first of these in a template is its end token
        "<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eot|>", "<|return|>", "<|END_OF_TURN_TOKEN|>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end|>", "<end_of_utterance>", "</s>")
WORD = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|"
        r"\s+")  # as Qwen and Llama 3 split text
WORDS = "a game of words, numbers and tools. user assistant system functions name arguments value answer 0 1 2 3\n\n"
NAMES = ["tiny", *sorted(path.stem for path in FOLDER.glob("*.jinja"))]


@cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer for one of NAMES."""
    if name == "tiny":
        return AutoTokenizer.from_pretrained(TINY)
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    special = sorted({*SPECIAL.findall(template), *UNSAID})
    end = next((end for end in ENDS if end in special), "<|endoftext|>")
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(special, [one for one in NAMED if one in template]), bos_token="<|begin|>",
        eos_token=end, pad_token="<|endoftext|>", chat_template=template, clean_up_tokenization_spaces=False)


def byte_level(special: list[str], named: list[str]) -> Tokenizer:
    """Byte-level BPE that has merged what templates and games often say."""
    made = Tokenizer(models.BPE())
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORD), "isolated"), letters])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    made.train_from_iterator([WORDS] * 9, trainer)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    made.add_tokens([AddedToken(text, normalized=False) for text in named])
    return made


class CharTokenizer:
    """A stand-in that gives one token a character, where only counts matter."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoding", (), {"input_ids": [ord(letter) for letter in text]})


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"row {index}", "index": index} for index in range(count)]


def tiny_with(template: str, *special: str, plain: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """The embedded tokenizer with a template that TRL ships, and with tokens that are special or not."""
    tokenizer = AutoTokenizer.from_pretrained(str(TINY))
    tokenizer.chat_template = (FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
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
