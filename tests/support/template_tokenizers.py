"""Tokenizers for the chat templates that TRL ships: byte-level BPE, with the marks that each template writes; the
embedded one with such a template; one of characters, with rows of prompts; and chat templates as the public checkpoints
of the families in docs/families.md write a conversation, with the tokens that end a sampled answer."""

import re
from dataclasses import dataclass
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


TURNS = "{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}{head}{{% endif %}}"
IM = TURNS.format(turn="<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", head="<|im_start|>assistant\n")


@dataclass(frozen=True)
class FamilyChat:
    """`ends` are those of the tokenizer (first) and of the generation config; `answers` are what is trained of TALK."""

    template: str
    ends: tuple[str, ...]
    answers: tuple[str, str]
    marks: tuple[str, ...] = ()

    def tokenizer(self) -> Any:
        """The embedded tokenizer with the family's tokens and template."""
        made = AutoTokenizer.from_pretrained(str(TINY))
        made.add_special_tokens({"additional_special_tokens": [*self.ends, *self.marks]})
        made.eos_token, made.chat_template, made.bos_token = self.ends[0], self.template, "<s>"
        return made

    def end_ids(self, tokenizer: Any) -> list[int]:
        """Their ids."""
        return [tokenizer.convert_tokens_to_ids(end) for end in self.ends]


TALK = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3."},
        {"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7."}]
CHATML = FamilyChat(IM, ("<|im_end|>", "<|endoftext|>"), ("3.<|im_end|>", "7.<|im_end|>"), ("<|im_start|>",))
FAMILY_CHATS = {
    "llama": FamilyChat(
        "{{ bos_token }}" + TURNS.format(
            turn="<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>",
            head="<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), ("3.<|eot_id|>", "7.<|eot_id|>"),
        ("<|start_header_id|>", "<|end_header_id|>")),
    "mistral": FamilyChat(
        "{{ bos_token }}" + TURNS.format(
            turn="{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}",
            head=""),
        ("</s>",), (" 3.</s>", " 7.</s>"), ("[INST]", "[/INST]")),
    "qwen2": CHATML, "qwen3_moe": CHATML, "smollm3": CHATML,
    "gemma3_text": FamilyChat(
        "{{ bos_token }}" + TURNS.format(
            turn="<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
                 "<end_of_turn>\n",
            head="<start_of_turn>model\n"),
        ("<eos>", "<end_of_turn>"), ("3.<end_of_turn>", "7.<end_of_turn>"), ("<start_of_turn>",)),
    "gemma4_text": FamilyChat(
        "{{ bos_token }}" + TURNS.format(
            turn="<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<turn|>\n",
            head="<|turn>model\n"),
        ("<eos>", "<turn|>"), ("3.<turn|>", "7.<turn|>"), ("<|turn>",)),
    "phi3": FamilyChat(  # whose conversations end in the end token, behind that of the turn
        TURNS.format(turn="<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", head="<|assistant|>\n").replace(
            "{% if add", "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}{% if add"),
        ("<|endoftext|>", "<|assistant|>", "<|end|>"), ("3.<|end|>", "7.<|end|>"), ("<|user|>",)),
    "olmo2": FamilyChat(
        "{{ bos_token }}" + TURNS.format(
            turn="{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}{{ eos_token }}{% if not loop.last %}\n"
                 "{% endif %}{% else %}<|user|>\n{{ m.content }}\n{% endif %}", head="<|assistant|>\n"),
        ("<|endoftext|>",), ("3.<|endoftext|>", "7.<|endoftext|>"), ("<|user|>", "<|assistant|>")),
    "olmo3": FamilyChat(  # whose last turn ends in another token
        TURNS.format(
            turn="<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.role == 'assistant' and loop.last %}{{ eos_token }}"
                 "{% else %}<|im_end|>\n{% endif %}", head="<|im_start|>assistant\n"),
        ("<|endoftext|>", "<|im_end|>"), ("3.<|im_end|>", "7.<|endoftext|>"), ("<|im_start|>",)),
    "granite": FamilyChat(
        TURNS.format(turn="<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
                     head="<|start_of_role|>assistant<|end_of_role|>"),
        ("<|end_of_text|>",), ("3.<|end_of_text|>", "7.<|end_of_text|>"), ("<|start_of_role|>", "<|end_of_role|>")),
    "glm4": FamilyChat(  # whose next message ends a turn
        "[gMASK]<sop>" + TURNS.format(turn="<|{{ m.role }}|>\n{{ m.content }}", head="<|assistant|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"), ("\n3.<|user|>", "\n7.<|endoftext|>"),
        ("[gMASK]", "<sop>", "<|assistant|>", "<|system|>")),
    "ministral3": FamilyChat(
        "{{ bos_token }}" + TURNS.format(
            turn="{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}"
                 "{% endif %}", head=""),
        ("</s>",), ("3.</s>", "7.</s>"), ("[INST]", "[/INST]")),
    "exaone4": FamilyChat(
        TURNS.format(turn="[|{{ m.role }}|]\n{{ m.content }}[|endofturn|]\n", head="[|assistant|]\n"),
        ("[|endofturn|]",), ("3.[|endofturn|]", "7.[|endofturn|]"), ("[|user|]", "[|assistant|]")),
}
