"""Prompts that the tests of both engines sample from; garbage is looked for among new objects only."""

import gc
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerBase

QUESTION = "Start with 17. Add 8. Subtract 13. Multiply by 3. What is the result?"


@pytest.fixture(autouse=True)
def only_new_objects_are_collected() -> None:
    """vLLM collects garbage six times when it starts: most of its time would go to what imports have made. When an
    engine closes, all is looked at again."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def all_is_collected_in_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of different lengths, a single token among them."""
    chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    question = chat["input_ids"] if not isinstance(chat, list) else chat
    return [question, tokenizer("Start with 5.")["input_ids"], [100]]
