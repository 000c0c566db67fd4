"""Bytes and seconds in words."""

from tables import every_row

from lowmem_grpo.units import GIB, MIB, size_text, time_text


@every_row(("count", "text"), [
    (0, "0.0 MiB"), (2**16, "0.1 MiB"), (300 * MIB, "300.0 MiB"), (GIB, "1.00 GiB"), (79.25 * GIB, "79.25 GiB"),
])
def test_bytes_in_words(count: float, text: str) -> None:
    assert size_text(count) == text


@every_row(("seconds", "text"), [
    (0, "0 s"), (0.0312, "0.031 s"), (4.26, "4.3 s"), (42.4, "42 s"), (61.7, "1 min 2 s"), (754, "12 min 34 s"),
    (3725, "1 h 2 min"), (359_999, "99 h 59 min"),
])
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
