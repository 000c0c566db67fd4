"""Chat templates as the public checkpoints of the families in docs/families.md write a conversation, one a family, with
the tokens that they write and those that end a sampled answer."""

from dataclasses import dataclass
from typing import Any

from small_models import TINY
from transformers import AutoTokenizer

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
