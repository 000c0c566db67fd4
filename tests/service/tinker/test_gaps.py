"""How long a model's next request is waited for, when a later one is there."""

from types import SimpleNamespace

import pytest

from lowmem_grpo.service.tinker import gaps


def test_each_missing_request_has_its_own_time_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gaps, "time", SimpleNamespace(monotonic=lambda: now[0]))
    waiting = gaps.Gaps()
    assert not waiting.is_over("model", "user", 3)
    now[0] += gaps.GAP - 1
    assert not waiting.is_over("model", "user", 3)
    assert not waiting.is_over("model", "user", 4), "3 came, and 4 is missing from now on"
    now[0] += gaps.GAP - 1
    assert not waiting.is_over("model", "user", 4)
    now[0] += 1
    assert waiting.is_over("model", "user", 4)
    assert not waiting.is_over("model", "user", 4), "it is given up once"
