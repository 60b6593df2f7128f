"""What `epd keys` does: keys in a file, or in etcd."""

import asyncio
import contextlib
import datetime
import fcntl
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from common import config
from common.errors import InvalidArgument, UnknownId
from common.registry.adapter import Entry, EtcdConnection
from common.registry.record import BadRecord, decode, encode
from common.registry.settings import EtcdSettings
from services.gateway.identity import file as identity_file
from services.gateway.identity.etcd import KEYS
from services.gateway.identity.keys import KeyRecord, hash_key, make_key

T = TypeVar("T")
_SHORTEST_ID = 6
_CALL_SECONDS = 15.0


class Store(Protocol):
    def all(self) -> list[KeyRecord]: ...
    def add(self, record: KeyRecord) -> None: ...
    def remove(self, record: KeyRecord) -> None: ...


def store(file: str, etcd: str) -> Store:
    """Raises InvalidArgument when neither is named."""
    if etcd:
        return EtcdStore(etcd)
    if not file:
        raise InvalidArgument("name the --file with the keys, or an --etcd", field="file")
    return FileStore(Path(file))


def create(keys: Store, tenant: str, name: str) -> str:
    """The new key. Raises InvalidArgument for what cannot be a tenant's name."""
    key = make_key()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        record = msgspec.convert(
            {"hash": hash_key(key), "tenant": tenant, "name": name, "created": today}, type=KeyRecord
        )
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"no key was made: {error}", field="tenant") from None
    keys.add(record)
    return key


def revoke(keys: Store, key_id: str) -> KeyRecord:
    """Raises InvalidArgument for an id that is too short or of several keys, UnknownId for one of none."""
    if len(key_id) < _SHORTEST_ID:
        raise InvalidArgument(f"an id has at least {_SHORTEST_ID} characters; see `epd keys list`", field="id")
    found = [record for record in keys.all() if record.hash.startswith(key_id)]
    if not found:
        raise UnknownId("there is no key with this id; see `epd keys list`", field="id")
    if len(found) > 1:
        raise InvalidArgument("several keys have ids that begin so", field="id")
    keys.remove(found[0])
    return found[0]


class FileStore:
    """A file that is there from the first key on. Two commands at a time take turns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def all(self) -> list[KeyRecord]:
        return self._read().keys

    def add(self, record: KeyRecord) -> None:
        with self._locked():
            content = self._read() if self._path.exists() else identity_file.IdentityFile()
            content.keys.append(record)
            identity_file.write(self._path, content)

    def remove(self, record: KeyRecord) -> None:
        with self._locked():
            content = self._read()
            content.keys = [each for each in content.keys if each.hash != record.hash]
            identity_file.write(self._path, content)

    def _read(self) -> identity_file.IdentityFile:
        return identity_file.read(self._path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # A file beside it: the one with the keys is replaced.
        with open(self._path.with_name(f".{self._path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class EtcdStore:
    def __init__(self, etcd: str) -> None:
        options = {"endpoints": tuple(etcd.split(",")), "call_timeout_seconds": _CALL_SECONDS}
        self._settings = config.load(EtcdSettings, "etcd", options=options)  # EPD_ETCD_USER, EPD_ETCD_CA_FILE and so on
        self._prefix = self._settings.folder(KEYS)

    def all(self) -> list[KeyRecord]:
        """Without what is no key."""
        entries, _ = self._run(lambda connection: connection.entries(self._prefix))
        found = []
        for entry in entries:
            with contextlib.suppress(BadRecord):
                found.append(decode(entry.value, KeyRecord))
        return found

    def add(self, record: KeyRecord) -> None:
        entry = Entry(self._prefix + record.entry_id, encode(record), 0)
        self._run(lambda connection: connection.put_if_version(entry))

    def remove(self, record: KeyRecord) -> None:
        self._run(lambda connection: connection.delete(self._prefix + record.entry_id))

    def _run(self, work: Callable[[EtcdConnection], Awaitable[T]]) -> T:
        async def run() -> T:
            connection = EtcdConnection(self._settings)
            try:
                return await work(connection)
            finally:
                await connection.close()

        return asyncio.run(run())
