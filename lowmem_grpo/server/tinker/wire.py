"""The protobuf messages of the Tinker protocol, made from a table of field numbers. Unknown fields are skipped."""

import re
from typing import Any

import zstandard
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from lowmem_grpo.utils import MIB

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4  # DType
STOP, LENGTH = 0, 1  # StopReason
PROTOBUF = "application/x-protobuf"
BODY_BYTES = 64 * MIB  # the most bytes of a decompressed body
PACKAGE = "lowmem_grpo_wire"  # the classes' package; it is not sent
# NAME: number field type; `*` is a list, `<X>` a map from text to X, `|` a member of the message's oneof
TABLE = """
SampleResponse: 1 sequences SampledSequence*, 2 prompt_logprobs bytes, 3 topk_prompt_logprobs TopkLogprobs,
    4 prompt_cache_hit_tokens int32
SampledSequence: 1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes, 4 topk_sampled_logprobs TopkLogprobs
TopkLogprobs: 1 token_ids bytes, 2 logprobs bytes, 3 k uint32, 4 length uint32
SparseCsr: 1 values bytes, 2 crow_indices bytes, 3 col_indices bytes
Tensor: 1 dense bytes|, 2 sparse_csr SparseCsr|, 3 dtype int32, 4 shape int64*
BatchedTensor: 1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64*
ArrayRecord: 1 type_tag string, 2 fields <BatchedTensor>, 3 num_datums int64
ForwardBackwardOutput: 1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord*, 3 metrics <double>
ForwardBackwardRequest: 1 model_id string, 2 seq_id int32, 3 data Datum*, 4 loss_fn string, 5 loss_fn_config <double>,
    6 forward_only bool, 7 loss_fn_config_v2 <LossConfigValue>
LossConfigValue: 1 number double|, 2 text string|
Datum: 1 model_input Chunk*, 2 loss_fn_inputs <Tensor>
Chunk: 1 encoded_text EncodedTextChunk|, 2 image ImageChunk|, 3 dmel DmelChunk|
EncodedTextChunk: 1 tokens bytes
ImageChunk: 1 data bytes, 2 format string
DmelChunk: 1 dmel bytes
"""
FIELD = re.compile(r"(\d+) (\w+) (<?)(\w+)>?([*|]?)")


class BodyError(ValueError):
    """A body cannot be read at all, so that its model and number are unknown."""


def file_of(table: str) -> FileDescriptorProto:
    file = FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for line in table.strip().replace(",\n   ", ",").splitlines():
        name, fields = line.split(": ")
        message = file.message_type.add(name=name)
        for number, field, is_map, kind, mark in FIELD.findall(fields):
            if is_map:  # on the wire a list of entries
                kind, mark = f"{name}.{add_entry(message, field, kind)}", "*"
            add_field(message, int(number), field, kind, mark)
    return file


def add_field(message: DescriptorProto, number: int, name: str, kind: str, mark: str = "") -> None:
    """Add a field to a message. With the mark `*` it is repeated; with `|` it belongs to the message's single oneof."""
    field = message.field.add(name=name, number=number)
    field.label = FieldDescriptorProto.LABEL_REPEATED if mark == "*" else FieldDescriptorProto.LABEL_OPTIONAL
    if kind[0].isupper():
        field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="kind")
        field.oneof_index = 0


def add_entry(message: DescriptorProto, name: str, kind: str) -> str:
    """Add the nested protobuf message for a field `map<string, kind>`, and return the message's name."""
    entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    add_field(entry, 1, "key", "string")
    add_field(entry, 2, "value", kind)
    return entry.name


POOL = DescriptorPool()
POOL.Add(file_of(TABLE))


def message(name: str) -> type[Message]:
    return GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest: Any = message("ForwardBackwardRequest")
ForwardBackwardOutput: Any = message("ForwardBackwardOutput")
SampleResponse: Any = message("SampleResponse")


def parsed(kind: Any, body: bytes) -> Any:
    """Parse a body as a message. BodyError if it is not one."""
    try:
        return kind.FromString(body)
    except (DecodeError, UnicodeDecodeError) as error:
        raise BodyError(f"the body is no {kind.DESCRIPTOR.name}: {error}; it was cut off, or written by another "
                        "program than a Tinker client") from None


def plain(body: bytes, encoding: str, most: int = BODY_BYTES) -> bytes:
    """Decompress a body. BodyError if its frame announces more than `most` bytes (nothing is decompressed then) or no
    size, if it was cut off, or if the encoding is unknown."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise BodyError(f"Content-Encoding is {encoding!r}; zstd is taken, or none")
    try:
        told = zstandard.frame_content_size(body)
        if told > most:
            raise BodyError(f"the body grows to more than {most} bytes, which is the most that is taken: send fewer "
                            "datums in a call")
        if told < 1:  # such a frame is read without an error where it was cut off
            raise BodyError("the body's zstd frame does not tell its size; compress it in one piece")
        return zstandard.ZstdDecompressor().decompress(body)
    except zstandard.ZstdError as error:
        raise BodyError(f"the body is no zstd, or was cut off: {error}") from None
