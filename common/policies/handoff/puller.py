"""The puller's machine: one transfer at the decode worker, from opening the stream to commit-ready or given up."""

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from common.policies.handoff.terms import Finished, HandoffLimits, Started, Watermark
from common.transfer.key import TransferKey


class Phase(StrEnum):
    OPENING = "opening"  # holds no blocks; the owner may not even know the transfer
    WAITING = "waiting"  # accepted; the owner has no blocks yet
    RESERVING = "reserving"  # asked the own engine for room
    PULLING = "pulling"  # holds blocks
    ENDING = "ending"  # result is decided; waits for own copies and for the answer to the reservation
    COMPLETE = "complete"  # may be committed
    ABANDONED = "abandoned"  # failed; nothing writes to the reserved blocks any more


class Target(msgspec.Struct, frozen=True):
    """What the decode worker expects. The hash is over its own copy of the prompt: equal means the same prompt."""

    key: TransferKey
    token_count: int
    token_hash: bytes
    num_blocks: int  # that token_count tokens take
    num_layers: int


class Puller(msgspec.Struct, frozen=True):
    target: Target
    deadline: float
    opened_by: float  # until when the owner must have answered
    phase: Phase = Phase.OPENING
    started: Started | None = None
    ready: Watermark = Watermark()
    taken: Watermark = Watermark()  # in the own pool, hits included
    copying: Watermark | None = None  # what a copy under way will make of `taken`
    reserving: bool = False  # the engine has not answered yet
    finished: Finished | None = None
    failure: str | None = None

    @property
    def terminal(self) -> bool:
        return self.phase in (Phase.COMPLETE, Phase.ABANDONED)

    @property
    def everything(self) -> Watermark:
        return Watermark(self.target.num_blocks, self.target.num_layers)


def open_pull(target: Target, now: float, deadline: float, limits: HandoffLimits) -> Puller:
    # The owner answers after its own wait at the latest; the stall limit is for the way there and back.
    return Puller(target, deadline, min(deadline, now + limits.create_wait_seconds + limits.stall_seconds))


# --- events ---------------------------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    pass


class Start(msgspec.Struct, frozen=True):
    started: Started


class Reserved(msgspec.Struct, frozen=True):
    hit_blocks: int


class ReserveFailed(msgspec.Struct, frozen=True):
    why: str


class Ready(msgspec.Struct, frozen=True):
    ready: Watermark


class Copied(msgspec.Struct, frozen=True):
    pass


class CopyFailed(msgspec.Struct, frozen=True):
    why: str


class Finish(msgspec.Struct, frozen=True):
    finished: Finished


class StreamEnd(msgspec.Struct, frozen=True):
    why: str


class Cancel(msgspec.Struct, frozen=True):
    pass


class Tick(msgspec.Struct, frozen=True):
    pass


Event = Opened | Start | Reserved | ReserveFailed | Ready | Copied | CopyFailed | Finish | StreamEnd | Cancel | Tick


# --- actions --------------------------------------------------------------------------------------------------------


class Reserve(msgspec.Struct, frozen=True):
    token_count: int


class CancelReserve(msgspec.Struct, frozen=True):
    """Reserved or ReserveFailed must still follow."""


class Copy(msgspec.Struct, frozen=True):
    """Copy what is between the two; Copied or CopyFailed follows once no byte is written any more."""

    taken: Watermark
    ready: Watermark


class CancelCopy(msgspec.Struct, frozen=True):
    pass


class SendAck(msgspec.Struct, frozen=True):
    taken: Watermark


class SendDone(msgspec.Struct, frozen=True):
    pass


class CloseStream(msgspec.Struct, frozen=True):
    pass


class Complete(msgspec.Struct, frozen=True):
    """Every check passed. moved: all blocks are here and may be committed; else all choices had ended and nothing is
    to be decoded: the reserved blocks, if any, are given back."""

    moved: bool


class Abandon(msgspec.Struct, frozen=True):
    """Failed, and no copy runs: the reserved blocks, if any, may be given back."""

    why: str


Action = Reserve | CancelReserve | Copy | CancelCopy | SendAck | SendDone | CloseStream | Complete | Abandon


# --- rules ----------------------------------------------------------------------------------------------------------


def start_mismatch(target: Target, started: Started) -> str | None:
    blocks = target.num_blocks
    if started.token_count != target.token_count or not len(started.blocks) == len(started.generations) == blocks:
        return "the owner announced another number of tokens or blocks"
    return None


def mismatch(target: Target, finished: Finished) -> str | None:
    """Invariant 4: what must agree before a commit (the copies have checked generations or checksums)."""
    if finished.key != target.key:
        return "the owner finished another request or attempt"
    if finished.token_count != target.token_count:
        return "the owner computed another number of tokens"
    return None if finished.token_hash == target.token_hash else "the owner computed other tokens"


def may_settle(puller: Puller) -> bool:
    """Own blocks are given back only when no own copy writes to them."""
    return puller.copying is None and not puller.reserving


def next_due(puller: Puller) -> float | None:
    if puller.terminal or puller.phase is Phase.ENDING:
        return None
    return puller.opened_by if puller.phase is Phase.OPENING else puller.deadline


# --- steps ----------------------------------------------------------------------------------------------------------


def step(puller: Puller, event: Event, now: float) -> tuple[Puller, list[Action]]:
    """One event. Nothing changes a terminal state; nothing turns a failure into a success (invariant 8)."""
    if puller.terminal:
        return puller, []
    match event:
        case Copied() if puller.copying is not None:
            puller = replace(puller, taken=puller.copying, copying=None)
            return _then(puller, [SendAck(puller.taken)])
        case CopyFailed(why):
            return _fail(replace(puller, copying=None), why)
        case Reserved(hit_blocks) if puller.reserving:
            puller = replace(puller, reserving=False)
            if puller.phase is Phase.RESERVING:
                taken = Watermark(hit_blocks, 0)
                # The acknowledgement tells the owner not to wait for the hits.
                return _then(replace(puller, phase=Phase.PULLING, taken=taken), [SendAck(taken)])
            return _then(puller, [])
        case ReserveFailed(why) if puller.reserving:
            return _fail(replace(puller, reserving=False), why)
        case StreamEnd(why):
            return _fail(puller, why)
        case Cancel():
            return _fail(puller, "cancelled")
        case Tick():
            due = next_due(puller)
            late = due is not None and now >= due
            return _fail(puller, "out of time") if late else (puller, [])
    if puller.phase is Phase.ENDING:
        return puller, []
    match event:
        case Opened() if puller.phase is Phase.OPENING:
            return replace(puller, phase=Phase.WAITING), []
        case Start(started) if puller.phase is Phase.WAITING:
            if wrong := start_mismatch(puller.target, started):
                return _fail(puller, wrong)
            puller = replace(puller, phase=Phase.RESERVING, reserving=True, started=started)
            return puller, [Reserve(started.token_count)]
        case Ready(ready) if puller.started and puller.everything.covers(ready):
            return _then(replace(puller, ready=puller.ready.join(ready)), [])
        case Finish(finished) if puller.started and not puller.finished:
            if wrong := mismatch(puller.target, finished):
                return _fail(puller, wrong)
            return _then(replace(puller, finished=finished), [])
    return _fail(puller, "the owner broke the protocol")


def _then(puller: Puller, actions: list[Action]) -> tuple[Puller, list[Action]]:
    """What follows from the state: end early, complete, copy more, or wait."""
    if puller.phase is Phase.ENDING:
        return _settle(puller, actions)
    if puller.finished and puller.finished.all_ended:
        return _wind_down(puller, actions)
    if puller.phase is not Phase.PULLING or puller.copying:
        return puller, actions
    if puller.finished and puller.taken.covers(puller.everything):
        return replace(puller, phase=Phase.COMPLETE), [*actions, SendDone(), Complete(moved=True)]
    ready = puller.taken.join(puller.ready)
    if ready != puller.taken:
        return replace(puller, copying=ready), [*actions, Copy(puller.taken, ready)]
    return puller, actions


def _fail(puller: Puller, why: str) -> tuple[Puller, list[Action]]:
    if puller.phase is Phase.ENDING:
        return _settle(puller, [])
    return _wind_down(replace(puller, failure=why), [CloseStream()])


def _wind_down(puller: Puller, actions: list[Action]) -> tuple[Puller, list[Action]]:
    if puller.copying:
        actions = [*actions, CancelCopy()]
    if puller.reserving:
        actions = [*actions, CancelReserve()]
    return _settle(replace(puller, phase=Phase.ENDING), actions)


def _settle(puller: Puller, actions: list[Action]) -> tuple[Puller, list[Action]]:
    if not may_settle(puller):
        return puller, actions
    if puller.failure is not None:
        return replace(puller, phase=Phase.ABANDONED), [*actions, Abandon(puller.failure)]
    return replace(puller, phase=Phase.COMPLETE), [*actions, SendDone(), Complete(moved=False)]
