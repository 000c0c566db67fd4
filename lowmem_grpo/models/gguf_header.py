"""Read the header of a GGUF file: its settings, and where its tensors are. No torch is needed, and no array of a
tokenizer is kept, so that a file that cannot be read is refused at once."""

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of the format
TEXT, ARRAY, MOST_NUMBERS = 8, 9, 1024
PACKAGE = "the package gguf, which reads GGUF files, is not installed; pip install gguf"


@dataclass(frozen=True)
class TensorPlace:
    """Says where a tensor is stored, and how."""

    shape: tuple[int, ...]  # as in torch
    number: int  # of its type
    start: int  # its first byte

    @property
    def row_bytes(self) -> int:
        _, block, size = type_of(self.number)
        return self.shape[-1] // block * size

    @property
    def end(self) -> int:
        return self.start + prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """The settings of a GGUF file, and the places of its tensors by their names."""

    path: Path
    settings: dict[str, Any]
    places: dict[str, TensorPlace]

    @property
    def architecture(self) -> str:
        return str(self.settings["general.architecture"])


def gguf_header(path: str | Path) -> GGUFHeader:
    """Return the header of a GGUF file, read once. ValueError for a file that is damaged, or is no GGUF file."""
    state = Path(path).stat()
    return read_header(Path(path), state.st_size, state.st_mtime_ns)


@lru_cache(4)
def read_header(path: Path, size: int, changed: int) -> GGUFHeader:
    """Read a file's header; `size` in bytes and `changed` in nanoseconds tell the cache that a file is another one.
    ValueError for a file that is damaged or no GGUF file."""
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as mapped:
            cursor = Cursor(mapped)
            magic, version, tensors, count = cursor.take("4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it begins with {magic!r} and version {version}; read are versions 2 and 3")
            settings = {cursor.text(): cursor.value(*cursor.take("I")) for _ in range(count)}
            stored = [(cursor.text(), cursor.take(f"{cursor.take('I')[0]}Q"), *cursor.take("IQ"))
                      for _ in range(tensors)]
        unit = int(settings.get("general.alignment", 32))
        first = -(-cursor.at // unit) * unit
        header = GGUFHeader(path, settings, {name: TensorPlace(shape[::-1], number, first + start)
                                             for name, shape, number, start in stored})
        header.architecture  # noqa: B018  (KeyError if there is none)
        if cut := next((name for name, place in header.places.items() if place.end > size), None):
            raise ValueError(f"it ends before the weights of {cut}")
    except NotImplementedError as error:
        raise ValueError(f"{path}: {error}") from error
    except (struct.error, ValueError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error!r}") from error
    return header


@cache
def type_of(number: int) -> tuple[Any, int, int]:
    """Return a type of tensors, and the weights and the bytes of its blocks. NotImplementedError for a type that the
    package gguf cannot decode."""
    try:
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise NotImplementedError(PACKAGE) from error
    kind: Any = number
    try:
        kind = GGMLQuantizationType(number)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError) as error:
        raise NotImplementedError(f"its tensors of the type {getattr(kind, 'name', kind)} cannot be decoded by the "
                                  "package gguf") from error
    return kind, *GGML_QUANT_SIZES[kind]


class Cursor:
    """A place in a mapped file, from which values are read one after the other; struct.error at the file's end."""

    def __init__(self, mapped: mmap) -> None:
        self.mapped, self.at = mapped, 0

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.mapped, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def text(self) -> str:
        return str(self.take(f"{self.take('Q')[0]}s")[0].decode())

    def value(self, kind: int) -> Any:
        """Return a setting. Of an array of texts or of many numbers, which only tokenizers have, it is the length."""
        if kind != ARRAY:
            return self.text() if kind == TEXT else self.take(NUMBERS[kind])[0]
        inner, count = self.take("IQ")
        if inner != TEXT:
            values = self.take(f"{count}{NUMBERS[inner]}")
            return values if count <= MOST_NUMBERS else count
        for _ in range(count):
            self.take(f"{self.take('Q')[0]}x")
        return count
