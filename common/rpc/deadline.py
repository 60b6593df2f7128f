"""The end of the request's time, carried from the incoming call to all calls made on its behalf.

gRPC does not forward deadlines: the server sets one for its handler, channels take it from here.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_deadline: ContextVar[float | None] = ContextVar("epd_deadline", default=None)  # time.monotonic(), seconds


def set_remaining(seconds: float | None) -> None:
    """Sets the rest of the running task's time; None: no end."""
    _deadline.set(None if seconds is None else time.monotonic() + seconds)


def remaining() -> float | None:
    """Seconds left, 0 when it is over, None when there is no end."""
    end = _deadline.get()
    return None if end is None else max(0.0, end - time.monotonic())


def cap(timeout: float | None) -> float | None:
    """The smaller of an explicit timeout and what remains."""
    left = remaining()
    if left is None:
        return timeout
    return left if timeout is None else min(timeout, left)


@contextmanager
def detached() -> Iterator[None]:
    """For work that outlives the request, such as a background task started in a handler: no end inside."""
    before = _deadline.get()
    _deadline.set(None)
    try:
        yield
    finally:
        _deadline.set(before)
