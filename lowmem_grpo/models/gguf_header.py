"""Read the header of a GGUF file: its settings, and where its tensors are. No torch is needed, and no array of a
tokenizer is kept, so that a file that cannot be read is refused at once."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of the format
TEXT, ARRAY, MOST_NUMBERS = 8, 9, 1024
LENGTH = struct.Struct("<Q")
MOST_DIMENSIONS, MOST_NAME = 4, 65535  # of the format
MOST_ENTRIES = 2**14  # settings, or tensors; published files have about 60, and 2,000
MOST_ELEMENTS = 2**21  # of all arrays; a tokenizer has up to 1.3 million, of which transformers reads 45,000 a second
MOST_BYTES = 2**26  # of all texts that are in no array
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
            bounded(tensors, MOST_ENTRIES, "tensors")
            settings = cursor.entries(count, "settings", lambda: cursor.value(*cursor.take("I")))
            stored = cursor.entries(tensors, "tensors", cursor.tensor)
        unit, kind = settings.get("general.alignment", 32), settings.get("general.architecture")
        if not isinstance(kind, str) or not kind.isprintable():
            raise ValueError(f"general.architecture is {kind!r:.80}; a name is needed")
        if not isinstance(unit, int) or unit < 1 or unit & (unit - 1):
            raise ValueError(f"general.alignment is {unit!r:.80}; a number of bytes is needed, 1 or a power of 2")
        first = -(-cursor.at // unit) * unit
        header = GGUFHeader(path, settings, {name: TensorPlace(shape[::-1], number, first + start)
                                             for name, (shape, number, start) in stored.items()})
        check_places(header.places, size)
    except NotImplementedError as error:
        raise ValueError(f"{path}: {error}") from error
    except (struct.error, ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from error
    return header


def check_places(places: dict[str, TensorPlace], size: int) -> None:
    """Raise ValueError for a tensor of half blocks, behind the end of the file, or over another tensor."""
    for name, place in places.items():
        if place.shape[-1] % (block := type_of(place.number)[1]):
            raise ValueError(f"{name:.80} has rows of {place.shape[-1]} weights, in blocks of {block}")
        if place.end > size:
            raise ValueError(f"it ends before the weights of {name:.80}")
    for before, name in pairwise(sorted(places, key=lambda each: places[each].start)):
        if places[before].end > places[name].start:
            raise ValueError(f"the weights of {name:.80} begin within those of {before:.80}")


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


def bounded(count: int, most: int, what: str) -> int:
    """Return a count that a file states. ValueError, before anything is read for it, if there are more than `most`."""
    if count > most:
        raise ValueError(f"it has {count:,} {what}; at most {most:,} are read")
    return count


class Cursor:
    """A place in a mapped file, from which values are read one after the other; struct.error at the file's end,
    ValueError for more of them than a model has."""

    def __init__(self, mapped: mmap) -> None:
        self.mapped, self.at = mapped, 0
        self.elements = self.bytes = 0  # of arrays and of texts, read so far

    def take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.mapped, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def text(self, most: int = MOST_BYTES) -> str:
        length = bounded(self.take("Q")[0], most, "bytes in a text")
        self.bytes = bounded(self.bytes + length, MOST_BYTES, "bytes of texts")
        return str(self.take(f"{length}s")[0].decode())

    def entries(self, count: int, what: str, read: Callable[[], Any]) -> dict[str, Any]:
        """Return settings or tensors by their names. ValueError, with the name, for one that cannot be read."""
        found: dict[str, Any] = {}
        for _ in range(bounded(count, MOST_ENTRIES, what)):
            name = self.text(MOST_NAME)
            if name in found or not name.isprintable():
                raise ValueError(f"the name {name!r:.80} among its {what} stands twice, or is no line of text")
            try:
                found[name] = read()
            except (struct.error, ValueError, ArithmeticError) as error:
                raise ValueError(f"{name:.80} cannot be read: {error}") from error
        return found

    def number_form(self, kind: int) -> str:
        """Return the form of a number for `struct`. ValueError for another type."""
        if kind not in NUMBERS:
            raise ValueError(f"it has the type {kind}, which is not read here")
        return NUMBERS[kind]

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Return a tensor's shape, the number of its type, and its start behind the header."""
        shape = self.take(f"{bounded(self.take('I')[0], MOST_DIMENSIONS, 'dimensions of a tensor')}Q")
        if not shape or not all(shape):
            raise ValueError(f"it has the shape {shape[::-1]}; a number of weights is needed")
        return shape, *self.take("IQ")

    def value(self, kind: int) -> Any:
        """Return a setting. An array of texts or of many numbers, which only tokenizers have, is told in words."""
        if kind != ARRAY:
            return self.text() if kind == TEXT else self.take(self.number_form(kind))[0]
        inner, count = self.take("IQ")
        self.elements = bounded(self.elements + count, MOST_ELEMENTS, "elements in arrays")
        if inner != TEXT:
            if count <= MOST_NUMBERS:
                return self.take(f"{count}{self.number_form(inner)}")
            self.at += count * struct.calcsize(f"<{self.number_form(inner)}")
            return f"an array of {count:,} numbers"
        for _ in range(count):
            self.at += LENGTH.size + LENGTH.unpack_from(self.mapped, self.at)[0]
        return f"an array of {count:,} texts"
