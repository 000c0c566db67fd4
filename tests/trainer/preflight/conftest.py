"""What tests of preflight share: one model, and its tokenizer, which each test leaves as it was."""

from collections.abc import Iterator
from typing import Any

import pytest
from trainer_runs import load

from lowmem_grpo.trainer.preflight import prompts, subject


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine as many rows are looked at as on a quick one."""
    for module in (prompts, subject):
        monkeypatch.setattr(module, "SECONDS", 600.0)


@pytest.fixture(scope="module")
def shared() -> Any:
    """A model for trainers that only look; what they change of it, they change back."""
    return load(name="tiny")


@pytest.fixture
def tokenizer(shared: Any) -> Iterator[Any]:
    """Its tokenizer; template and special tokens, and the model's own end tokens, are restored afterwards."""
    found, settings = shared.loaded.tokenizer, shared.get_base_model().generation_config
    names = ("chat_template", "eos_token", "pad_token", "bos_token")
    before, ends = {name: getattr(found, name) for name in names}, settings.eos_token_id
    yield found
    for name, value in before.items():
        setattr(found, name, value)
    settings.eos_token_id = ends
