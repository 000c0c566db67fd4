"""Numbers of conversations: an engine must never take one conversation, or one set of weights, for another."""

from pathlib import Path

import pytest

from lowmem_grpo.config.sampling import SamplingParams
from lowmem_grpo.service import sitting
from lowmem_grpo.service.call import LIVE, Call
from lowmem_grpo.service.sitting import Keys


def call(key: int | None, adapter: Path | str | None = LIVE) -> Call:
    return Call([1], SamplingParams(), adapter, key)


def test_only_the_same_conversation_with_the_same_weights_has_its_number_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known, saved = Keys(), Path("saved")
    asked = [(call(1), 0), (call(2), 0), (call(1, None), 0), (call(1, saved), 0), (call(1, saved), 1), (call(None), 0),
             (call(None), 0)]
    first = [known.of(*one) for one in asked]
    assert len(set(first)) == len(asked)
    again = [known.of(one, 0) for one, _ in asked]
    assert again[:4] == first[:4] and not set(again[5:]) & set(first)
    monkeypatch.setattr(sitting, "MOST", 3)
    for number in range(10, 16):
        known.of(call(number), 0)
    assert len(known.known) <= 5 and known.of(call(1), 0) not in first
