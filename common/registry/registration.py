"""The own entry of a worker, or of a gateway, in the registry, kept there as long as it lives."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from common import errors
from common.registry.adapter import Entry, EtcdConnection
from common.registry.record import BadRecord, Member, decode, encode
from common.registry.settings import EtcdSettings

_log = logging.getLogger(__name__)
M = TypeVar("M", bound=Member)
_PAUSE_SECONDS = 0.2  # between attempts at the start, each of which has waited already


class _Replaced(Exception):
    """The entry belongs to another life of this worker that registered after us."""


class Registration(Generic[M]):
    """Holds a lease, renews it three times per TTL, and looks each time whether the entry is still there and right.

    A lost lease, a deleted entry or an etcd that came back empty lead to a new registration at once. An entry of
    another incarnation is overwritten only at the start, when it is an earlier life's; later it is a successor's.
    """

    def __init__(
        self,
        settings: EtcdSettings,
        record: M,
        ttl_seconds: int,
        on_alive: Callable[[bool], None],
        prefix: str = "",
    ) -> None:
        """prefix: of other entries than workers."""
        self._key = (prefix or settings.workers_prefix) + record.entry_id
        self._record = record
        self._value = encode(record)
        self._written = b""  # the value that etcd has
        self._ttl = ttl_seconds
        self._patience = settings.connect_timeout_seconds
        self._on_alive = on_alive
        self._told: bool | None = None
        self._connection = EtcdConnection(settings)
        self._lease_id = 0
        self._alive_until = float("-inf")  # time.monotonic()
        self._changed = asyncio.Condition()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def record(self) -> M:
        return self._record

    @property
    def alive(self) -> bool:
        """False once the TTL has passed without a renewal that etcd confirmed, or when the entry is another's."""
        return time.monotonic() < self._alive_until

    async def start(self) -> None:
        """Registers, and says so; says that it has not, while etcd is away. Raises Unavailable after the settings'
        connect_timeout_seconds, RegistryRefused."""
        try:
            await self._register()
        except BaseException:
            await self._connection.close()
            raise
        self._tasks = [
            asyncio.create_task(self._keep(), name="registration"),
            asyncio.create_task(self._tell(), name="registration-alive"),
        ]

    async def _register(self) -> None:
        end = time.monotonic() + self._patience
        while True:
            try:
                return await self._renew(first=True)
            except errors.Unavailable as error:
                if time.monotonic() >= end:
                    raise
                _log.warning("%s is not registered yet: %s", self._record.entry_id, error.message)
                self._report()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def update(self, record: M, timeout_seconds: float = 5.0) -> None:
        """Replaces the record, for example by a draining one.

        Raises Unavailable when etcd has not taken it in time; it will be written as soon as that is possible.
        """
        if (record.entry_id, record.incarnation) != (self._record.entry_id, self._record.incarnation):
            raise errors.InvalidArgument("a registration is of one life of one worker", field="record")
        self._record, self._value = record, encode(record)
        self._wake.set()
        try:
            async with asyncio.timeout(timeout_seconds), self._changed:
                await self._changed.wait_for(lambda: self._written == self._value)
        except TimeoutError:
            raise errors.Unavailable("etcd has not taken the new record yet") from None

    async def revoke(self, timeout_seconds: float = 2.0) -> None:
        """Takes the entry out and ends. With etcd away it ends all the same; the lease then runs out by itself."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._alive_until = float("-inf")
        self._report()
        with contextlib.suppress(TimeoutError, errors.EpdError):
            async with asyncio.timeout(timeout_seconds):
                await self._connection.revoke(self._lease_id)
        await self._connection.close()

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl / 3):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self._renew(first=False)
            except _Replaced:
                self._alive_until = float("-inf")
                _log.error("another one has registered as %s; this one gets no requests", self._record.entry_id)
            except errors.EpdError as error:
                _log.warning("registration not renewed: %s", error.message)
            except Exception:
                _log.exception("registration not renewed")
            await self._notify()

    async def _renew(self, *, first: bool) -> None:
        """One round: lease, then entry. Raises errors of the connection, and _Replaced."""
        asked_at = time.monotonic()
        if not self._lease_id or not await self._connection.renew(self._lease_id):
            if self._lease_id:
                _log.warning("lease of %s was lost; registering again", self._record.entry_id)
                self._lease_id = 0
                self._alive_until = float("-inf")
                await self._notify()
            # Counted from before the call, so that we never believe longer than etcd does.
            asked_at = time.monotonic()
            self._lease_id = await self._connection.grant(self._ttl)
        entry = await self._connection.get(self._key)
        while entry.value != self._value or entry.lease_id != self._lease_id:
            if not first and entry.version and not self._is_mine(entry):
                raise _Replaced
            value = self._value
            await self._connection.put_if_version(Entry(self._key, value, entry.version, self._lease_id))
            entry = await self._connection.get(self._key)
        self._written = entry.value
        self._alive_until = asked_at + self._ttl
        if not self.alive:
            self._wake.set()  # etcd took longer than the TTL to answer: ask again at once
        await self._notify()

    def _is_mine(self, entry: Entry) -> bool:
        try:
            return decode(entry.value, type(self._record)).incarnation == self._record.incarnation
        except BadRecord:
            return True  # nobody's; ours is better

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _tell(self) -> None:
        """Reports every change of `alive`, also the one that happens because nothing happens."""
        while True:
            self._report()
            left = self._alive_until - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left if left > 0 else None), self._changed:
                    await self._changed.wait()

    def _report(self) -> None:
        alive = self.alive
        if alive is not self._told:
            self._told = alive
            self._on_alive(alive)
