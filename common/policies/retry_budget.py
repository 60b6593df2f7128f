"""How many further attempts there may be: a share of the recent requests, so that a broken fleet sees no storm."""

from collections import deque

import msgspec


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Over a sliding window: min_per_second · window_seconds + share · requests further attempts."""

    share: float = 0.2
    min_per_second: float = 20.0
    window_seconds: float = 10.0
    resume_share: float = 0.5  # of it for streams that have delivered tokens; only they may use this part


class RetryBudget:
    """Of one model. Instants are of one clock, in seconds; memory is bounded by the window."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._seconds: deque[list[int]] = deque()  # [second, requests, further attempts], oldest first

    def asked(self, now: float) -> None:
        """A request has come."""
        self._slot(now)[1] += 1

    def take(self, now: float, *, resume: bool) -> bool:
        """Whether there may be a further attempt, which is then counted. resume: its client has tokens already."""
        slot = self._slot(now)
        policy = self._policy
        requests = sum(each[1] for each in self._seconds)
        allowed = policy.min_per_second * policy.window_seconds + policy.share * requests
        if not resume:
            allowed *= 1 - policy.resume_share
        if sum(each[2] for each in self._seconds) + 1 > allowed:
            return False
        slot[2] += 1
        return True

    def _slot(self, now: float) -> list[int]:
        second = int(now)
        while self._seconds and self._seconds[0][0] <= second - self._policy.window_seconds:
            self._seconds.popleft()
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        return self._seconds[-1]
