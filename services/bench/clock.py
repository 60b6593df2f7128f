"""Seconds since a load began."""

import time


class Clock:
    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._begin
