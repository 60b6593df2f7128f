"""A view of what is registered below one prefix: workers, gateways, keys, tenants."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic

from common import errors
from common.metrics import Metrics
from common.registry.adapter import EtcdConnection, WatchBroken
from common.registry.record import BadRecord, R, WorkerRecord, decode
from common.registry.settings import EtcdSettings

_log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0
DEFAULT_GRACE_SECONDS = 10.0
MAX_ENTRIES = 4096  # further ones are skipped: each would get a channel of its own

OnChange = Callable[[dict[str, R]], None]


class Watch(Generic[R]):
    """Lists, then follows; whenever the following ends, lists again. While etcd is away the last snapshot stands.

    A worker that is missing when we list again may have left, or etcd may have lost its memory: it stays for
    `grace_seconds`, time enough to register again. Calls to one that did leave fail and go elsewhere.

    prefix, kind: of other entries than workers, and the record that each of them must be.
    """

    def __init__(
        self,
        settings: EtcdSettings,
        on_change: OnChange[R],
        metrics: Metrics | None = None,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        *,
        prefix: str = "",
        kind: type[R] | type[WorkerRecord] = WorkerRecord,
    ) -> None:
        self._prefix = prefix or settings.workers_prefix
        self._kind: Any = kind
        self._on_change = on_change
        self._metrics = metrics
        self._grace_seconds = grace_seconds
        self._connection = EtcdConnection(settings)
        self._workers: dict[str, R] = {}
        self._following = False
        self._task: asyncio.Task[None] | None = None
        self.bad_values = 0  # entries skipped so far

    @property
    def workers(self) -> dict[str, R]:
        """Records by their id."""
        return dict(self._workers)

    @property
    def following(self) -> bool:
        """False while etcd is away and the snapshot may be old."""
        return self._following

    async def start(self) -> None:
        """Calls back with the first snapshot. Raises Unavailable or RegistryRefused if there is none in time."""
        try:
            revision = await self._list(first=True)
        except BaseException:
            await self._connection.close()
            raise
        self._task = asyncio.create_task(self._run(revision), name="registry-watch")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._following = False
        await self._connection.close()

    async def _run(self, revision: int) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                async with contextlib.aclosing(self._connection.watch(self._prefix, revision + 1)) as batches:
                    async for batch in batches:
                        self._following = True
                        pause = _FIRST_PAUSE_SECONDS
                        if batch:
                            self._apply({change.key: change.value for change in batch})
            except WatchBroken as error:
                _log.info("registry watch broken (%s); listing again", error)
            except errors.EpdError as error:
                _log.warning("registry: %s; the last snapshot stands", error.message)
            except Exception:
                _log.exception("registry watch failed; listing again")
            self._following = False
            revision = await self._relist(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _relist(self, pause: float) -> int:
        while True:
            await asyncio.sleep(pause)
            try:
                return await self._list(first=False)
            except errors.EpdError as error:
                _log.warning("registry: %s; the last snapshot stands", error.message)
            except Exception:
                _log.exception("registry listing failed")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _list(self, *, first: bool) -> int:
        entries, revision = await self._connection.entries(self._prefix)
        before, self._workers = self._workers, {}
        for entry in entries:
            self._put(entry.key, entry.value)
        for worker_id, record in before.items():
            if worker_id not in self._workers:
                self._workers[worker_id] = record
                asyncio.get_running_loop().call_later(self._grace_seconds, self._forget, worker_id, record)
        if first or self._workers != before:
            self._on_change(self.workers)
        return revision

    def _forget(self, worker_id: str, record: R) -> None:
        """Unless it has registered again: then there is another record object in its place."""
        if self._task is not None and self._workers.get(worker_id) is record:
            del self._workers[worker_id]
            self._on_change(self.workers)

    def _apply(self, changes: dict[str, bytes | None]) -> None:
        before = dict(self._workers)
        for key, value in changes.items():
            self._workers.pop(key.removeprefix(self._prefix), None)
            if value is not None:
                self._put(key, value)
        if self._workers != before:
            self._on_change(self.workers)

    def _put(self, key: str, value: bytes) -> None:
        """Takes an entry over if it is good; a bad one is counted and is as good as none."""
        try:
            record: R = decode(value, self._kind)
            if key != self._prefix + record.entry_id:
                raise BadRecord("key")
            if len(self._workers) >= MAX_ENTRIES and record.entry_id not in self._workers:
                raise BadRecord("too many")
        except BadRecord as error:
            self.bad_values += 1
            if self._metrics is not None:
                self._metrics.registry_bad_values.labels(cause=error.cause).inc()
            _log.warning("registry: an entry was skipped: %s", error.cause)
            return
        self._workers[record.entry_id] = record
