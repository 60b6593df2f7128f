"""Whether to call a peer: a circuit that opens when calls to it fail, and closes again when one succeeds.

    closed ── failures ──► open ── back-off over ──► half-open ── a probe succeeds ──► closed
                             ▲                           │
                             └─────── a probe fails ─────┘

Nothing is shut out for good: the back-off is bounded, and after it real calls are let through, few at a time. A pure
machine: the caller brings the clock and the randomness.
"""

from collections import deque
from collections.abc import Callable
from enum import StrEnum

import msgspec


class CircuitPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds. Only failures that say something about the peer are to be counted."""

    failures: int = 3  # in a row
    share: float = 0.5  # failed of the last `window` calls, when there were so many
    window: int = 20
    open_seconds: float = 0.5  # the first time; doubles each time
    longest_seconds: float = 15.0
    jitter: float = 0.5  # part of it that is drawn: not all gateways come back at once
    probes: int = 1  # calls at once while half-open


class State(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Circuit:
    """Of one peer, or of one pair. Instants are of one clock, in seconds.

    An outcome counts once for all calls it struck: a failure only if its call began after the failure before it, a
    success in an open circuit only if its call began after it had opened.
    """

    def __init__(self, policy: CircuitPolicy, draw: Callable[[], float]) -> None:
        """draw: uniform in [0, 1)."""
        self._policy = policy
        self._draw = draw
        self._outcomes: deque[bool] = deque(maxlen=policy.window)  # True: failed
        self._in_row = 0
        self._trips = 0  # in close succession
        self._opened_at: float | None = None
        self._closed_at = float("-inf")
        self._failed_at = float("-inf")
        self._probes = 0  # under way
        self.until = 0.0  # when an open circuit becomes half-open

    def state(self, now: float) -> State:
        if self._opened_at is None:
            return State.CLOSED
        return State.OPEN if now < self.until else State.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether another call may begin."""
        state = self.state(now)
        return state is State.CLOSED or (state is State.HALF_OPEN and self._probes < self._policy.probes)

    def began(self, now: float) -> bool:
        """A call; `ended` must follow, with the answer: whether it is a probe."""
        probe = self.state(now) is State.HALF_OPEN
        self._probes += probe
        return probe

    def ended(self, probe: bool) -> None:
        """A call, whatever came of it."""
        self._probes -= probe

    def failed(self, began: float, now: float) -> bool:
        """A call that began then has failed. Whether the circuit opened by that."""
        if began < self._failed_at or self.state(now) is State.OPEN:
            return False
        self._failed_at = now
        self._in_row += 1
        self._outcomes.append(True)
        full = len(self._outcomes) == self._policy.window
        often = full and sum(self._outcomes) >= self._policy.share * len(self._outcomes)
        if self._opened_at is not None or self._in_row >= self._policy.failures or often:
            self._open(now)
            return True
        return False

    def succeeded(self, began: float, now: float) -> bool:
        """A call that began then has done its work. Whether the circuit closed by that."""
        if self._opened_at is not None and began < self._opened_at:
            return False
        self._in_row = 0
        self._outcomes.append(False)
        if self._opened_at is None:
            return False
        self._opened_at = None
        self._closed_at = now
        return True

    def _open(self, now: float) -> None:
        policy = self._policy
        if self._opened_at is None and now - self._closed_at > policy.longest_seconds:
            self._trips = 0
        length = min(policy.longest_seconds, policy.open_seconds * 2.0 ** min(self._trips, 30))
        self._trips += 1
        self._opened_at = now
        self.until = now + length * (1 - policy.jitter * self._draw())
        self._outcomes.clear()
        self._in_row = 0
