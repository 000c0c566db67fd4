"""The bench that counts launches of a token in a decoder layer: what it counts, and the bound that CI holds."""

from typing import Any

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bench, as its own folder imports it."""
    monkeypatch.syspath_prepend("bench")
    from bench.launches import decode as decode_launches

    return decode_launches


def test_a_token_of_a_4_bit_layer_costs_at_most_16_launches_of_which_two_a_linear_layer_are_ours(bench: Any) -> None:
    parts = bench.breakdown()
    assert bench.count_decode_launches() == sum(parts.values()) <= 16
    assert {name: parts[name] for name in bench.LAYERS} == dict.fromkeys(bench.LAYERS, 2)
    assert all(dict(counts) == {"mm": 1, "nf4_decode": 1} for counts in bench.counted().values())


def test_dequantized_weights_take_plain_products_and_neither_cast_nor_join(bench: Any) -> None:
    counts = bench.counted(wide=True)
    assert {name: sum(found.values()) for name, found in counts.items()} == {
        "qkv": 5, "o": 3, "gate_up": 4, "down": 3}
    assert {operation for found in counts.values() for operation in found} == {"mm", "addmm", "addmm_"}
