"""TransferService: the pull stream that is the lease, and the bytes of the grpc channel."""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Sequence

import grpc

from common.errors import InvalidArgument, LayoutMismatch, PermissionDenied, TransferRefused, WrongIncarnation
from common.policies.handoff.terms import Finished, Grant, Span, Started, Watermark
from common.rpc import wire
from common.rpc.peer_name import caller
from common.transfer.channel import check_generations, checksum, pieces, settled, split
from common.transfer.channel_grpc import span_from_proto
from common.transfer.key import Identity, TransferKey
from common.transfer.layout import shown_layout
from common.transfer.pool_memory import PoolMemory
from common.transfer.publications import PublicationTable
from common.transfer.pull_stream import PullStream
from common.transfer.tables import PublicationTables
from epd.v1 import transfer_pb2 as pb
from epd.v1 import transfer_pb2_grpc

MAX_PULL_SECONDS = 3600.0  # of a call that came without a deadline
MAX_READ_SPANS = 4096
_READ_BYTES = 1 << 20


class TransferService(transfer_pb2_grpc.TransferServiceServicer):
    """Serves one worker's publications. Errors are raised; the server's interceptor turns them into statuses.

    channels: allowed ones. nonce: of the worker's ShmServer; without one `shm` is never chosen.
    """

    def __init__(
        self, publications: PublicationTables, *, channels: Sequence[str] = ("shm", "grpc"), nonce: bytes = b""
    ) -> None:
        self._publications = publications
        self._channels = tuple(channels)
        self._nonce = nonce

    async def Pull(
        self, request_iterator: AsyncIterator[pb.PullRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PullResponse]:
        requests = aiter(request_iterator)
        first: pb.PullRequest | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._publications.limits.create_wait_seconds):
                first = await anext(requests, None)
        if first is None or first.WhichOneof("event") != "open":
            raise InvalidArgument("the first message must be open", field="open")
        opening = first.open
        table = self._check(opening)
        channel = self._choose(opening)
        remaining = context.time_remaining()
        stream = table.open(
            _shown(opening), MAX_PULL_SECONDS if remaining is None else min(remaining, MAX_PULL_SECONDS)
        )
        listening = asyncio.create_task(self._listen(table, requests, stream))
        try:
            async for item in stream:
                yield _response(item, channel)
        finally:
            table.close(stream)  # at once, however the call ended: the lease is over
            listening.cancel()

    async def _listen(
        self, table: PublicationTable, requests: AsyncIterator[pb.PullRequest], stream: PullStream
    ) -> None:
        """The puller's side of the stream. Its end without done ends the lease."""
        try:
            async for request in requests:
                match request.WhichOneof("event"):
                    case "ack":
                        ack = request.ack
                        taken = Watermark(ack.complete_blocks, ack.layers_done)
                        table.acknowledge(stream, taken, ack.bytes_read, ack.waiting_for_room)
                    case "done":
                        table.done(stream)
        finally:
            table.close(stream)
            stream.end(TransferRefused("the puller's side of the stream ended"))  # without effect after done

    def _check(self, opening: pb.PullOpen) -> PublicationTable:
        """The table that the transfer is of. Cases A17 and A18."""
        _check_caller(wire.identity_from_proto(opening.puller))
        owner = wire.identity_from_proto(opening.owner)
        mine = self._publications.identity
        if owner != mine:
            raise WrongIncarnation(f"this is {mine.worker_id}, but not the incarnation that was called")
        table = self._publications.of(wire.key_from_proto(opening.key))
        layout, theirs = table.engine.layout, shown_layout(opening)
        if theirs.compat_id != layout.compat_id or opening.compat_id != layout.compat_id:
            raise LayoutMismatch(f"the owner's blocks are {layout}; the puller's are {theirs}")
        return table

    def _choose(self, opening: pb.PullOpen) -> str:
        """The puller's first choice that both can use."""
        for name in opening.channels:
            same_host = bool(self._nonce) and hmac.compare_digest(opening.host_nonce, self._nonce)
            if name in self._channels and (name != "shm" or same_host):
                return str(name)
        raise InvalidArgument(f"no common channel: the owner has {', '.join(self._channels)}", field="channels")

    async def Read(self, request: pb.ReadRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.ReadResponse]:
        key = wire.key_from_proto(request.key)
        table = self._publications.of(key)
        _check_caller(table.puller_of(key))
        if len(request.spans) > MAX_READ_SPANS:
            raise InvalidArgument(f"at most {MAX_READ_SPANS} spans a read", field="spans")
        unit_bytes = table.engine.layout.unit_bytes
        for message in request.spans:
            span = span_from_proto(message)
            if min(span.layer_count, span.block_count) < 1:
                raise InvalidArgument("a span is empty", field="spans")
            # Small spans, so that the blocks are pinned for a copy in memory only, never while the network is slow.
            for part in split(span, unit_bytes, _READ_BYTES):
                for data in await self._gather(table, key, request.ticket, part):
                    yield pb.ReadResponse(data=data, crc32=checksum(data))

    async def _gather(self, table: PublicationTable, key: TransferKey, ticket: bytes, span: Span) -> list[bytes]:
        async def copy() -> list[bytes]:
            blocks = table.blocks_of(key)
            return await settled(asyncio.to_thread(self._copy, table.engine.pool, blocks, span))

        return await table.read(key, ticket, span, copy)

    def _copy(self, pool: PoolMemory, blocks: Started, span: Span) -> list[bytes]:
        check_generations(pool, span, blocks.blocks, blocks.generations)
        found = [b"".join(piece) for piece in pieces(pool, blocks.blocks, span)]  # type: ignore[arg-type]
        check_generations(pool, span, blocks.blocks, blocks.generations)
        return found


def _check_caller(puller: Identity | None) -> None:
    """A ticket is worth nothing to another worker than it was made for, whatever that one calls itself."""
    name = caller()
    if name is not None and puller is not None and puller.worker_id != name.id:
        raise PermissionDenied(f"{name} has asked for what is another's")


def _shown(opening: pb.PullOpen) -> Grant:
    return Grant(
        key=wire.key_from_proto(opening.key),
        ticket=wire.ticket_from_proto(opening.ticket),
        owner=wire.identity_from_proto(opening.owner),
        puller=wire.identity_from_proto(opening.puller),
        tenant=opening.tenant,
    )


def _response(item: Started | Watermark | Finished | None, channel: str) -> pb.PullResponse:
    match item:
        case None:
            return pb.PullResponse(opened=pb.PullOpened(channel=channel))
        case Started(token_count, blocks, generations):
            return pb.PullResponse(
                started=pb.PullStarted(token_count=token_count, block_ids=blocks, generations=generations)
            )
        case Watermark(blocks, layers):
            return pb.PullResponse(ready=pb.PullReady(complete_blocks=blocks, layers_done=layers))
        case Finished(key, token_count, token_hash, first):
            return pb.PullResponse(
                finished=pb.PullFinished(
                    key=wire.key_to_proto(key),
                    token_count=token_count,
                    token_hash=token_hash,
                    first=wire.all_to_proto(first),
                )
            )
