"""The owner's side: publications of one pool, driven by its engine's events and by the streams of pullers.

This carries out what the pure machine decides (common/policies/handoff): it owns the timer and the way from engine
progress to readable blocks, and wakes the pull streams. Everything belongs to one event loop.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from common import errors
from common.policies.handoff import owner as machine
from common.policies.handoff.tables import Outcome, OwnerTable
from common.policies.handoff.terms import End, Finished, Grant, HandoffLimits, Refusal, Span, Started, Watermark
from common.sampling import ChoiceTokens
from common.transfer.key import Identity, TransferKey
from common.transfer.layout import PoolLayout
from common.transfer.pool_memory import PoolMemory
from common.transfer.pull_stream import PullStream

T = TypeVar("T")

_REFUSALS: dict[Refusal, type[errors.EpdError]] = {
    Refusal.UNKNOWN: errors.TransferFailed,
    Refusal.OVER: errors.TransferFailed,
    Refusal.INCARNATION: errors.WrongIncarnation,
    Refusal.DUPLICATE: errors.DuplicateRequest,
    Refusal.TOO_MANY: errors.Overloaded,
}  # the others: TransferRefused


def refused(why: Refusal, key: TransferKey) -> errors.EpdError:
    if why is Refusal.UNKNOWN and key.part:
        return errors.NotReady("the embedding is not published yet")  # case D13
    return _REFUSALS.get(why, errors.TransferRefused)(str(why))


class OwnerEngine(Protocol):
    """What publications need of whoever fills the pool: common.engine.client.Engine, common.encoder.encoder.Encoder."""

    @property
    def layout(self) -> PoolLayout: ...

    @property
    def pool(self) -> PoolMemory: ...

    async def wait_progress(self, step: int, layers: int) -> None:
        """For publications that announce chunks."""


class Publication:
    """Blocks of one prompt, or of one call's images, on offer. Made by PublicationTable.publish; fed with the engine's
    events of its sequence."""

    def __init__(self, table: "PublicationTable", key: TransferKey, on_release: Callable[[], None]) -> None:
        self.key = key
        self.released = asyncio.Event()  # nobody reads the blocks any more
        self.error: errors.EpdError | None = None  # of prefill
        self._table = table
        self._on_release = on_release
        self._chunks: asyncio.Queue[tuple[int, int, int, bool]] = asyncio.Queue()
        self._watcher: asyncio.Task[None] | None = None

    def started(self, blocks: Sequence[int], generations: Sequence[int], token_count: int) -> None:
        """The engine has allocated the blocks, ids in prompt order, for token_count tokens."""
        if self.released.is_set():
            self._on_release()  # blocks that turn up late must be given back, too
            return
        self._table.apply(self.key, machine.Start(Started(token_count, tuple(blocks), tuple(generations))))
        self._watcher = self._watcher or asyncio.create_task(self._watch(), name=f"publication {self.key}")

    def chunk(self, step: int, start: int, end: int, last: bool) -> None:
        """The engine is about to compute tokens [start, end) in `step`."""
        if self._watcher is None or self.released.is_set() or not self._table.overlap:
            return
        self._chunks.put_nowait((step, start, end, last))

    def finished(self, first: Sequence[ChoiceTokens], token_count: int, token_hash: bytes) -> None:
        """Everything is computed and readable. token_hash: embedding_hash for images, whose tokens are rows."""
        self._stop_watching()
        if self.released.is_set():
            self._on_release()
            return
        self._table.apply(self.key, machine.Finish(Finished(self.key, token_count, token_hash, tuple(first))))

    def fail(self, error: errors.EpdError) -> None:
        """Prefill failed: a puller is told at once (case A15). Idempotent."""
        self.error = self.error or error
        self._table.apply(self.key, machine.Stop(End.FAILED))

    def cancel(self) -> None:
        """Ends it in any state. Blocks are given back by on_release, once no read of them is under way. Idempotent."""
        self._table.cancel(self.key)

    async def _watch(self) -> None:
        """Turns engine progress into what is readable: whole blocks chunk by chunk, the last chunk layer by layer."""
        engine, block_size = self._table.engine, self._table.engine.layout.block_size
        layers = engine.layout.num_layers
        with contextlib.suppress(errors.EngineFailed):  # whoever reads the engine's events hears of that too
            while True:
                step, start, end, last = await self._chunks.get()
                # All before the chunk was computed in earlier steps or came from the prefix cache.
                before = start // block_size
                self._advance(Watermark(before, 0))
                done = 0
                while last and done < layers - 1:
                    await engine.wait_progress(step, done + 1)
                    reached, done_in_it = engine.pool.progress()
                    done = done_in_it if reached == step else layers
                    if done < layers:
                        self._advance(Watermark(before, done))
                await engine.wait_progress(step, layers)
                self._advance(Watermark(before, layers) if last else Watermark(end // block_size, 0))

    def _advance(self, ready: Watermark) -> None:
        self._table.apply(self.key, machine.Advance(ready))

    def _stop_watching(self) -> None:
        if self._watcher:
            self._watcher.cancel()

    def release(self) -> None:
        """By the table, when nothing is read any more and nothing will be."""
        self._stop_watching()
        self.released.set()
        self._on_release()


class PublicationTable:
    """All publications of one pool in one life of a worker."""

    def __init__(
        self,
        identity: Identity,
        engine: OwnerEngine,
        *,
        overlap: bool = True,
        limits: HandoffLimits | None = None,
    ) -> None:
        """overlap False: nothing is readable before prefill has finished, the baseline of the overlap bench."""
        self.identity = identity
        self.engine = engine
        self.overlap = overlap
        self.limits = limits or HandoffLimits()
        self._table = OwnerTable(identity, engine.layout.num_layers, self.limits)
        self._publications: dict[TransferKey, Publication] = {}
        self._streams: dict[int, PullStream] = {}
        self._numbers = itertools.count()
        self._clock = asyncio.get_running_loop().time
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open_publications(self) -> int:
        return len(self._table.owners)

    async def idle(self) -> None:
        """Returns when every publication has ended."""
        while self._publications:
            await next(iter(self._publications.values())).released.wait()

    @property
    def open_pulls(self) -> int:
        """Streams that are served or wait for their publication."""
        return len(self._streams)

    def publish(
        self,
        key: TransferKey,
        ticket: bytes,
        *,
        puller: Identity,
        tenant: str,
        deadline_seconds: float,
        on_release: Callable[[], None],
        owner: Identity | None = None,
    ) -> Publication:
        """Opens a publication for one puller; an older attempt of the same leg ends.

        on_release is called once no one reads the blocks any more and no one will, and again should blocks come after
        that; it must be idempotent (the engine's Release is). deadline_seconds from now is the hard end.
        Raises TransferFailed for an attempt that was cancelled or is over, TransferRefused for a stale one,
        DuplicateRequest for a repeated one, WrongIncarnation when `owner` is given and is another life.
        """
        grant = Grant(key, ticket, owner or self.identity, puller, tenant)
        now = self._clock()
        why, outcome = self._table.create(grant, now, now + deadline_seconds)
        if why:
            raise refused(why, key)
        publication = self._publications[key] = Publication(self, key, on_release)
        self._carry_out(outcome)
        return publication

    def cancel(self, key: TransferKey) -> None:
        """Ends this attempt and older ones in any state, also one that was not published yet. Idempotent."""
        self._carry_out(self._table.cancel(key, self._clock()))

    def open(self, shown: Grant, deadline_seconds: float) -> PullStream:
        """A puller's stream. `close` it when it ends, for whatever reason."""
        stream = PullStream(next(self._numbers), shown.key)
        self._streams[stream.number] = stream
        now = self._clock()
        self._carry_out(self._table.open(stream.number, shown, now, now + deadline_seconds))
        return stream

    def close(self, stream: PullStream) -> None:
        """The stream is over: its lease ends. Idempotent."""
        if self._streams.pop(stream.number, None):
            self._carry_out(self._table.stream_ended(stream.number, stream.key, self._clock()))

    def acknowledge(self, stream: PullStream, taken: Watermark, bytes_read: int, waiting: bool) -> None:
        self.apply(stream.key, machine.Ack(stream.number, taken, bytes_read, waiting))

    def done(self, stream: PullStream) -> None:
        self.apply(stream.key, machine.Done(stream.number))

    def has_lease(self, key: TransferKey, ticket: bytes) -> bool:
        """Whether this ticket's pull stream is open right now."""
        owner = self._table.owners.get(key)
        return owner is not None and machine.holds_lease(owner, ticket)

    def puller_of(self, key: TransferKey) -> Identity | None:
        """Whom the transfer is for; None when there is none (any more)."""
        owner = self._table.owners.get(key)
        return None if owner is None else owner.grant.puller

    def blocks_of(self, key: TransferKey) -> Started:
        """Raises TransferFailed when the transfer is over or has no blocks yet."""
        owner = self._table.owners.get(key)
        if owner is None or owner.started is None:
            raise errors.TransferFailed("the transfer is over or has not started")
        return owner.started

    async def read(self, key: TransferKey, ticket: bytes, span: Span, copy: Callable[[], Awaitable[T]]) -> T:
        """Runs `copy` while the blocks are pinned. Raises TransferRefused or TransferFailed."""
        if key not in self._table.owners:
            raise refused(Refusal.OVER, key)
        for _, action in self._table.apply(key, machine.ReadBegin(ticket, (span,)), self._clock()):
            if isinstance(action, machine.Refuse):
                raise refused(action.why, key)
        try:
            return await copy()
        finally:
            self.apply(key, machine.ReadEnd())

    def apply(self, key: TransferKey, event: machine.Event) -> None:
        self._carry_out(self._table.apply(key, event, self._clock()))

    def shut_down(self) -> None:
        """Ends everything: pullers are told, blocks are given back."""
        for key in list(self._table.owners):
            self.cancel(key)
        for stream in self._streams.values():
            stream.end(errors.Draining("the owner is shutting down"))
        if self._timer:
            self._timer.cancel()

    def _carry_out(self, outcome: Outcome) -> None:
        for key, action in outcome:
            publication = self._publications.get(key)
            match action:
                case machine.Accept(number):
                    self._streams[number].put(None)
                case machine.Tell(number, what):
                    self._streams[number].put(what)
                case machine.Refuse(number, why) if number in self._streams:
                    self._streams[number].end(refused(why, key))
                case machine.EndStream(number, end):
                    self._streams[number].end(None if end is End.DONE else _ended(end, publication))
                case machine.Free() if publication:
                    del self._publications[key]
                    publication.release()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        due = self._table.next_due()
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._carry_out(self._table.tick(self._clock()))


def _ended(end: End, publication: Publication | None) -> errors.EpdError:
    if end is End.EXPIRED:
        return errors.DeadlineExceeded(str(end))
    cause = f": {publication.error.reason}" if end is End.FAILED and publication and publication.error else ""
    return errors.TransferFailed(f"{end}{cause}")
