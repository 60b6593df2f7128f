"""Tensors of the open inference protocol from and to plain lists, typed or raw."""

import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import InvalidArgument
from epd.inference import inference_pb2 as pb

BYTES = "BYTES"
MAX_DIMENSIONS = 8
MAX_INPUTS = 64
MAX_ELEMENTS = 2**20  # of a tensor: far above any context, and few enough to be unpacked at once
_LENGTH = struct.Struct("<I")  # in front of each element of a raw BYTES tensor


class _Kind(msgspec.Struct, frozen=True):
    """contents: field of InferTensorContents, "" for what comes raw only. code: of struct, for one raw element."""

    contents: str
    code: str = ""
    low: int | None = None
    high: int | None = None


_KINDS = {
    "BOOL": _Kind("bool_contents", "?"),
    "INT8": _Kind("int_contents", "b", -(2**7), 2**7 - 1),
    "INT16": _Kind("int_contents", "h", -(2**15), 2**15 - 1),
    "INT32": _Kind("int_contents", "i"),
    "INT64": _Kind("int64_contents", "q"),
    "UINT8": _Kind("uint_contents", "B", 0, 2**8 - 1),
    "UINT16": _Kind("uint_contents", "H", 0, 2**16 - 1),
    "UINT32": _Kind("uint_contents", "I"),
    "UINT64": _Kind("uint64_contents", "Q"),
    "FP16": _Kind("", "e"),
    "FP32": _Kind("fp32_contents", "f"),
    "FP64": _Kind("fp64_contents", "d"),
    BYTES: _Kind("bytes_contents"),
}
INTEGERS = frozenset(name for name in _KINDS if "INT" in name)


class Tensor(msgspec.Struct, frozen=True):
    """values: elements row by row; bytes for BYTES, bool, int or float for others."""

    name: str
    datatype: str
    values: list[Any]


def read_inputs(request: pb.ModelInferRequest) -> list[Tensor]:
    """A request's inputs. Raises InvalidArgument naming the tensor that contradicts itself."""
    raw: Sequence[bytes | None] = request.raw_input_contents
    if len(request.inputs) > MAX_INPUTS:
        raise InvalidArgument(f"there are {len(request.inputs)} inputs; at most {MAX_INPUTS}", field="inputs")
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgument(
            f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs", field="raw_input_contents"
        )
    found = [_read(each, data) for each, data in zip(request.inputs, raw or [None] * len(request.inputs), strict=True)]
    names = [tensor.name for tensor in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument("an input is there twice", field=name)
    return found


def write_outputs(response: pb.ModelInferResponse, tensors: Sequence[Tensor], *, raw: bool) -> None:
    """Adds tensors of one dimension."""
    for tensor in tensors:
        kind = _KINDS[tensor.datatype]
        added = response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[len(tensor.values)])
        if not raw:
            getattr(added.contents, kind.contents).extend(tensor.values)
        elif tensor.datatype == BYTES:
            response.raw_output_contents.append(b"".join(_LENGTH.pack(len(each)) + each for each in tensor.values))
        else:
            response.raw_output_contents.append(struct.pack(f"<{len(tensor.values)}{kind.code}", *tensor.values))


def _read(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    name = tensor.name
    kind = _KINDS.get(tensor.datatype)
    if kind is None:
        raise InvalidArgument(f"datatype must be one of {', '.join(_KINDS)}", field=name)
    if len(tensor.shape) > MAX_DIMENSIONS or any(size < 0 for size in tensor.shape):
        raise InvalidArgument(f"shape must have at most {MAX_DIMENSIONS} dimensions, none negative", field=name)
    count = math.prod(tensor.shape)
    if count > MAX_ELEMENTS:
        raise InvalidArgument(f"a tensor must have at most {MAX_ELEMENTS} elements", field=name)
    if raw is None:
        values = list(getattr(tensor.contents, kind.contents)) if kind.contents else []
        if any(len(held) for field, held in tensor.contents.ListFields() if field.name != kind.contents):
            raise InvalidArgument(f"the contents are not those of datatype {tensor.datatype}", field=name)
        if kind.low is not None and kind.high is not None and not all(kind.low <= each <= kind.high for each in values):
            raise InvalidArgument(f"a value is not of datatype {tensor.datatype}", field=name)
    elif tensor.HasField("contents"):
        raise InvalidArgument("contents and raw_input_contents exclude each other", field=name)
    else:
        values = _raw_bytes(raw, count, name) if tensor.datatype == BYTES else _raw_numbers(raw, count, kind, name)
    if len(values) != count:
        raise InvalidArgument(f"the shape is of {count} elements, there are {len(values)}", field=name)
    return Tensor(name, tensor.datatype, values)


def _raw_numbers(raw: bytes, count: int, kind: _Kind, name: str) -> list[Any]:
    elements = struct.Struct(f"<{count}{kind.code}")
    if len(raw) != elements.size:
        raise InvalidArgument(f"the shape is of {elements.size} bytes, there are {len(raw)}", field=name)
    return list(elements.unpack(raw))


def _raw_bytes(raw: bytes, count: int, name: str) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(raw):
        start = at + _LENGTH.size
        at = start + (_LENGTH.unpack_from(raw, at)[0] if start <= len(raw) else len(raw))
        if at > len(raw) or len(found) == count:
            raise InvalidArgument(f"the raw contents are not {count} elements, each behind its length", field=name)
        found.append(raw[start:at])
    return found
