"""Prompts that stand in a dataset more than once: as many rows as a moment allows, in blocks of neighbours."""

import time
from collections.abc import Iterator
from typing import Any

from lowmem_grpo.preflight.rows import spread

BLOCK = 64  # neighbours: copies of a prompt often stand side by side
SECONDS = 0.3  # after which no further row is looked at, once there is a block of them


def count_repeats(dataset: Any) -> tuple[int, int]:
    """(rows whose prompt an earlier one has, rows compared): the whole dataset where there is time for it, else blocks
    that are spread over it. A row without a prompt, or that cannot be read, is none."""
    known: set[int] = set()
    seen, began = 0, time.monotonic()
    for index in in_blocks(len(dataset)):
        if prompt := prompt_of(dataset, index):
            known.add(hash(repr(prompt)))
            seen += 1
        if seen >= BLOCK and time.monotonic() - began > SECONDS:
            break
    return seen - len(known), seen


def in_blocks(total: int) -> Iterator[int]:
    """All rows, block after block, in an order whose beginnings are spread over the dataset."""
    for place in spread(-(-total // BLOCK)):
        yield from range(place * BLOCK, min((place + 1) * BLOCK, total))


def prompt_of(dataset: Any, index: int) -> Any:
    """A row's prompt; None for a row that is broken."""
    try:
        return dataset[index]["prompt"]
    except Exception:  # noqa: BLE001 - a row may raise anything; that it is broken, the check of rows says
        return None
