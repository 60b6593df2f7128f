"""Keys and tenants in a YAML file:

    keys:
      - {hash: <64 hexadecimal digits>, tenant: alice, name: laptop, created: '2026-01-31'}
    tenants:
      alice: {requests_per_minute: 600, requests_in_flight: 8, weight: 2.0}

`epd keys` writes the first part and leaves the second alone. Gateways look for changes.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec
import yaml

from common.errors import InvalidArgument
from common.metrics import Metrics
from common.policies.limits import TenantLimits
from services.gateway.identity.keys import KeyRecord, TenantName
from services.gateway.identity.tenants import Directory

_log = logging.getLogger(__name__)
_MODE = 0o600


class IdentityFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    keys: list[KeyRecord] = []
    tenants: dict[TenantName, TenantLimits] = {}


def read(path: Path) -> IdentityFile:
    """Raises InvalidArgument saying where the file is wrong, never what stands there."""
    try:
        found = yaml.safe_load(path.read_bytes()) or {}
        content = msgspec.convert(found, IdentityFile)
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be read: {error.strerror}; `epd keys create` makes one", field="identity.file"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise InvalidArgument(f"{path} is not valid YAML{where}", field="identity.file") from None
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}", field="identity.file") from None
    if len({key.hash for key in content.keys}) != len(content.keys):
        raise InvalidArgument(f"{path} has a key twice", field="identity.file")
    return content


def write(path: Path, content: IdentityFile) -> None:
    """In place of the old file at once, readable by its owner alone. Raises OSError."""
    keys = [{k: v for k, v in msgspec.to_builtins(key).items() if k != "protocol_version"} for key in content.keys]
    standard = msgspec.to_builtins(TenantLimits())
    tenants = {
        name: {k: v for k, v in msgspec.to_builtins(limits).items() if v != standard[k]}
        for name, limits in content.tenants.items()
    }
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its mode is 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            yaml.safe_dump({"keys": keys, "tenants": tenants}, file, sort_keys=False, allow_unicode=True)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _MODE)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class FileSource:
    """Keeps a directory as the file says. While the file is bad, or away, what it last said stands."""

    def __init__(self, path: Path, directory: Directory, metrics: Metrics, reload_seconds: float) -> None:
        self._path, self._directory, self._metrics = path, directory, metrics
        self._seconds = reload_seconds
        self._seen: tuple[int, int, int] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises InvalidArgument for a file that cannot be used."""
        self._seen = await asyncio.to_thread(self._stamp)
        self._take(await asyncio.to_thread(read, self._path))
        self._task = asyncio.create_task(self._follow(), name="identity-file")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            stamp = await asyncio.to_thread(self._stamp)
            if stamp == self._seen:
                continue
            self._seen = stamp
            try:
                self._take(await asyncio.to_thread(read, self._path))
            except InvalidArgument as error:
                self._metrics.registry_bad_values.labels(cause="identity_file").inc()
                _log.error("identity: %s; the last keys and limits stand", error.message)

    def _take(self, content: IdentityFile) -> None:
        self._directory.set_keys(content.keys)
        self._directory.set_limits(content.tenants)

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
