"""The owner's machine: one publication at the prefill worker, from its creation until its blocks are free again."""

import hmac
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from common.policies.handoff.terms import End, Finished, Grant, HandoffLimits, Refusal, Span, Started, Watermark, inside


class Phase(StrEnum):
    PUBLISHED = "published"  # no blocks yet
    COMPUTING = "computing"  # blocks held, some may be readable
    FINISHED = "finished"  # everything is readable
    DRAINING = "draining"  # ended; waits for reads under way
    RELEASED = "released"  # holds nothing


class Owner(msgspec.Struct, frozen=True):
    """State of one publication. Times are seconds of the caller's clock."""

    grant: Grant
    deadline: float
    num_layers: int
    phase: Phase = Phase.PUBLISHED
    started: Started | None = None
    ready: Watermark = Watermark()
    finished: Finished | None = None
    finished_at: float = 0.0
    stream: int | None = None  # the one pull stream there ever is: a ticket serves once
    streaming: bool = False
    taken: Watermark = Watermark()  # as acknowledged by the puller
    bytes_read: int = 0
    progress_at: float = 0.0  # the puller's last progress, or when data became ready for it
    waiting_since: float | None = None  # first time the puller said it waits for room
    readers: int = 0  # copies out of the pool under way in this process
    end: End | None = None

    @property
    def live(self) -> bool:
        return self.end is None


# --- events ---------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    started: Started


class Advance(msgspec.Struct, frozen=True):
    ready: Watermark


class Finish(msgspec.Struct, frozen=True):
    finished: Finished


class Stop(msgspec.Struct, frozen=True):
    """Cancelled, failed or superseded, from the owner's own side."""

    end: End


class Open(msgspec.Struct, frozen=True):
    stream: int
    shown: Grant


class Ack(msgspec.Struct, frozen=True):
    stream: int
    taken: Watermark
    bytes_read: int = 0
    waiting: bool = False  # for room in the puller's pool


class Done(msgspec.Struct, frozen=True):
    stream: int


class StreamEnd(msgspec.Struct, frozen=True):
    stream: int


class ReadBegin(msgspec.Struct, frozen=True):
    ticket: bytes
    spans: tuple[Span, ...]


class ReadEnd(msgspec.Struct, frozen=True):
    pass


class Tick(msgspec.Struct, frozen=True):
    pass


Event = Start | Advance | Finish | Stop | Open | Ack | Done | StreamEnd | ReadBegin | ReadEnd | Tick


# --- actions --------------------------------------------------------------------------------------------------------


class Accept(msgspec.Struct, frozen=True):
    stream: int


class Refuse(msgspec.Struct, frozen=True):
    """stream None: a read is refused, not a pull."""

    stream: int | None
    why: Refusal


class Tell(msgspec.Struct, frozen=True):
    stream: int
    what: Started | Watermark | Finished


class EndStream(msgspec.Struct, frozen=True):
    stream: int
    end: End


class Free(msgspec.Struct, frozen=True):
    """Nobody reads the blocks any more and nobody will. Comes again when blocks turn up for an ended publication."""


Action = Accept | Refuse | Tell | EndStream | Free


# --- rules ----------------------------------------------------------------------------------------------------------


def may_release(owner: Owner) -> bool:
    """Case A4, invariant 1: never while a read is under way."""
    return owner.readers == 0


def refusal(owner: Owner, shown: Grant) -> Refusal | None:
    """Why a pull that shows `shown` is not accepted; None when it is. Cases A2, A18, invariant 3."""
    grant = owner.grant
    if shown.owner != grant.owner:
        return Refusal.INCARNATION
    same = hmac.compare_digest(shown.ticket, grant.ticket)  # in constant time
    if not same or (shown.key, shown.puller, shown.tenant) != (grant.key, grant.puller, grant.tenant):
        return Refusal.CREDENTIALS
    return used(owner)


def used(owner: Owner) -> Refusal | None:
    if owner.stream is not None:
        return Refusal.USED
    return None if owner.live else Refusal.OVER


def holds_lease(owner: Owner, ticket: bytes) -> bool:
    """Whether the pull stream of this ticket is open right now."""
    return owner.streaming and hmac.compare_digest(ticket, owner.grant.ticket)


def read_refusal(owner: Owner, event: ReadBegin) -> Refusal | None:
    """Reads are served under the lease only: while the pull stream is open."""
    if not holds_lease(owner, event.ticket) or owner.started is None:
        return Refusal.OVER
    blocks = len(owner.started.blocks)
    readable = all(inside(span, owner.ready, blocks, owner.num_layers) for span in event.spans)
    return None if readable else Refusal.NOT_READABLE


def outstanding(owner: Owner) -> bool:
    """Whether the open stream has something to do: then it must make progress."""
    return owner.streaming and (owner.finished is not None or not owner.taken.covers(owner.ready))


def next_due(owner: Owner, limits: HandoffLimits) -> float | None:
    """When Tick has something to do at the earliest; None once ended (what is left then is a copy in memory)."""
    if not owner.live:
        return None
    due = owner.deadline
    if outstanding(owner):
        due = min(due, owner.progress_at + limits.stall_seconds)
    if owner.phase is Phase.FINISHED and owner.stream is None:
        due = min(due, owner.finished_at + limits.unpulled_seconds)
    return due


# --- steps ----------------------------------------------------------------------------------------------------------


def step(owner: Owner, event: Event, now: float, limits: HandoffLimits) -> tuple[Owner, list[Action]]:
    """One event. Late, repeated and foreign ones change nothing."""
    match event:
        case ReadEnd():
            return _release(replace(owner, readers=owner.readers - 1), [])
        case ReadBegin():
            why = read_refusal(owner, event)
            # Asking for more, the puller has taken what came before: on a slow link the only sign of life for long.
            return (
                (owner, [Refuse(None, why)])
                if why
                else (replace(owner, readers=owner.readers + 1, progress_at=now), [])
            )
        case Open(stream, shown):
            why = refusal(owner, shown)
            return (owner, [Refuse(stream, why)]) if why else _open(owner, stream, now)
        case Start() | Finish() if not owner.live:
            return owner, [Free()] if owner.phase is Phase.RELEASED else []
    if not owner.live:
        return owner, []
    match event:
        case Start(started) if owner.phase is Phase.PUBLISHED:
            return replace(owner, phase=Phase.COMPUTING, started=started), _tell(owner, started)
        case Advance(ready) if owner.phase is Phase.COMPUTING:
            return _advance(owner, ready, now)
        case Finish(finished) if owner.phase is Phase.COMPUTING and owner.started is not None:
            everything = Watermark(len(owner.started.blocks), owner.num_layers)
            owner, actions = _advance(owner, everything, now)
            owner = replace(owner, phase=Phase.FINISHED, finished=finished, finished_at=now)
            return owner, actions + _tell(owner, finished)
        case Stop(end):
            return _end(owner, end)
        case Ack() if owner.streaming and event.stream == owner.stream:
            return _acknowledge(owner, event, now, limits), []
        case Done(stream) if owner.streaming and stream == owner.stream:
            return _end(owner, End.DONE if owner.phase is Phase.FINISHED else End.PULLER_LEFT)
        case StreamEnd(stream) if owner.streaming and stream == owner.stream:
            return _end(replace(owner, streaming=False), End.PULLER_LEFT)
        case Tick():
            return _tick(owner, now, limits)
    return owner, []


def _open(owner: Owner, stream: int, now: float) -> tuple[Owner, list[Action]]:
    owner = replace(owner, stream=stream, streaming=True, progress_at=now)
    actions: list[Action] = [Accept(stream)]
    if owner.started:
        actions += _tell(owner, owner.started)
    if owner.ready != Watermark():
        actions += _tell(owner, owner.ready)
    if owner.finished:
        actions += _tell(owner, owner.finished)
    return owner, actions


def _advance(owner: Owner, ready: Watermark, now: float) -> tuple[Owner, list[Action]]:
    ready = owner.ready.join(ready)
    if ready == owner.ready:
        return owner, []
    idle = not outstanding(owner)
    owner = replace(owner, ready=ready, progress_at=now if idle else owner.progress_at)
    return owner, _tell(owner, ready)


def _acknowledge(owner: Owner, ack: Ack, now: float, limits: HandoffLimits) -> Owner:
    taken = owner.taken.join(ack.taken)
    if taken != owner.taken or ack.bytes_read > owner.bytes_read:  # taken may exceed ready by the puller's own hits
        return replace(owner, taken=taken, bytes_read=max(owner.bytes_read, ack.bytes_read), progress_at=now)
    if ack.waiting:  # alive but without room: bounded in all, so that waiting cannot be renewed for ever
        since = now if owner.waiting_since is None else owner.waiting_since
        patient = now - since <= limits.room_seconds
        return replace(owner, waiting_since=since, progress_at=now if patient else owner.progress_at)
    return owner


def _tick(owner: Owner, now: float, limits: HandoffLimits) -> tuple[Owner, list[Action]]:
    due = next_due(owner, limits)
    if due is None or now < due:
        return owner, []
    if now >= owner.deadline:
        return _end(owner, End.EXPIRED)
    return _end(owner, End.STALLED if owner.streaming else End.UNPULLED)


def _tell(owner: Owner, what: Started | Watermark | Finished) -> list[Action]:
    return [Tell(owner.stream, what)] if owner.streaming and owner.stream is not None else []


def _end(owner: Owner, end: End) -> tuple[Owner, list[Action]]:
    actions: list[Action] = []
    if owner.streaming and owner.stream is not None:
        actions.append(EndStream(owner.stream, end))
    return _release(replace(owner, phase=Phase.DRAINING, streaming=False, end=end), actions)


def _release(owner: Owner, actions: list[Action]) -> tuple[Owner, list[Action]]:
    if owner.phase is Phase.DRAINING and may_release(owner):
        owner, actions = replace(owner, phase=Phase.RELEASED), [*actions, Free()]
    return owner, actions
