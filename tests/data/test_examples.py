"""Rows for supervised fine-tuning: ids as GRPO will sample them, an end that is learnt, bad rows with their reason."""

from typing import Any

import pytest
from small_models import TINY
from tables import every_row
from transformers import AutoTokenizer

from lowmem_grpo.data.examples import Example, ExampleEncoder
from lowmem_grpo.data.prompts import DataError


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def encoder(max_length: int = 128, template: str | None = None) -> ExampleEncoder:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = template or tokenizer.chat_template
    return ExampleEncoder(tokenizer, max_length, [tokenizer.eos_token_id])


def encoded(row: dict[str, Any]) -> tuple[str, str]:
    """A row's prompt and completion as their ids read."""
    found, tokenizer = encoder().encode(row), AutoTokenizer.from_pretrained(TINY)
    assert isinstance(found, Example), found
    return tokenizer.decode(found.ids), tokenizer.decode(found.completion_ids)


CHAT = question("1 + 1?"), "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"


@every_row(("prompt", "rendered", "completion", "ended"), [
    (*CHAT, "2", "2<|im_end|>"), (*CHAT, [{"role": "assistant", "content": "2"}], "2<|im_end|>"),
    (*CHAT, "2<|im_end|>", "2<|im_end|>"), ("1 + 1 =", "1 + 1 =", " 2", " 2<|im_end|>"),
    ("1 + 1 =", "1 + 1 =", " 2<|im_end|>", " 2<|im_end|>"),
])
def test_a_row_is_the_prompt_that_is_sampled_from_and_an_answer_that_ends_once(
    prompt: Any, rendered: str, completion: Any, ended: str
) -> None:
    assert encoded({"prompt": prompt, "completion": completion}) == (rendered, ended)


def test_prompt_and_completion_are_never_merged_into_other_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    row = {"prompt": "What is the res", "completion": "ult?"}
    found = encoder().encode(row)
    assert isinstance(found, Example)
    assert found.ids == tokenizer.encode("What is the res")
    assert found.completion_ids == [*tokenizer.encode("ult?"), tokenizer.eos_token_id]
    assert [*found.ids, *found.completion_ids[:-1]] != tokenizer.encode("What is the result?")


@every_row(("row", "reason"), [
    ({"prompt": "a", "completion": ""}, "empty completion"), ({"prompt": "a", "completion": " \n"}, "empty completion"),
    ({"prompt": "a", "completion": None}, "empty completion"), ({"prompt": "a"}, "empty completion"),
    ({"prompt": "", "completion": "b"}, "empty prompt"), ({"prompt": [], "completion": "b"}, "empty prompt"),
    ({"prompt": 3, "completion": "b"}, "prompt is int"), ({"prompt": "a", "completion": 4}, "completion is int"),
    ({"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}, "prompt is text and completion is chat"),
    ({"prompt": question("a"), "completion": question("b")}, "not one message of the assistant"),
    ({"prompt": question("a"), "completion": [{"role": "assistant", "content": " "}]}, "not one message of the assist"),
    ({"prompt": question("a"), "completion": [{"role": "assistant", "content": None}]}, "not one message of the assis"),
    ({"prompt": "a", "completion": "2<|im_end|> and more"}, "goes on after an end token"),
    ({"prompt": "a " * 200, "completion": "b"}, "prompt longer than 64 tokens"),
    ({"prompt": "a", "completion": "b " * 200}, "prompt and completion longer than 64 tokens"),
])
def test_a_row_that_cannot_be_used_says_why(row: dict[str, Any], reason: str) -> None:
    found = encoder(64).encode(row)
    assert isinstance(found, str) and reason in found


def test_a_row_fills_max_length_to_the_last_token_and_not_beyond() -> None:
    row = {"prompt": "1 2 3", "completion": "4 5"}
    found = encoder().encode(row)
    assert isinstance(found, Example)
    total = len(found.ids) + len(found.completion_ids)
    assert isinstance(encoder(total).encode(row), Example)
    assert isinstance(encoder(total - 1).encode(row), str)


def test_a_template_that_renders_the_prompt_differently_with_its_answer_is_refused() -> None:
    template = ("{% for m in messages %}[{{ loop.length }}]{{ m['content'] }}{% endfor %}"
                "{% if add_generation_prompt %}=>{% endif %}")
    with pytest.raises(DataError, match=r"renders a prompt differently.*: '1\]a=>' without it, '2\]a.*' with it"):
        encoder(template=template).encode({"prompt": question("a"), "completion": "b"})


def test_a_template_whose_turns_do_not_end_gets_the_end_token() -> None:
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    found = encoder(template=template).encode({"prompt": question("a"), "completion": "b"})
    assert isinstance(found, Example)
    assert encoder().tokenizer.decode(found.completion_ids) == "b\n<|im_end|>"
