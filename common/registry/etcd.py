"""The registry of the mesh: who is a member, by leases in etcd."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, overload

import msgspec

from common.metrics import Metrics
from common.registry.adapter import EtcdConnection
from common.registry.record import R, WorkerRecord
from common.registry.registration import M, Registration
from common.registry.settings import EtcdSettings
from common.registry.watch import DEFAULT_GRACE_SECONDS, OnChange, Watch

_log = logging.getLogger(__name__)

DEFAULT_TTL_SECONDS = 10
_SILENT_SECONDS = 2.0  # of waiting for etcd at the start, before we say so


class EtcdRegistry:
    """Registers workers and watches them. Its state in etcd is soft: it is rebuilt from an empty etcd by itself."""

    def __init__(self, settings: EtcdSettings, metrics: Metrics | None = None) -> None:
        self._settings = settings
        self._metrics = metrics
        self._open: list[Registration[Any] | Watch[Any]] = []

    async def start(self) -> None:
        """Waits until etcd answers. Raises Unavailable naming the endpoints, RegistryRefused, InvalidArgument."""
        patient = msgspec.structs.replace(self._settings, call_timeout_seconds=self._settings.connect_timeout_seconds)
        connection = EtcdConnection(patient)
        answer = asyncio.ensure_future(connection.get(self._settings.workers_prefix))
        try:
            await asyncio.wait((answer,), timeout=_SILENT_SECONDS)
            if not answer.done():
                _log.warning(
                    "etcd at %s does not answer yet; waiting for it, %.0f s at most",
                    ", ".join(self._settings.endpoints),
                    self._settings.connect_timeout_seconds,
                )
            await answer
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)
            await connection.close()

    async def close(self) -> None:
        """Revokes what is registered and ends all watches."""
        opened, self._open = self._open, []
        await asyncio.gather(*(one.revoke() if isinstance(one, Registration) else one.stop() for one in opened))

    async def register(
        self,
        record: M,
        ttl_seconds: int = DEFAULT_TTL_SECONDS,
        *,
        on_alive: Callable[[bool], None] | None = None,
        prefix: str = "",
    ) -> Registration[M]:
        """Registers and stays registered. `on_alive` tells readiness: once now, then at each loss and return.

        ttl_seconds: how long a dead worker stays listed, 2 at least (etcd's own limit). prefix: of other entries than
        workers.
        """

        def tell(alive: bool) -> None:
            if self._metrics is not None:
                self._metrics.registry_alive.set(alive)
            if on_alive is not None:
                on_alive(alive)

        registration = Registration(self._settings, record, ttl_seconds, tell, prefix)
        await registration.start()
        self._open.append(registration)
        return registration

    @overload
    async def watch(
        self, on_change: OnChange[WorkerRecord], *, grace_seconds: float = DEFAULT_GRACE_SECONDS
    ) -> Watch[WorkerRecord]: ...
    @overload
    async def watch(
        self,
        on_change: OnChange[R],
        *,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        prefix: str,
        kind: type[R],
    ) -> Watch[R]: ...
    async def watch(
        self,
        on_change: OnChange[Any],
        *,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        prefix: str = "",
        kind: type[Any] = WorkerRecord,
    ) -> Watch[Any]:
        """Calls back with all workers by id, or with the entries of another prefix and kind: the snapshot before this
        returns, then at every change.

        grace_seconds: how long entries stay that etcd has forgotten while it was away.
        """
        watch = Watch(self._settings, on_change, self._metrics, grace_seconds, prefix=prefix, kind=kind)
        await watch.start()
        self._open.append(watch)
        return watch
