"""Bodies of forward_backward that nobody expects: an error that names what is wrong, and no other gradient touched."""

import struct

import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker_server import OTHER, OWNER, Server, body
from torch import Tensor

from lowmem_grpo.server.tinker import wire
from lowmem_grpo.server.tinker.datum import as_bytes

FUZZ = settings(max_examples=40, derandomize=True, deadline=None, database=None,
                suppress_health_check=list(HealthCheck))
DATA = st.binary(max_size=40)
NUMBERS = st.one_of(st.integers(-3, 9), st.sampled_from([2**31 - 1, -(2**31)]))
SHAPES = st.lists(st.one_of(st.integers(-2, 8), st.sampled_from([2**40, 2**62])), max_size=3)


@pytest.fixture(scope="module")
def models(one_server: Server) -> tuple[str, str]:
    """Create a model that is fuzzed, and another user's model with a gradient."""
    mine, theirs = one_server.create(), one_server.create(key=OTHER)
    one_server.wait(one_server.post("forward_backward", body(theirs, 1, 1), OTHER).json(), OTHER)
    return mine, theirs


def gradients(server: Server, model: str) -> list[Tensor]:
    held = server.model.training.adapters.held[model]
    return [one.grad.clone() for one in held.parameters.values() if one.grad is not None]


def told(server: Server, content: bytes, **headers: str) -> str:
    """Return the error that a client gets for a body, in its promise or at once; "" if there is none."""
    reply = server.post("forward_backward", content, OWNER, **headers)
    assert reply.status_code in (200, 404, 422), reply.text
    if reply.status_code != 200:
        return str(reply.json()["error"]["message"])
    kept = server.wait(reply.json())
    assert kept.status_code == 200
    return "" if kept.headers["content-type"] == wire.PROTOBUF else str(kept.json()["error"])


@given(st.integers(0, 300), st.integers(0, 255))
@FUZZ
@pytest.mark.slow
def test_a_body_that_is_cut_off_or_has_a_wrong_byte_touches_no_other_model(
    one_server: Server, models: tuple[str, str], place: int, byte: int
) -> None:
    mine, theirs = models
    before = gradients(one_server, theirs)
    whole = body(mine, one_server.model.training.store.model(mine).done + 1, place)
    place %= len(whole)
    for wrong in (whole[:place], whole[:place] + bytes([byte]) + whole[place + 1:]):
        said = told(one_server, wrong)
        assert "Traceback" not in said and "server, whose log" not in said
    after = gradients(one_server, theirs)
    assert before and all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert one_server.model.training.store.model(theirs).done == 1


@given(name=st.sampled_from(["target_tokens", "weights", "advantages", "x", ""]), dtype=NUMBERS, shape=SHAPES,
       dense=DATA, sparse=st.booleans(), tokens=DATA, forward_only=st.booleans(),
       loss=st.sampled_from(["cross_entropy", "ppo", "gspo", "custom", "\0", ""]))
@FUZZ
def test_a_wrong_tensor_fails_its_promise_with_the_field(
    one_server: Server, models: tuple[str, str], name: str, dtype: int, shape: list[int], dense: bytes, sparse: bool,
    tokens: bytes, loss: str, forward_only: bool,
) -> None:
    request = wire.ForwardBackwardRequest(model_id=models[0], loss_fn=loss, forward_only=forward_only,
                                          seq_id=one_server.model.training.store.model(models[0]).done + 1)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = tokens
    good = as_bytes(torch.ones(len(tokens) // 4))
    for other in ("target_tokens", "weights", "logprobs", "advantages", "sequence_ratio_mask"):
        datum.loss_fn_inputs[other].dense, datum.loss_fn_inputs[other].dtype = good, wire.FLOAT32
    datum.loss_fn_inputs["target_tokens"].dense = as_bytes(torch.ones(len(tokens) // 4, dtype=torch.int32))
    datum.loss_fn_inputs["target_tokens"].dtype = wire.INT32
    tensor = datum.loss_fn_inputs[name]
    tensor.dtype = dtype
    tensor.shape.extend(shape)
    if sparse:
        tensor.sparse_csr.values, tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = dense, tokens, dense
    else:
        tensor.dense = dense
    said = told(one_server, request.SerializeToString())
    assert not said or any(word in said for word in ("data[0]", "loss_fn", "not finite", "is NaN")), said


@pytest.mark.parametrize("claimed", [None, 10, 2**40])
def test_zstd_that_grows_too_large_is_stopped_and_named(one_server: Server, claimed: int | None) -> None:
    packed = bytearray(zstandard.ZstdCompressor().compress(bytes(200_000_000)))
    if claimed is not None:  # the frame's own word for its size: 4 bytes behind magic and descriptor
        packed[5:9] = struct.pack("<I", claimed % 2**32)
    said = told(one_server, bytes(packed), **{"Content-Encoding": "zstd"})
    assert "the body grows to more than 67108864 bytes" in said or "zstd" in said
