"""How a transfer's bytes travel: one interface, a channel chosen for each pair of workers."""

import asyncio
import zlib
from collections.abc import Awaitable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from common.errors import TransferFailed
from common.policies.handoff.terms import Span
from common.transfer.pool_memory import PoolMemory

MAX_PIECE_BYTES = 1 << 20
T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


class Channel(Protocol):
    """Reads blocks of one transfer into the reader's own pool."""

    name: str
    encrypted: bool  # what it carries can be read by its two ends alone, in a mesh with TLS

    async def read(self, spans: Sequence[Span]) -> int:
        """Copies the spans; returns how many bytes. Raises TransferFailed when a check fails.

        However it ends, cancelled included, nothing writes to the pool any more afterwards.
        """
        ...


class BlockMap(msgspec.Struct, frozen=True):
    """Blocks of one transfer in prompt order: the owner's ids and announced generations, and the reader's ids."""

    source: tuple[int, ...]
    generations: tuple[int, ...]
    target: tuple[int, ...]


class RateLimit:
    """A link of so many bytes per second, shared by all who take from it. Waits without blocking the loop."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1 / bytes_per_second
        self._free_at = 0.0

    def bytes_in(self, seconds: float) -> int:
        return max(1, int(seconds / self._seconds_per_byte))

    async def take(self, count: int) -> None:
        """Returns when `count` bytes have passed the link."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + count * self._seconds_per_byte
        await asyncio.sleep(self._free_at - now)


async def settled(work: Awaitable[T]) -> T:
    """Awaits what cannot be stopped, such as a copy in a thread: cancelled meanwhile, it still waits for its end."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        if not future.cancelled():
            future.exception()  # retrieved: the cancellation is what counts
        raise cancelled
    return future.result()


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(index, first id, count) of every stretch of consecutive block ids."""
    begin = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield begin, blocks[begin], index - begin
            begin = index


def strips(pool: PoolMemory, blocks: Sequence[int], span: Span) -> Iterator[Bytes]:
    """The span's bytes in order (layer, then block), as flat views of the pool: uint8 [n]."""
    chosen = blocks[span.first_block : span.first_block + span.block_count]
    for layer in range(span.first_layer, span.first_layer + span.layer_count):
        for _, first, count in runs(chosen):
            yield pool.data[layer, first : first + count].reshape(-1)


def pieces(pool: PoolMemory, blocks: Sequence[int], span: Span, limit: int = MAX_PIECE_BYTES) -> Iterator[list[Bytes]]:
    """The strips of a span cut and grouped to pieces of at most `limit` bytes."""
    piece: list[Bytes] = []
    room = limit
    for strip in strips(pool, blocks, span):
        start = 0
        while start < len(strip):
            part = strip[start : start + room]
            piece.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece


def split(span: Span, unit_bytes: int, limit: int) -> Iterator[Span]:
    """Spans of at most `limit` bytes, though of one block in one layer at least: whole layers, or parts of one."""
    most = max(1, limit // unit_bytes)
    if span.block_count > most:
        for layer in range(span.first_layer, span.first_layer + span.layer_count):
            for start in range(0, span.block_count, most):
                yield Span(layer, 1, span.first_block + start, min(most, span.block_count - start))
        return
    layers = most // span.block_count
    for start in range(0, span.layer_count, layers):
        count = min(layers, span.layer_count - start)
        yield Span(span.first_layer + start, count, span.first_block, span.block_count)


def check_generations(pool: PoolMemory, span: Span, blocks: Sequence[int], generations: Sequence[int]) -> None:
    """Raises TransferFailed unless the span's blocks still belong to the transfer. Call before and after a copy."""
    part = slice(span.first_block, span.first_block + span.block_count)
    if pool.generations[list(blocks[part])].tolist() != list(generations[part]):
        raise TransferFailed("a block was given to another sequence during the transfer")


def checksum(data: bytes) -> int:
    return zlib.crc32(data)
