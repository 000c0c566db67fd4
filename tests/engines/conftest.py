"""Prompts that the tests of both engines sample from."""

import pytest
from transformers import PreTrainedTokenizerBase

QUESTION = "Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?"


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of different lengths, a single token among them."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    question = chat["input_ids"] if not isinstance(chat, list) else chat
    return [question, tokenizer("Start with 5.")["input_ids"], [100]]
