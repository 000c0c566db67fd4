"""Bodies of the wire: field numbers, what is skipped, and what cannot be read."""

import random

import pytest
import zstandard
from tables import every_row

from lowmem_grpo.server.tinker import wire


def field(number: int, data: bytes) -> bytes:
    """A field of bytes, as the wire has it."""
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def test_a_request_is_read_by_the_numbers_of_its_fields() -> None:
    tensor = field(1, b"\0\0\x80\x3f") + b"\x18\x01" + field(4, b"\x01")
    datum = field(1, field(1, field(1, b"\x07\0\0\0"))) + field(2, field(1, b"weights") + field(2, tensor))
    body = (field(1, b"run") + b"\x10\x05" + field(3, datum) + field(4, b"ppo") + b"\x30\x01"
            + field(7, field(1, b"beta") + field(2, b"\x09" + b"\0" * 6 + b"\xf0\x3f")))
    request = wire.parsed(wire.ForwardBackwardRequest, body)
    assert (request.model_id, request.seq_id, request.loss_fn, request.forward_only) == ("run", 5, "ppo", True)
    assert request.loss_fn_config_v2["beta"].number == 1.0
    [given] = request.data
    assert given.model_input[0].encoded_text.tokens == b"\x07\0\0\0"
    assert given.loss_fn_inputs["weights"].dense == b"\0\0\x80\x3f"
    assert (given.loss_fn_inputs["weights"].dtype, list(given.loss_fn_inputs["weights"].shape)) == (wire.FLOAT32, [1])


def test_fields_of_a_newer_client_are_skipped() -> None:
    request = wire.parsed(wire.ForwardBackwardRequest, field(1, b"run") + field(15, b"news") + field(4, b"ppo"))
    assert (request.model_id, request.loss_fn) == ("run", "ppo")


@pytest.mark.parametrize("body", [
    field(1, b"run")[:-1], b"\xff" * 40, field(1, b"\xff\xfe"), b"\x0a\xff\xff\xff\xff\x07",
])
def test_a_body_that_is_no_request_is_told_as_such(body: bytes) -> None:
    with pytest.raises(wire.BodyError, match="is no ForwardBackwardRequest"):
        wire.parsed(wire.ForwardBackwardRequest, body)


def test_a_compressed_body_grows_to_its_cap_and_no_further() -> None:
    packed = zstandard.ZstdCompressor().compress(b"\0" * 4096)
    assert wire.plain(packed, "zstd", 4096) == wire.plain(b"\0" * 4096, "") == b"\0" * 4096
    with pytest.raises(wire.BodyError, match="more than 4095 bytes"):
        wire.plain(packed, "zstd", 4095)


@every_row(("body", "encoding", "told"), [
    (b"plain", "zstd", "no zstd"), (b"plain", "br", "'br'"),
    (zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * 4096), "zstd", "compress it in one piece"),
])
def test_what_is_no_zstd_of_known_size_is_refused_with_what_to_do(body: bytes, encoding: str, told: str) -> None:
    with pytest.raises(wire.BodyError, match=told):
        wire.plain(body, encoding)


@every_row("kept", [0, 3, 10, 1000, 150_000, -1])
def test_a_compressed_body_that_was_cut_off_is_refused(kept: int) -> None:
    """A reader of zstd returns what it has without an error, which could be a call with fewer datums."""
    packed = zstandard.ZstdCompressor().compress(random.Random(0).randbytes(300_000))
    assert len(wire.plain(packed, "zstd")) == 300_000
    with pytest.raises(wire.BodyError, match=r"cut off|no zstd"):
        wire.plain(packed[:kept], "zstd")
