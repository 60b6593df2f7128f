"""The only file that knows the etcd client library. It makes up for what the library leaves to its caller:

it takes IP addresses only, retries for 0.15 s, hides broken watches, hangs on compacted ones and renews leases without
a deadline. Private attributes of the library are used where it leaves no choice; its version is pinned.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import etcd3aio
import grpc
from etcd3aio._protobuf import WatchCreateRequest, WatchRequest
from etcd3aio.kv import KVService, prefix_range_end

from common import errors
from common.registry.settings import EtcdSettings

end_of_prefix = prefix_range_end
_T = TypeVar("_T")
_TRANSIENT = (etcd3aio.EtcdConnectionError, etcd3aio.EtcdTransientError, etcd3aio.EtcdUnauthenticatedError, OSError)
_GRPC_ERRORS = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)  # the latter: closed meanwhile
_REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_CHANNEL_OPTIONS = {
    "grpc.use_local_subchannel_pool": 1,  # a new client starts without an old one's back-off
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.max_receive_message_length": 128 * 1024 * 1024,  # bad values of others must not break a listing
    "grpc.enable_http_proxy": 0,
    "grpc.keepalive_permit_without_calls": 0,  # the library pings idle connections, which etcd takes for abuse
}


class WatchBroken(Exception):
    """A watch ended, for whatever reason; list and watch anew."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A key's value; version counts writes since the key was created, 0: no such key. lease_id 0: none."""

    key: str
    value: bytes
    version: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """value None: the key is gone."""

    key: str
    value: bytes | None


class EtcdConnection:
    """One client of etcd that finds its way back after every kind of loss. One user each: a loss closes it for all."""

    def __init__(self, settings: EtcdSettings) -> None:
        self._settings = settings
        self._client: Any = None
        self._lock = asyncio.Lock()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    # --- calls ------------------------------------------------------------------------------------------------------

    async def get(self, key: str) -> Entry:
        response = await self._call(lambda client: client.kv.get(key))
        return _entry(response.kvs[0]) if response.kvs else Entry(key, b"", 0)

    async def entries(self, prefix: str) -> tuple[list[Entry], int]:
        """All entries under a prefix, and the revision they were read at."""
        response = await self._call(lambda client: client.kv.get(prefix, range_end=prefix_range_end(prefix)))
        return [_entry(found) for found in response.kvs], response.header.revision

    async def put_if_version(self, entry: Entry) -> bool:
        """Writes the value under the lease if the key still has entry.version; False if somebody was faster.

        Raises UnknownId when the lease has run out since it was granted or renewed.
        """
        unchanged = KVService.txn_compare_version(entry.key, entry.version)
        put = KVService.txn_op_put(entry.key, entry.value, lease=entry.lease_id)
        try:
            response = await self._call(lambda client: client.kv.txn(compare=[unchanged], success=[put], failure=[]))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            raise errors.UnknownId("etcd knows the lease no more") from None
        return bool(response.succeeded)

    async def delete(self, key: str) -> bool:
        """False when there was no such key."""
        response = await self._call(lambda client: client.kv.delete(key))
        return bool(response.deleted)

    async def grant(self, ttl_seconds: int) -> int:
        return int((await self._call(lambda client: client.lease.grant(ttl_seconds))).ID)

    async def revoke(self, lease_id: int) -> None:
        """Deletes the lease and its keys; an unknown lease is fine."""
        try:
            await self._call(lambda client: client.lease.revoke(lease_id))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise

    async def renew(self, lease_id: int) -> bool:
        """False when etcd knows the lease no more."""

        async def once(client: Any) -> Any:
            stream = client.lease.keep_alive(lease_id)
            try:
                return await stream.read()
            finally:
                stream.cancel()

        response = await self._call(once)
        return response is not grpc.aio.EOF and response.TTL > 0

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[list[Change], None]:
        """Changes under a prefix from a revision on; an empty list first, once etcd has accepted the watch.

        Always ends with WatchBroken: after a reconnect the revision may be compacted, or of an etcd that was wiped.
        """
        client: Any = None
        try:
            client = await self._connected(asyncio.get_running_loop().time() + self._settings.call_timeout_seconds)
            # Not client.watch.watch(): it takes a broken watch up again unseen, with the old addresses.
            stream = client.watch._stub.Watch(metadata=client.watch._metadata or None)
            try:
                await stream.write(WatchRequest(create_request=_watch_prefix(prefix, revision)))
                async for response in stream:
                    if response.canceled or response.compact_revision:
                        break
                    yield [_change(event) for event in response.events]
            finally:
                stream.cancel()
        except (etcd3aio.EtcdError, OSError, *_GRPC_ERRORS) as error:
            raise WatchBroken(type(error).__name__) from None
        finally:
            await self._drop(client)  # so that a token that has run out is renewed, and host names are looked up again
        raise WatchBroken("ended by etcd")

    async def administer(self, operation: Callable[[Any], Awaitable[Any]]) -> bool:
        """Runs an operation of the library's auth service; False when what it makes is there already."""
        try:
            await self._call(lambda client: operation(client.auth))
        except errors.RegistryRefused as error:
            if "already exist" not in error.message and "already granted" not in error.message:
                raise
            return False
        return True

    # --- connecting -------------------------------------------------------------------------------------------------

    async def _call(self, operation: Callable[[Any], Awaitable[_T]]) -> _T:
        """Runs an operation, again with a new connection while etcd cannot be reached, until the call's time is over.

        Raises Unavailable then, RegistryRefused when etcd says no.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + self._settings.call_timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        while True:
            client: Any = None
            try:
                client = await self._connected(end)
                async with asyncio.timeout_at(end):
                    return await operation(client)
            except etcd3aio.EtcdPermissionDeniedError as error:
                raise errors.RegistryRefused(f"etcd refused: {error}") from None
            except (*_TRANSIENT, *_GRPC_ERRORS) as error:
                await self._drop(client)
                if isinstance(error, grpc.aio.AioRpcError) and not _is_transient(error):
                    if error.code() in _REFUSED:
                        raise errors.RegistryRefused(f"etcd refused: {error.details()}") from None
                    raise
                if clock() + pause >= end:
                    raise errors.Unavailable(f"etcd at {self._where} cannot be reached") from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _connected(self, end: float) -> Any:
        async with asyncio.timeout_at(end), self._lock:
            if self._client is None:
                self._client = await self._connect()
            return self._client

    async def _connect(self) -> Any:
        settings = self._settings
        addresses = [address for endpoint in settings.endpoints for address in await _resolve(endpoint)]
        # One attempt: the retries are ours.
        client: Any = etcd3aio.Etcd3Client(addresses, rpc_max_attempts=1, **_tls(settings))
        client._manager.grpc_options = list((dict(client._manager.grpc_options) | _CHANNEL_OPTIONS).items())
        await client.connect()
        if settings.user:
            try:
                token = await client.auth.authenticate(settings.user, settings.password)
            except BaseException as error:
                await client.close()
                if isinstance(error, grpc.aio.AioRpcError) and error.code() in _REFUSED:
                    raise errors.RegistryRefused(f"etcd refused user {settings.user!r}: {error.details()}") from None
                raise
            client.set_token(token.token)
        return client

    async def _drop(self, client: Any) -> None:
        """Gives the connection up, unless another one has already taken its place."""
        if client is not None and self._client is client:
            await self.close()

    @property
    def _where(self) -> str:
        return ", ".join(self._settings.endpoints)


def _is_transient(error: grpc.aio.AioRpcError) -> bool:
    """Codes the library passes on raw, that a new connection or a little time can cure."""
    return error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


def _tls(settings: EtcdSettings) -> dict[str, Any]:
    """Arguments of the client. Raises InvalidArgument naming a file that cannot be read."""
    if not settings.ca_file:
        return {}
    files = {"ca_cert": settings.ca_file, "cert_chain": settings.cert_file, "cert_key": settings.key_file}
    found: dict[str, Any] = {"tls_server_name": settings.server_name or settings.endpoints[0].rpartition(":")[0]}
    for argument, path in files.items():
        try:
            found[argument] = Path(path).read_bytes() if path else None
        except OSError as error:
            raise errors.InvalidArgument(f"etcd TLS: {error.strerror}: {path}", field="etcd") from None
    return found


async def _resolve(endpoint: str) -> list[str]:
    """IPv4 addresses of host:port; the library knows no others."""
    host, _, port = endpoint.rpartition(":")
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, int(port), family=socket.AF_INET, type=socket.SOCK_STREAM)
    return sorted({f"{address[0]!s}:{port}" for *_, address in found})


def _watch_prefix(prefix: str, revision: int) -> Any:
    return WatchCreateRequest(key=prefix.encode(), range_end=prefix_range_end(prefix), start_revision=revision)


def _entry(found: Any) -> Entry:
    return Entry(found.key.decode(errors="replace"), found.value, found.version, found.lease)


def _change(event: Any) -> Change:
    deleted = event.type == event.DELETE
    return Change(event.kv.key.decode(errors="replace"), None if deleted else event.kv.value)
