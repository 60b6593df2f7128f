"""A prompt's image embeddings, pulled from the encode workers that made them into this worker's room."""

import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from common import telemetry
from common.cache.keys import EmbeddingLayout, embedding_hash
from common.engine.client import Engine
from common.engine.messages import Media
from common.errors import InvalidArgument
from common.rpc import wire
from common.tasks import ended
from common.transfer.embedding_room import EmbeddingRoom
from common.transfer.key import Identity, TransferKey
from common.transfer.pull_terms import PullResult, PullTarget
from common.transfer.puller import Puller
from epd.v1 import types_pb2

KEY_BYTES = 32


class EmbeddingSource(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt and where its rows are: the EmbeddingRef of the protocol."""

    media: Media  # without blocks
    owner: Identity
    address: str
    ticket: bytes
    part: int


def sources_from_proto(messages: Iterable[types_pb2.EmbeddingRef], prompt_tokens: int) -> list[EmbeddingSource]:
    """Raises InvalidArgument unless every image can be pulled and all are where `media_from_proto` wants them."""
    messages = list(messages)
    if any(message.part < 1 for message in messages):
        raise InvalidArgument("an image to be pulled needs its part, from 1", field="embeddings")
    return [
        EmbeddingSource(
            media=media,
            owner=wire.identity_from_proto(message.owner),
            address=message.address,
            ticket=wire.ticket_from_proto(message.ticket),
            part=message.part,
        )
        for message, media in zip(messages, media_from_proto(messages, prompt_tokens), strict=True)
    ]


def media_from_proto(messages: Iterable[types_pb2.EmbeddingRef], prompt_tokens: int) -> list[Media]:
    """Where a prompt's images are. Raises InvalidArgument unless they lie in it, in order and apart."""
    found: list[Media] = []
    end = 0
    for message in messages:
        media = wire.media_from_proto(message)
        if len(media.key) != KEY_BYTES or not 1 <= media.rows <= media.length:
            raise InvalidArgument("an image needs a key of 32 bytes and 1 to `length` rows", field="embeddings")
        if media.start < end or media.start + media.length > prompt_tokens:
            raise InvalidArgument("images must lie in the prompt, in order and apart", field="embeddings")
        end = media.start + media.length
        found.append(media)
    return found


class Embeddings:
    """All pulls of embeddings of a worker that computes prompts."""

    def __init__(self, engine: Engine, layout: EmbeddingLayout, puller: Puller, room: EmbeddingRoom) -> None:
        """puller: into the engine's embedding pool, whose blocks the room gives out."""
        self.layout, self.puller, self.room = layout, puller, room
        self._engine = engine
        self._giving: set[asyncio.Task[None]] = set()

    def open(
        self, key: TransferKey, sources: Sequence[EmbeddingSource], *, tenant: str, deadline_seconds: float
    ) -> "EmbeddingPull":
        """One prompt's images. key: of the prompt's own transfer; those of the parts differ in their number only.

        Raises NeverFits, InvalidArgument when a part has two owners or tickets.
        """
        return EmbeddingPull(self, key, sources, tenant, deadline_seconds)

    def give_after(self, seq: str, blocks: list[int]) -> None:
        """Gives blocks back once the engine reads them no more, or is gone."""

        async def give() -> None:
            try:
                await self._engine.embeddings_freed(seq)
            finally:
                self.room.give(blocks)

        task = asyncio.create_task(give(), name=f"embeddings of {seq}")
        self._giving.add(task)
        task.add_done_callback(self._giving.discard)

    async def close(self) -> None:
        """Cancels what runs and returns when nothing writes to the pool any more."""
        await self.puller.close()
        for task in self._giving:
            task.cancel()
        await asyncio.gather(*self._giving, return_exceptions=True)


class EmbeddingPull:
    """Owns a prompt's part of the room, from `pull` until it is handed over to the engine or closed."""

    def __init__(
        self,
        home: Embeddings,
        key: TransferKey,
        sources: Sequence[EmbeddingSource],
        tenant: str,
        deadline_seconds: float,
    ) -> None:
        self.seconds = 0.0
        self._home, self._sources = home, sources
        self._counts = [home.layout.blocks(source.media.rows) for source in sources]
        self._room: asyncio.Task[list[int]] | None = None
        home.room.check(sum(self._counts))
        parts: dict[int, list[int]] = {}  # numbers of its images, in order
        for number, source in enumerate(sources):
            parts.setdefault(source.part, []).append(number)
        self._targets = [(numbers, self._target(key, numbers, tenant, deadline_seconds)) for numbers in parts.values()]

    def _target(self, key: TransferKey, numbers: list[int], tenant: str, deadline_seconds: float) -> PullTarget:
        sources = [self._sources[number] for number in numbers]
        first = sources[0]
        if len({(each.owner, each.address, each.ticket) for each in sources}) > 1:
            raise InvalidArgument("images of one part must have one owner and one ticket", field="embeddings")
        return PullTarget(
            key=TransferKey(key.request_id, key.leg, key.attempt, first.part),
            ticket=first.ticket,
            owner=first.owner,
            address=first.address,
            tenant=tenant,
            token_count=sum(each.media.rows for each in sources),
            content_hash=embedding_hash([(each.media.key, each.media.rows) for each in sources]),
            num_blocks=sum(self._counts[number] for number in numbers),
            deadline_seconds=deadline_seconds,
        )

    async def pull(self) -> list[Media]:
        """All parts side by side; the images with their blocks.

        Room for all of them is taken once the first encoder says that its part is ready, so that a prompt holds none
        of it while all its images are still being encoded. When this raises, cancelled included, nothing writes to the
        room any more; `close` gives it back. Raises Overloaded without room, and what Puller.pull raises: NotReady for
        a part that is not published (case D13).
        """
        begin = asyncio.get_running_loop().time()
        with telemetry.start_span(telemetry.EMBEDDING_PULL) as span:
            pulls = [asyncio.create_task(self._pull_part(*part)) for part in self._targets]
            try:
                results: list[PullResult] = await asyncio.gather(*pulls)
            except BaseException:
                for task in pulls:
                    task.cancel()
                await ended(*pulls)
                raise
            span.set_attribute(telemetry.IMAGES, len(self._sources))
            span.set_attribute(telemetry.TRANSFER_BYTES, sum(result.bytes_read for result in results))
            span.set_attribute(telemetry.TRANSFER_CHANNEL, ",".join(sorted({result.channel for result in results})))
        metrics = telemetry.current().metrics
        for result in results:
            metrics.transfer_bytes.labels(channel=result.channel).inc(result.bytes_read)
            metrics.transfer_seconds.labels(channel=result.channel).observe(result.total_seconds)
        self.seconds = asyncio.get_running_loop().time() - begin
        return [
            msgspec.structs.replace(source.media, blocks=tuple(blocks))
            for source, blocks in zip(self._sources, self._blocks(), strict=True)
        ]

    def hand_over(self, seq: str) -> None:
        """The engine has them, by a Submit of this name: the room is free again once it says so."""
        room, self._room = self._room, None
        assert room is not None
        self._home.give_after(seq, room.result())

    def close(self) -> None:
        """Gives up what was not handed over, once `pull` has ended. Idempotent."""
        room, self._room = self._room, None
        if room is None:
            return
        if not room.done():
            room.cancel()  # it takes nothing any more
        elif not room.cancelled() and room.exception() is None:
            self._home.room.give(room.result())

    async def _pull_part(self, numbers: list[int], target: PullTarget) -> PullResult:
        async def reserve(_: int) -> _Blocks:
            if self._room is None:
                self._room = asyncio.create_task(self._home.room.take(sum(self._counts)))
            await asyncio.shield(self._room)
            blocks = self._blocks()
            return _Blocks(blocks=[block for number in numbers for block in blocks[number]])

        return await self._home.puller.pull(target, reserve)

    def _blocks(self) -> list[list[int]]:
        """Of each image."""
        assert self._room is not None
        blocks = iter(self._room.result())
        return [[next(blocks) for _ in range(count)] for count in self._counts]


class _Blocks(msgspec.Struct, frozen=True):
    blocks: list[int]
    hit_blocks: int = 0
