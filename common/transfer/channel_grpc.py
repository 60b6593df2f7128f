"""The channel that is always there: TransferService.Read. Pieces of at most 1 MiB, each with a crc32."""

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import grpc
import numpy as np

from common.errors import TransferFailed
from common.policies.handoff.terms import Span
from common.rpc import wire
from common.rpc.errors import from_rpc
from common.transfer.channel import BlockMap, Bytes, RateLimit, checksum, settled, strips
from common.transfer.key import TransferKey
from common.transfer.pool_memory import PoolMemory
from epd.v1 import transfer_pb2


class GrpcChannel:
    """Reads through the owner, which checks generations; the checksums are checked here."""

    name = "grpc"
    encrypted = True  # as its connection is

    def __init__(
        self,
        stub: Any,  # transfer_pb2_grpc.TransferServiceStub
        key: TransferKey,
        ticket: bytes,
        target: PoolMemory,
        blocks: BlockMap,
        threads: Executor,
        limit: RateLimit | None = None,
    ) -> None:
        self._stub = stub
        self._key, self._ticket = key, ticket
        self._target, self._blocks = target, blocks
        self._threads = threads
        self._limit = limit

    async def read(self, spans: Sequence[Span]) -> int:
        request = transfer_pb2.ReadRequest(
            key=wire.key_to_proto(self._key), ticket=self._ticket, spans=[span_to_proto(span) for span in spans]
        )
        into = _Cursor(strip for span in spans for strip in strips(self._target, self._blocks.target, span))
        count = 0
        call = self._stub.Read(request)
        try:
            async for response in call:
                work = asyncio.get_running_loop().run_in_executor(
                    self._threads, into.write, response.data, response.crc32
                )
                await settled(work)
                count += len(response.data)
                if self._limit:
                    await self._limit.take(len(response.data))
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()  # without effect on one that has ended
        if not into.full:
            raise TransferFailed("the owner sent fewer bytes than asked for")
        return count


class _Cursor:
    """Writes a byte stream over strips of a pool, in order."""

    def __init__(self, views: Iterator[Bytes]) -> None:
        self._views = views
        self._view: Bytes | None = next(views, None)
        self._at = 0

    @property
    def full(self) -> bool:
        return self._view is None

    def write(self, data: bytes, crc32: int) -> None:
        """Raises TransferFailed for a wrong checksum (nothing is written then) and for bytes beyond the end."""
        if checksum(data) != crc32:
            raise TransferFailed("a piece arrived with a wrong checksum")
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            if self._view is None:
                raise TransferFailed("the owner sent more bytes than asked for")
            count = min(len(rest), len(self._view) - self._at)
            self._view[self._at : self._at + count] = rest[:count]
            rest = rest[count:]
            self._at += count
            if self._at == len(self._view):
                self._view, self._at = next(self._views, None), 0


def span_to_proto(span: Span) -> transfer_pb2.ReadSpan:
    return transfer_pb2.ReadSpan(
        first_layer=span.first_layer,
        layer_count=span.layer_count,
        first_block=span.first_block,
        block_count=span.block_count,
    )


def span_from_proto(message: transfer_pb2.ReadSpan) -> Span:
    return Span(message.first_layer, message.layer_count, message.first_block, message.block_count)
