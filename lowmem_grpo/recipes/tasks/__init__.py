"""Problems and games that several recipes share, and the mails of the recipe `inbox`. Problems are drawn without
repetition, and a hash of their text splits them into training and test problems."""

import random
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

SPLITS = ("train", "test")
TEST_SHARE = 8  # one problem in eight is a test problem
FRUITLESS = 20_000

T = TypeVar("T")


def split_of(text: str) -> str:
    """Return "test" or "train", by a hash of the text that identifies a problem."""
    return "test" if zlib.crc32(text.encode()) % TEST_SHARE == 0 else "train"


def check_split(split: str) -> None:
    """Raise ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f'split is {split!r}; allowed are "train" and "test"')


def distinct(
    split: str, seed: int, draw: Callable[[random.Random], T | None], text: Callable[[T], str],
    fruitless: int = FRUITLESS,
) -> Iterator[T]:
    """Yield different problems of one split, drawn with a seed; `text` identifies a problem, and `draw` may return
    None. ValueError if `fruitless` draws in a row give no new problem."""
    check_split(split)
    rng = random.Random(f"{split}-{seed}")
    seen: set[str] = set()
    last = 0
    while last < fruitless:
        last += 1
        if (problem := draw(rng)) is not None and (key := text(problem)) not in seen and split_of(key) == split:
            last = 0
            seen.add(key)
            yield problem
    raise ValueError(f"there are only {len(seen)} different {split} problems; ask for fewer")


def take(problems: Iterator[T], size: int) -> list[T]:
    """Return the first `size` problems. Raises ValueError for a size below 1."""
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    return list(islice(problems, size))
