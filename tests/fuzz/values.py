"""Odd values of every kind of field, boundary numbers first."""

import math
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

LONG = 100_000  # of a huge string or byte string
MANY = 1_000  # times that an element is repeated

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), -1, 0, 1, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), -(2**31), -1, 0, 1, 2**31, 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2, 15, 16, 17, 255, 256, 511, 512, 2**16, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), -1, 0, 1, 2, 3, 99, 2**31 - 1),
}
_FLOATS = (0.0, -0.0, 1e-38, -1e-38, 0.5, 1.0, 1.0000001, 2.0, 2.1, -2.0, 1e38, -1e38, math.nan, math.inf, -math.inf)
_TEXTS = (
    "",
    "a",
    "\0",
    "\n\r\t",
    "é🙂\u202e\u2028",
    "\ufffe\uffff",
    "../../../etc/passwd",
    "%s%n%x",
    "{{ 7 * 7 }}{% for %}",
    "<|image_pad|>",
    "<image><|vision_start|>",
    "127.0.0.1:1",
    "unix:///nothing",
    "x" * 300,
)


def text(rng: Random) -> str:
    return (
        rng.choice((*_TEXTS, "é" * LONG))
        if rng.random() < 0.9
        else "".join(map(chr, rng.choices(range(1, 0xD7FF), k=20)))
    )


def data(rng: Random) -> bytes:
    size = rng.choice((0, 1, 15, 16, 16, 17, 31, 32, 32, 33, 300, LONG))
    return rng.randbytes(size) if size < LONG else b"\xff" * LONG


def scalar(rng: Random, field: FieldDescriptor) -> Any:
    """A value that protobuf takes for the field, however wrong."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_STRING:
        return data(rng) if field.type == FieldDescriptor.TYPE_BYTES else text(rng)
    values = _INTEGERS[kind]
    return rng.choice(values) if rng.random() < 0.8 else rng.randint(values[0], values[-1])
