"""Who may start now: bounds on requests in flight, unique client ids, draining."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from common.errors import Draining, DuplicateRequest, Overloaded

_RETRY_SECONDS = 1.0


class Admission:
    """Counts go back when a request ends, however it ends."""

    def __init__(self, max_in_flight: int, max_per_tenant: int = 0, max_bytes: int = 0) -> None:
        """max_per_tenant and max_bytes: 0 for no bound."""
        self._max_in_flight = max_in_flight
        self._max_per_tenant = max_per_tenant
        self._max_bytes = max_bytes
        self._bytes = 0
        self._running: set[tuple[str, str]] = set()  # tenant, client's request id
        self._by_tenant: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def in_flight(self) -> int:
        return len(self._running)

    @contextlib.contextmanager
    def admit(self, tenant: str, request_id: str, size: int = 0) -> Iterator[None]:
        """size: in bytes. Raises Draining, DuplicateRequest or Overloaded, the last with a retry hint."""
        label = (tenant, request_id)
        if self.draining:
            raise Draining("this gateway is shutting down", retry_after_seconds=_RETRY_SECONDS)
        if label in self._running:
            raise DuplicateRequest("a request with this id is running already", field="request_id")
        if len(self._running) >= self._max_in_flight:
            raise Overloaded(
                f"{self._max_in_flight} requests are in flight, as many as this gateway takes",
                retry_after_seconds=_RETRY_SECONDS,
            )
        if self._max_per_tenant and self._by_tenant[tenant] >= self._max_per_tenant:
            raise Overloaded(
                f"{self._max_per_tenant} requests of this tenant are in flight, as many as it may have",
                retry_after_seconds=_RETRY_SECONDS,
            )
        if self._max_bytes and self._running and self._bytes + size > self._max_bytes:
            raise Overloaded(
                f"the requests in flight hold {self._bytes} bytes; with this one's {size} they would be more than the "
                f"{self._max_bytes} that this gateway takes",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self._running.add(label)
        self._bytes += size
        self._by_tenant[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(label)
            self._bytes -= size
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
            if not self._running:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when nothing runs."""
        await self._idle.wait()
