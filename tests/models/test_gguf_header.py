"""Headers of GGUF files that strangers made: refused by what they state, before it is read or reserved."""

import struct
from pathlib import Path
from typing import Any

import pytest

from lowmem_grpo.models.gguf_header import gguf_header

U8, U32, U64, TEXT, ARRAY = 0, 4, 10, 8, 9
GIB = 2**30


def text(value: str, length: int | None = None) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def setting(name: str, kind: int, *parts: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + b"".join(parts)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


def tensor(name: str, *shape: int, kind: int = 0, start: int = 0, dimensions: int | None = None) -> bytes:
    return (text(name) + struct.pack("<I", len(shape) if dimensions is None else dimensions)
            + struct.pack(f"<{len(shape)}QIQ", *shape, kind, start))


LLAMA = setting("general.architecture", TEXT, text("llama"))
NAME = setting("general.name", TEXT)


def written(folder: Path, *entries: bytes, settings: int | None = None, tensors: int = 0) -> Path:
    """A file of 3 GiB of which only the header is stored; counts are what it states."""
    path = folder / "model.gguf"
    with path.open("wb") as file:
        count = len(entries) - tensors if settings is None else settings
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, tensors, count) + b"".join(entries))
        file.truncate(3 * GIB)
    return path


HOSTILE: dict[str, tuple[str, list[bytes], dict[str, Any]]] = {
    "texts": ("elements in arrays", [LLAMA, setting("tokens", ARRAY, array(TEXT, 2**27))], {}),
    "texts of two arrays": ("elements in arrays", [LLAMA, *(setting(name, ARRAY, array(U8, 2**21 - 1, bytes(2**21 - 1)))
                                                            for name in "ab")], {}),
    "numbers": ("elements in arrays", [LLAMA, setting("types", ARRAY, array(U8, 10**8))], {}),
    "arrays of arrays": ("not a whole GGUF file", [LLAMA, setting("types", ARRAY, array(ARRAY, 2**20))], {}),
    "numbers past 64 bits": ("elements in arrays", [LLAMA, setting("types", ARRAY, array(U64, 2**64 - 1))], {}),
    "settings": ("67,108,864 settings", [LLAMA], {"settings": 2**26}),
    "tensors": ("33,554,432 tensors", [LLAMA], {"tensors": 2**25, "settings": 1}),
    "tensors below": ("1,000,000 tensors", [LLAMA], {"tensors": 10**6, "settings": 1}),
    "dimensions": ("dimensions of a tensor", [LLAMA, tensor("a", 1, dimensions=10**8)], {"tensors": 1}),
    "five dimensions": ("5 dimensions", [LLAMA, tensor("a", 1, 1, 1, 1, 1)], {"tensors": 1}),
    "a text": ("bytes in a text", [LLAMA, NAME + text("", 900_000_000)], {}),
    "a name": ("bytes in a text", [LLAMA, text("", 2**20)], {}),
    "texts together": ("bytes of texts", [LLAMA, *(setting(f"n{number}", TEXT, text("", 2**25)) + bytes(2**25)
                                                   for number in range(3))], {}),
    "twice": ("stands twice", [LLAMA, LLAMA], {}),
    "a tensor twice": ("stands twice", [LLAMA, tensor("a", 32), tensor("a", 32)], {"tensors": 2}),
    "alignment of two numbers": ("general.alignment is (1, 2)", [
        LLAMA, setting("general.alignment", ARRAY, array(U8, 2, b"\1\2"))], {}),
    "an alignment of texts": ("general.alignment is 'an array of 1 texts'", [
        LLAMA, setting("general.alignment", ARRAY, array(TEXT, 1, text("32")))], {}),
    "no alignment": ("general.alignment is 0", [LLAMA, setting("general.alignment", U32, bytes(4))], {}),
    "an alignment of text": ("general.alignment is '32'", [LLAMA, setting("general.alignment", TEXT, text("32"))], {}),
    "a tensor behind the end": ("ends before the weights of a", [LLAMA, tensor("a", 32, start=2**63)], {"tensors": 1}),
    "an unknown type of setting": ("x cannot be read: it has the type 77", [LLAMA, setting("x", 77)], {}),
    "an unknown type of array": ("x cannot be read: it has the type 7", [LLAMA, setting("x", ARRAY, array(77, 2))], {}),
    "an alignment of 3": ("general.alignment is 3;", [LLAMA, setting("general.alignment", U32, b"\3\0\0\0")], {}),
    "a long alignment": ("general.alignment is 'xxx", [
        LLAMA, setting("general.alignment", TEXT, text("x" * 10**6))], {}),
    "bytes that are no text": ("general.name cannot be read: 'utf-8'", [
        LLAMA, NAME + struct.pack("<Q", 10**6) + b"\xff" * 10**6], {}),
    "an architecture of two lines": ("general.architecture is 'a\\nb'", [
        setting("general.architecture", TEXT, text("a\nb"))], {}),
    "no architecture": ("general.architecture is None", [NAME + text("a")], {}),
    "a setting of two lines": ("name 'a\\nb'", [LLAMA, setting("a\nb", U32, bytes(4))], {}),
    "a tensor of two lines": ("name 'a\\nb'", [LLAMA, tensor("a\nb", 32)], {"tensors": 1}),
    "a text past 64 bits": ("x cannot be read", [LLAMA, setting("x", ARRAY, array(TEXT, 3, text("", 2**64 - 1)))], {}),
    "no dimensions": ("a cannot be read: it has the shape ()", [LLAMA, tensor("a")], {"tensors": 1}),
    "no weights": ("a cannot be read: it has the shape (9223372036854775808, 0)", [
        LLAMA, tensor("a", 0, 2**63)], {"tensors": 1}),
    "half blocks": ("a has rows of 33 weights, in blocks of 32", [LLAMA, tensor("a", 33, 2, kind=8)], {"tensors": 1}),
    "one over another": ("the weights of b begin within those of a", [
        LLAMA, tensor("a", 32), tensor("b", 32, start=96)], {"tensors": 2}),
    "two at one place": ("begin within those of", [LLAMA, tensor("a", 32), tensor("b", 32)], {"tensors": 2}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_header_that_states_more_than_a_model_has_is_refused_before_it_is_read(what: str, tmp_path: Path) -> None:
    words, entries, counts = HOSTILE[what]
    with pytest.raises(ValueError) as refused:
        gguf_header(written(tmp_path, *entries, **counts))
    assert words in str(refused.value) and "model.gguf" in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_the_largest_tokenizers_and_long_templates_are_read(tmp_path: Path) -> None:
    """262,144 tokens, their types and scores, 600,000 merges and a template of 1 MB."""
    merges, tokens = 600_000, 262_144
    header = gguf_header(written(
        tmp_path, LLAMA, setting("tokenizer.ggml.merges", ARRAY, array(TEXT, merges, text("a b") * merges)),
        setting("tokenizer.ggml.tokens", ARRAY, array(TEXT, tokens, text("token") * tokens)),
        setting("tokenizer.ggml.token_type", ARRAY, array(U32, tokens, bytes(4 * tokens))),
        setting("tokenizer.chat_template", TEXT, text("x" * 2**20)),
        setting("general.alignment", U32, struct.pack("<I", 64)), tensor("a", 64, 2), tensors=1))
    assert header.settings["tokenizer.ggml.merges"] == f"an array of {merges:,} texts"
    assert header.settings["tokenizer.ggml.token_type"] == f"an array of {tokens:,} numbers"
    assert header.places["a"].shape == (2, 64) and header.places["a"].start % 64 == 0
