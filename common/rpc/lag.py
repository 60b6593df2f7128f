"""How late the event loop is: a busy loop delays every stream of its process."""

import asyncio
import time
from collections import deque

from common.metrics import Metrics

INTERVAL_SECONDS = 0.05
WINDOW_SECONDS = 60.0


class LoopLag:
    """Sleeps 50 ms again and again and keeps by how much each sleep was too long, over the last minute."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._lags: deque[float] = deque(maxlen=round(WINDOW_SECONDS / INTERVAL_SECONDS))
        self._task: asyncio.Task[None] | None = None
        if metrics is not None:
            metrics.loop_lag.labels(quantile="0.5").set_function(lambda: self.p50)
            metrics.loop_lag.labels(quantile="0.99").set_function(lambda: self.p99)

    def start(self) -> None:
        self._task = asyncio.create_task(self._measure(), name="loop-lag")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _measure(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(INTERVAL_SECONDS)
            self.add(max(0.0, time.perf_counter() - before - INTERVAL_SECONDS))

    def add(self, seconds: float) -> None:
        self._lags.append(seconds)

    def quantile(self, share: float) -> float:
        """Seconds; 0 before the first measurement."""
        ordered = sorted(self._lags)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    @property
    def p50(self) -> float:
        return self.quantile(0.5)

    @property
    def p99(self) -> float:
        return self.quantile(0.99)
