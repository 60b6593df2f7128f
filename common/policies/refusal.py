"""How long a request that comes now would wait, and whether it is kinder to say no at once.

    wait ≤ tokens before it in its tenant's line / (service rate · its tenant's share)
    wait ≤ tokens of all that wait / service rate

Both hold, the first because a tenant gets its share at least, the second because no room is left unused; the smaller
one counts. The service rate is measured: prompt tokens that left the queue a second, while something waited in it.
"""

import math

import msgspec

_HORIZON_SECONDS = 5.0  # of the moving average
_WARM_SECONDS = 3.0  # of the average, some 4.6 in all, before it is believed: at first nothing has ended yet
_STALE_SECONDS = 60.0  # without anything waiting: then it is measured anew
_LEAST_HINT_SECONDS = 0.1
_LONGEST_HINT_SECONDS = 60.0


class ServiceRate:
    """Prompt tokens a second that leave a queue while it is not empty: a moving average over `_HORIZON_SECONDS` of such
    time. Instants are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # both decay, so their quotient is the average
        self._since: float | None = None  # until when time is counted; None: nothing waits
        self._emptied = -math.inf

    def waits(self, now: float) -> None:
        """Something waits from now on."""
        if self._since is None:
            if now - self._emptied > _STALE_SECONDS:
                self._tokens = self._seconds = 0.0
            self._since = now

    def served(self, now: float, tokens: int) -> None:
        self._count(now)
        self._tokens += tokens

    def empty(self, now: float) -> None:
        """Nothing waits from now on."""
        self._count(now)
        self._since, self._emptied = None, now

    def tokens_per_second(self, now: float, next_tokens: int) -> float | None:
        """None while too little is known. next_tokens: of who is first, counted as if it were served just now, so
        that a pause counts as slow, not as an end."""
        self._count(now)
        if self._seconds < _WARM_SECONDS:
            return None
        return (self._tokens + next_tokens) / self._seconds

    def _count(self, now: float) -> None:
        if self._since is None:
            return
        kept = math.exp(-(now - self._since) / _HORIZON_SECONDS)
        self._tokens *= kept
        self._seconds = self._seconds * kept + _HORIZON_SECONDS * (1 - kept)
        self._since = now


class Refusal(msgspec.Struct, frozen=True):
    """wait_seconds: what it would have waited. retry_after_seconds: when it would no longer be too much, if nothing
    else came."""

    wait_seconds: float
    retry_after_seconds: float


def wait_seconds(own_tokens: int, all_tokens: int, share: float, rate: float) -> float:
    """As in the module's formulas; tokens a second for the rate, share in (0, 1]."""
    if not own_tokens or not all_tokens:
        return 0.0
    return min(own_tokens / (rate * share), all_tokens / rate) if rate > 0 else math.inf


def refuse(wait: float, limit: float) -> Refusal | None:
    """limit: seconds that the request can wait. None: it can be met."""
    return Refusal(wait, hint(wait - limit)) if wait > limit else None


def hint(seconds: float) -> float:
    """Seconds after which a client may come back, within bounds."""
    return round(min(max(seconds, _LEAST_HINT_SECONDS), _LONGEST_HINT_SECONDS), 3)
