"""A small flood of requests at the endpoint: every call gets its own reply, token for token."""

import pytest

from bench.agents.load import flood


@pytest.mark.slow
@pytest.mark.parametrize("engine, clients, calls, turns", [("echo", 64, 320, 5), ("model", 16, 48, 3)])
def test_no_call_of_many_at_once_is_lost_or_mixed_up_and_what_is_trained_is_what_was_drawn(
    engine: str, clients: int, calls: int, turns: int,
) -> None:
    row = flood(engine, clients, calls, turns)
    assert row["errors"] == []
    wrong = {name: row[name] for name in ("lost", "mixed", "inexact", "drawn_for_nobody")}
    assert wrong == dict.fromkeys(wrong, 0)
    assert row["calls"] == calls and row["trained_tokens"] >= calls
    if engine == "echo":
        assert row["memory_ratio"] < 1.1
