"""What one tenant may use: its limits, and how much of them is used. Pure: the clock is the caller's.

"A minute" is any sixty seconds, not those of the clock on the wall, and not a bucket that starts full: such a bucket
lets twice its size through within a minute. Charges are counted in bins of a second; a bin counts until sixty seconds
after its end, so no window of a minute ever holds more than the limit (docs/adr/0014).
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from common.errors import NeverFits, RateLimited

WINDOW_SECONDS = 60
_KINDS = ("requests", "prompt_tokens", "image_pixels")  # those that are counted by the minute
_NAMES = {kind: f"{kind}_per_minute" for kind in _KINDS} | {"in_flight": "requests_in_flight"}
_WORDS = {"requests": "requests a minute", "prompt_tokens": "prompt tokens a minute"} | {
    "image_pixels": "image pixels a minute",
    "in_flight": "requests in flight",
}


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one tenant, over all gateways together. 0 and None: no bound."""

    requests_per_minute: int = 0
    requests_in_flight: int = 0
    prompt_tokens_per_minute: int = 0  # all of a prompt's tokens, cached ones and those of images included
    image_pixels_per_minute: int = 0  # width × height as the header says
    cache_bytes: int = 0  # of KV blocks, and likewise of image embeddings, that each worker keeps for it
    weight: float = 1.0  # its share under overload, relative to other tenants'
    max_priority: int | None = None  # of its requests; a higher one is refused

    def __post_init__(self) -> None:
        bounds = (self.requests_per_minute, self.requests_in_flight, self.prompt_tokens_per_minute)
        if min(*bounds, self.image_pixels_per_minute, self.cache_bytes) < 0:
            raise ValueError("a limit is 0, for none, or positive")
        if not 0 < self.weight < math.inf:
            raise ValueError("weight must be positive and finite")

    def of(self, kind: str) -> int:
        """The limit of a field of `Amounts`."""
        return int(getattr(self, _NAMES[kind]))

    def counted(self, amounts: "Amounts") -> "Amounts":
        """Only what is bounded here."""
        return Amounts(**{kind: amount for kind, amount in amounts.items() if amount and self.of(kind)})


class Amounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a request takes of its tenant's limits."""

    requests: int = 0
    in_flight: int = 0
    prompt_tokens: int = 0
    image_pixels: int = 0

    def items(self) -> Iterator[tuple[str, int]]:
        for kind in self.__struct_fields__:
            yield kind, getattr(self, kind)

    def __bool__(self) -> bool:
        return any(amount for _, amount in self.items())


class MinuteWindow:
    """Charges of the last minute, in at most WINDOW_SECONDS + 1 bins of a second, oldest first."""

    __slots__ = ("_bins", "total")

    def __init__(self) -> None:
        self._bins: deque[list[int]] = deque()  # [second, amount]
        self.total = 0

    def used(self, now: float) -> int:
        """What counts at `now`."""
        while self._bins and now >= _end(self._bins[0][0]):
            self.total -= self._bins.popleft()[1]
        return self.total

    def charge(self, amount: int, at: float, now: float) -> None:
        """at: when, not later than now. What is older than a minute is not counted."""
        second = math.floor(at)
        if amount <= 0 or now >= _end(second):
            return
        self.total += amount
        place = len(self._bins)
        while place and self._bins[place - 1][0] > second:
            place -= 1
        if place and self._bins[place - 1][0] == second:
            self._bins[place - 1][1] += amount
        else:
            self._bins.insert(place, [second, amount])

    def give_back(self, amount: int, at: float, now: float) -> None:
        """What was charged at `at`, or a little later, and not used; nothing, once that is older than a minute.

        The oldest bins from then on lose it: what other charges lose by that was going to count no longer than this.
        """
        first = math.floor(at)
        if now >= _end(first):
            return
        for each in self._bins:
            if each[0] >= first and amount > 0:
                taken = min(amount, each[1])
                each[1] -= taken
                self.total -= taken
                amount -= taken

    def room_at(self, excess: int, now: float) -> float | None:
        """When `excess` of what is counted will have left, if nothing is charged until then; None: never."""
        for second, amount in self._bins:
            excess -= amount
            if excess <= 0:
                return max(now, _end(second))
        return None

    def bins(self) -> list[tuple[int, int]]:
        """(second, amount), oldest first."""
        return [(second, amount) for second, amount in self._bins if amount]


def _end(second: int) -> float:
    return second + 1 + WINDOW_SECONDS


class Usage:
    """One tenant's use through one gateway."""

    __slots__ = ("in_flight", "windows")

    def __init__(self) -> None:
        self.in_flight = 0
        self.windows = {kind: MinuteWindow() for kind in _KINDS}

    def used(self, kind: str, now: float) -> int:
        return self.in_flight if kind == "in_flight" else self.windows[kind].used(now)

    def add(self, amounts: Amounts, now: float) -> None:
        self.in_flight += amounts.in_flight
        for kind, window in self.windows.items():
            window.charge(getattr(amounts, kind), now, now)

    def release(self, amounts: Amounts, at: float, now: float) -> None:
        """Ends holds, and gives back what was charged at `at` and not used."""
        self.in_flight = max(0, self.in_flight - amounts.in_flight)
        for kind, window in self.windows.items():
            window.give_back(getattr(amounts, kind), at, now)

    def idle(self, now: float) -> bool:
        return not self.in_flight and not any(window.used(now) for window in self.windows.values())


class Share(msgspec.Struct, frozen=True):
    """One gateway's part of every limit while they cannot count together: one of `of`, the first ranks round up."""

    rank: int  # from 0
    of: int

    def part(self, limit: int) -> int:
        """The parts of all ranks add up to the limit."""
        return (limit + self.of - 1 - self.rank) // self.of


WHOLE = Share(0, 1)
_RETRY_SECONDS = 1.0  # where nobody knows when there will be room: when a running request will have ended


def check(
    limits: TenantLimits,
    amounts: Amounts,
    usages: Sequence[Usage],
    now: float,
    *,
    mine: Share = WHOLE,
    absent: Sequence[tuple[Usage, Share]] = (),
) -> None:
    """Whether a tenant may take `amounts` more.

    usages: those that count together, against `mine` of each limit. absent: of gateways that count for themselves just
    now; what they may take is taken. Raises RateLimited naming the limit, with the time until there is room; NeverFits
    for more than the limit would ever allow.
    """
    for kind, amount in limits.counted(amounts).items():
        if not amount:
            continue
        limit, name = limits.of(kind), _NAMES[kind]
        if amount > limit:
            raise NeverFits(f"{amount} {_WORDS[kind]} are more than this tenant's limit of {limit}", field=name)
        used = sum(usage.used(kind, now) for usage in usages)
        used += sum(max(usage.used(kind, now), share.part(limit)) for usage, share in absent)
        excess = used + amount - mine.part(limit)
        if excess > 0:
            at = _room_at(kind, usages, excess, now)
            raise RateLimited(
                f"this tenant's limit of {limit} {_WORDS[kind]} is used up",
                field=name,
                retry_after_seconds=_RETRY_SECONDS if at is None else at - now,
            )


def _room_at(kind: str, usages: Sequence[Usage], excess: int, now: float) -> float | None:
    """When `excess` will have left; None when that is not known."""
    if kind == "in_flight":
        return None
    together = MinuteWindow()
    for usage in usages:
        for second, amount in usage.windows[kind].bins():
            together.charge(amount, second, now)
    return together.room_at(excess, now)
