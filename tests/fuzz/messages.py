"""Mutations of protobuf messages, by their descriptors, and of what they look like on the wire."""

from collections.abc import Iterator
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz import values

_DEEPEST = 4  # of messages made up inside each other


def mutated(rng: Random, message: Message, most: int = 4) -> bytes:
    """A valid message with up to `most` faults, serialized; sometimes its bytes are damaged as well."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(rng.randint(0, most)):
        _change(rng, changed)
    wire = changed.SerializeToString()
    if rng.random() < 0.04:  # text that is not UTF-8
        wire = wire.replace("é".encode(), b"\xff\xfe")
    return damaged(rng, wire) if rng.random() < 0.08 else wire


def damaged(rng: Random, wire: bytes) -> bytes:
    """Bits flipped, cut, doubled, spliced or replaced by noise."""
    if not wire:
        return rng.randbytes(rng.randint(1, 40))
    at = rng.randrange(len(wire))
    match rng.randrange(7):
        case 0:
            return wire[:at]
        case 1:
            return wire[:at] + bytes([wire[at] ^ (1 << rng.randrange(8))]) + wire[at + 1 :]
        case 2:
            return wire[:at] + rng.randbytes(rng.randint(1, 16)) + wire[at:]
        case 3:
            return wire + wire[at:]
        case 4:
            return wire[at:] + wire[:at]
        case 5:
            flipped = bytearray(wire)
            for _ in range(rng.randint(1, 32)):
                flipped[rng.randrange(len(flipped))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            return bytes(flipped)
        case _:
            return rng.randbytes(rng.randint(1, 200))


def _messages(message: Message) -> Iterator[Message]:
    """The message and everything inside it."""
    yield message
    for field, value in message.ListFields():
        if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
            continue
        if _is_map(field):
            continue
        for inner in value if field.is_repeated else (value,):
            yield from _messages(inner)


def _change(rng: Random, message: Message) -> None:
    """One fault somewhere."""
    target = rng.choice(list(_messages(message)))
    fields = target.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if rng.random() < 0.2:
        target.ClearField(field.name)
    elif _is_map(field):
        _fill_map(rng, target, field)
    elif field.is_repeated:
        _change_list(rng, target, field)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        invent(rng, getattr(target, field.name))
        getattr(target, field.name).SetInParent()
    else:
        setattr(target, field.name, values.scalar(rng, field))


def _change_list(rng: Random, target: Message, field: FieldDescriptor) -> None:
    items = getattr(target, field.name)
    action = rng.randrange(4)
    if action == 0 and len(items):
        del items[rng.randrange(len(items)) :]
    elif action == 1 and len(items):
        some = list(items)[: 2 if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE else 50]
        for _ in range(rng.choice((1, 2, values.MANY // len(some) + 1))):
            items.extend(some)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        invent(rng, items.add())
    elif action == 2 and len(items):
        items[rng.randrange(len(items))] = values.scalar(rng, field)
    else:
        items.extend([values.scalar(rng, field)] * rng.choice((1, 1, 3, 17)))


def _fill_map(rng: Random, target: Message, field: FieldDescriptor) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    held: Any = getattr(target, field.name)
    for _ in range(rng.choice((1, 3, 1100))):
        if value.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            invent(rng, held[values.scalar(rng, key)], _DEEPEST)
        else:
            held[values.scalar(rng, key)] = values.scalar(rng, value)


def invent(rng: Random, message: Message, depth: int = 0) -> None:
    """Fills some fields with odd values."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.5:
            continue
        if _is_map(field):
            _fill_map(rng, message, field)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth < _DEEPEST:
                inner: Any = getattr(message, field.name)
                invent(rng, inner.add() if field.is_repeated else inner, depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(values.scalar(rng, field) for _ in range(rng.randint(0, 5)))
        else:
            setattr(message, field.name, values.scalar(rng, field))


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)
