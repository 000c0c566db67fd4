"""What tests of preflight share: one model, and its tokenizer, which each test leaves as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
from trainer_runs import load


@pytest.fixture(scope="module")
def shared() -> Any:
    """A model for trainers that only look; what they change of it, they change back."""
    return load()


@pytest.fixture
def tokenizer(shared: Any) -> Iterator[Any]:
    """Its tokenizer, as it was afterwards."""
    found = shared.loaded.tokenizer
    names = ("chat_template", "eos_token", "pad_token", "bos_token")
    before = {name: getattr(found, name) for name in names}
    yield found
    for name, value in before.items():
        setattr(found, name, value)
