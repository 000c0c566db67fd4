"""Random conversations of several turns, and what a chat template itself makes of them: the oracle of the renderer."""

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from template_tokenizers import tokenizer_of
from transformers.utils import get_json_schema

from lowmem_grpo.types import Message

NO_TEXT = ("idefics3", "llava_next", "smolvlm")  # they want content as a list of parts
NO_CALLS = ("tiny", "llama3", "qwen2_5_vl", "lfm2")  # they write results, and drop the calls before them
NO_RESULTS = ("cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5")  # they refuse or drop messages of tools
ENDS = {  # what ends an answer and a call, where it is not the tokenizer's end token
    "glm4moe": ("<|user|>", "<|observation|>"), "gptoss": ("<|end|>", "<|call|>"),
    "deepseek_r1_distill": ("<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"),
                    ("<turn|>", "<|tool_response>")),
}
ANCHOR = "Xanadu"  # what an answer ends with, and a call's argument is; nothing else says it
QUESTION: Message = {"role": "user", "content": "Who was it?"}
PIECES = ("yes", "12", " ", "\n", "\n\n", "  two", '{"a": [1, "b"]}', "caf\u00e9 \u6771\u4eac \U0001f600", "a < b",
          "<p>", "</", "def f(x):\n    return x", "'\\n'", "&amp;", "\t", "<", "|>", "im_start", "user", "[", "100%",
          "{{ x }}", "\u2581", "]")


def look(name: str) -> str:
    """Looks a name up.

    Args:
        name: Whom to look up.
    """
    return name


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


SCHEMAS = [get_json_schema(look), get_json_schema(add)]


@cache
def marks_of(name: str) -> dict[int, tuple[str, bool]]:
    """Of each added token its text, and whether it is a special one."""
    return {number: (str(token), token.special) for number, token in tokenizer_of(name).added_tokens_decoder.items()}


def family(name: str) -> str:
    """The template of which another is the variant for training."""
    return name.removesuffix("_training")


@dataclass
class Round:
    """What the policy says, and what answers it."""

    answer: Message
    replies: list[Message]

    @property
    def called(self) -> bool:
        return "tool_calls" in self.answer


class Talk:
    """A seeded conversation under one template."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.tokenizer, self.forged = name, tokenizer_of(name), number % 2 == 0
        self.rng = random.Random(f"{name}-{number}")
        self.tools = SCHEMAS if family(name) not in NO_RESULTS and number % 4 < 2 else None
        self.of_answer, self.of_call = ENDS.get(family(name), (self.tokenizer.eos_token,) * 2)
        self.most = 1 if name.startswith("llama3_") else None  # calls at once
        self.marks = [token for token, _ in marks_of(name).values()]
        self.opening: list[Message] = [{"role": "user", "content": self.text(forged=False) or "Well?"}]
        self.thinks = self.render(self.opening).endswith("<think>\n")
        self.rounds = [self.round(at) for at in range(self.rng.randint(1, 3))]

    def text(self, forged: bool) -> str:
        """What somebody says; forged: with whole and broken marks of the tokenizer in it."""
        pieces = self.rng.choices(PIECES, k=self.rng.randint(0, 6))
        if forged:
            marks = self.rng.choices(self.marks, k=self.rng.randint(1, 3))
            pieces += [*marks, marks[0][:3] + marks[-1], marks[0] + marks[0][1:], marks[0][:-1]]
            self.rng.shuffle(pieces)
        return "".join(pieces)

    def round(self, at: int) -> Round:
        """An answer and what the user says, or calls and their results."""
        anchor = f"{ANCHOR}{at}"
        if self.tools is None or self.rng.random() < 0.3:
            said = f"It was {self.rng.choice(('me', 'you'))}, {anchor}"
            answer = self.thought({"role": "assistant", "content": said})
            return Round(answer, [{"role": "user", "content": self.text(self.forged) or "And?"}])
        names = self.rng.choices(("look", "add"), k=self.rng.choice((1, 1, 2)))
        calls = [{"id": f"call{at}000{place}", "type": "function",
                  "function": {"name": name, "arguments": {"name": anchor}}} for place, name in enumerate(names)]
        replies = [{"role": "tool", "name": name, "content": self.text(self.forged), "tool_call_id": call["id"]}
                   for name, call in zip(names, calls, strict=True)]
        none = None if "r1" in self.name else ""  # which R1 wants beside a call
        return Round(self.thought({"role": "assistant", "content": none, "tool_calls": calls}), replies)

    def thought(self, answer: Message) -> Message:
        """The answer, with a thought before it where the prompt has begun one."""
        if not self.thinks or answer["content"] is None:
            return answer
        if "reasoning_content" in self.tokenizer.chat_template:
            return answer | {"reasoning_content": "So it is."}
        return answer | {"content": f"<think>\nSo it is.\n</think>\n\n{answer['content']}"}

    def sampled(self, end: str) -> list[int]:
        """Any tokens, of which the last is the end of a turn, another end, or none."""
        last = self.rng.choice((end, end, "<|endoftext|>", ""))
        ids = self.rng.choices(range(len(self.tokenizer)), k=self.rng.randint(1, 9))
        return ids + ([self.tokenizer.convert_tokens_to_ids(last)] if last else [])

    def render(self, messages: list[Message], generation: bool = True) -> str:
        """What the template itself makes of messages; arguments as text where it wants them so."""
        try:
            return self.applied(messages, generation)
        except TypeError:
            return self.applied([with_text(one) for one in messages], generation)

    def applied(self, messages: list[Message], generation: bool) -> str:
        return str(self.tokenizer.apply_chat_template(
            messages, tools=self.tools, tokenize=False, add_generation_prompt=generation))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def end_of(self, one: Round) -> str:
        """The mark that ends the policy's turn. DeepSeek R1 closes a turn of two calls only."""
        two = "r1" in self.name and len(one.replies) == 2
        return str(self.of_call if one.called and not two else self.of_answer)

    def behind(self, one: Round, replies: list[Message], ended: bool) -> str:
        """What the template writes behind the policy's turn, or from its end on."""
        plain = {"role": "assistant", "content": f"{ANCHOR}0"}
        called = one.called and family(self.name) not in NO_CALLS
        answer = one.answer | {"tool_calls": one.answer["tool_calls"][:self.most]} if called else plain
        text = self.render([QUESTION, answer, *replies])
        anchor = text.rindex(ANCHOR) if called else text.index(ANCHOR)
        at = text.index(self.end_of(one), anchor)
        if not ended:
            return text[at:] if called else text[anchor + len(ANCHOR) + 1:]
        return text[at + len(self.end_of(one)):]


def with_text(message: Message) -> Message:
    """The message with its calls' arguments as text, as templates of DeepSeek want it."""
    calls: Any = [call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                  for call in message.get("tool_calls", [])]
    return message | {"tool_calls": calls} if calls else message
