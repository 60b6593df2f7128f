"""Which attempts live, which are over, and who waits for one that does not exist yet."""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from common.policies.handoff import owner as machine
from common.policies.handoff.owner import Action, Event, Owner, Phase, Refuse
from common.policies.handoff.terms import End, Grant, HandoffLimits, Refusal
from common.transfer.key import Identity, TransferKey

Line = tuple[bytes, int, int]
Outcome = list[tuple[TransferKey, Action]]


class Attempts:
    """At most one live attempt of each (request, leg); tombstones for those that ended, the oldest forgotten first.

    A tombstone covers its attempt and all before it. One forgotten costs a late message nothing but a wait in vain.
    """

    def __init__(self, limits: HandoffLimits) -> None:
        self._limits = limits
        self._live: dict[Line, int] = {}
        self._ended: OrderedDict[Line, int] = OrderedDict()

    def refusal(self, key: TransferKey) -> Refusal | None:
        """Why this attempt may not begin."""
        live = self._live.get(key.line, 0)
        if key.attempt == live:
            return Refusal.DUPLICATE
        if key.attempt < live:
            return Refusal.STALE
        return Refusal.OVER if self.ended(key) else None

    def begin(self, key: TransferKey) -> TransferKey | None:
        """Only after refusal() gave None. Returns the older attempt that this one ends."""
        older = self._live.get(key.line)
        self._live[key.line] = key.attempt
        return None if older is None else key.of_attempt(older)

    def end(self, key: TransferKey) -> None:
        """Idempotent, also for what never began: cancel-before-create."""
        if self._live.get(key.line, key.attempt + 1) <= key.attempt:
            del self._live[key.line]
        self._ended[key.line] = max(key.attempt, self._ended.get(key.line, 0))
        self._ended.move_to_end(key.line)
        if len(self._ended) > self._limits.max_tombstones:
            self._ended.popitem(last=False)

    def ended(self, key: TransferKey) -> bool:
        return key.attempt <= self._ended.get(key.line, 0)

    def live_up_to(self, key: TransferKey) -> TransferKey | None:
        """The live attempt that a cancel of `key` ends: itself or an older one."""
        live = self._live.get(key.line)
        return None if live is None or live > key.attempt else key.of_attempt(live)

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def tombstone_count(self) -> int:
        return len(self._ended)


class Waiter(msgspec.Struct, frozen=True):
    """A pull that came before its publication."""

    stream: int
    shown: Grant
    due: float


class OwnerTable:
    """All publications of one life of a worker. Methods return the actions to carry out, each with its transfer."""

    def __init__(self, identity: Identity, num_layers: int, limits: HandoffLimits) -> None:
        self.identity = identity
        self.limits = limits
        self.owners: dict[TransferKey, Owner] = {}
        self.attempts = Attempts(limits)
        self._num_layers = num_layers
        self._waiters: dict[int, Waiter] = {}

    @property
    def waiter_count(self) -> int:
        return len(self._waiters)

    def create(self, grant: Grant, now: float, deadline: float) -> tuple[Refusal | None, Outcome]:
        """A publication begins; an older attempt of its leg ends; pulls that waited for it are let in or refused."""
        key = grant.key
        why = Refusal.INCARNATION if grant.owner != self.identity else self.attempts.refusal(key)
        if why:
            return why, []
        outcome: Outcome = []
        older = self.attempts.live_up_to(key)
        if older:
            outcome += self.apply(older, machine.Stop(End.SUPERSEDED), now)
            self.attempts.end(older)
        self.attempts.begin(key)
        self.owners[key] = Owner(grant, deadline, self._num_layers)
        for waiter in self._take_waiters(lambda waiter: waiter.shown.key.line == key.line):
            outcome += self.open(waiter.stream, waiter.shown, now, waiter.due)
        return None, outcome

    def open(self, stream: int, shown: Grant, now: float, deadline: float) -> Outcome:
        """A pull: accepted, refused, or (no action yet) kept until the publication is created."""
        key = shown.key
        if key in self.owners:
            return self.apply(key, machine.Open(stream, shown), now)
        why: Refusal | None = None
        if shown.owner != self.identity:
            why = Refusal.INCARNATION
        elif self.attempts.refusal(key):
            why = self.attempts.refusal(key)
        elif len(self._waiters) >= self.limits.max_waiters:
            why = Refusal.TOO_MANY
        if why:
            return [(key, Refuse(stream, why))]
        self._waiters[stream] = Waiter(stream, shown, min(deadline, now + self.limits.create_wait_seconds))
        return []

    def stream_ended(self, stream: int, key: TransferKey, now: float) -> Outcome:
        self._waiters.pop(stream, None)
        return self.apply(key, machine.StreamEnd(stream), now)

    def cancel(self, key: TransferKey, now: float) -> Outcome:
        """Ends this attempt and older ones in any state; before create it leaves a tombstone. Idempotent."""
        live = self.attempts.live_up_to(key)
        outcome = self.apply(live, machine.Stop(End.CANCELLED), now) if live else []
        self.attempts.end(key)
        for waiter in self._take_waiters(lambda waiter: self.attempts.ended(waiter.shown.key)):
            outcome.append((waiter.shown.key, Refuse(waiter.stream, Refusal.OVER)))
        return outcome

    def apply(self, key: TransferKey, event: Event, now: float) -> Outcome:
        owner = self.owners.get(key)
        if owner is None:
            # Blocks of a publication that is over: its engine must hear again that nobody wants them.
            late = isinstance(event, machine.Start | machine.Finish)
            return [(key, machine.Free())] if late else []
        owner, actions = machine.step(owner, event, now, self.limits)
        self.owners[key] = owner
        if not owner.live:
            self.attempts.end(key)
        if owner.phase is Phase.RELEASED:
            del self.owners[key]
        return [(key, action) for action in actions]

    def tick(self, now: float) -> Outcome:
        outcome: Outcome = []
        for waiter in self._take_waiters(lambda waiter: waiter.due <= now):
            outcome.append((waiter.shown.key, Refuse(waiter.stream, Refusal.UNKNOWN)))
        for key in list(self.owners):
            outcome += self.apply(key, machine.Tick(), now)
        return outcome

    def next_due(self) -> float | None:
        """When tick() has something to do at the earliest."""
        dues = [waiter.due for waiter in self._waiters.values()]
        for owner in self.owners.values():
            due = machine.next_due(owner, self.limits)
            if due is not None:
                dues.append(due)
        return min(dues, default=None)

    def _take_waiters(self, condition: Callable[[Waiter], bool]) -> list[Waiter]:
        taken = [waiter for waiter in self._waiters.values() if condition(waiter)]
        for waiter in taken:
            del self._waiters[waiter.stream]
        return taken
