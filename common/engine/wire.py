"""Frames between a service and its engine: a length, then a msgpack array of commands or events."""

import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from common.cache.keys import EmbeddingLayout, KvLayout
from common.engine.messages import AnyCommand, AnyEvent
from common.engine.settings import EngineSettings

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 2**30
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class Launch(msgspec.Struct, frozen=True):
    """First frame on the socket, JSON: all that an engine process is told.

    embedding_layout: of the image embeddings that the model takes; None when it takes no images.
    """

    settings: EngineSettings
    layout: KvLayout
    embedding_layout: EmbeddingLayout | None = None

    def encode(self) -> bytes:
        return frame(msgspec.json.encode(self))


def frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def read_frame(sock: socket.socket) -> bytes:
    """One whole frame's body, blocking. Raises SystemExit when the other side is gone: there is nothing to do then."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    return _exactly(sock, length)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise SystemExit("the service is gone")
        data += part
    return data


def encode(messages: Sequence[msgspec.Struct]) -> bytes:
    return frame(_encoder.encode(messages))


class FrameReader(Generic[T]):
    """Takes bytes as they come, gives whole messages. Raises ValueError for what is no frame."""

    def __init__(self, kind: type[list[T]]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield from self._decoder.decode(body)


def command_reader() -> FrameReader[AnyCommand]:
    return FrameReader(list[AnyCommand])


def event_reader() -> FrameReader[AnyEvent]:
    return FrameReader(list[AnyEvent])
