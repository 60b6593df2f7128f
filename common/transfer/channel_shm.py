"""The same-host channel: the owner's pool itself, mapped read-only, copied once.

The owner listens on a unix socket in a directory that only its user can enter. Whoever connects gets a nonce first, the
proof of being on the same host that the puller shows when it opens its pull; then, for a ticket whose pull stream is
open, a read-only descriptor of the pool.
"""

import array
import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import socket
import stat
import struct
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Self

from common.errors import TransferFailed, Unavailable
from common.policies.handoff.terms import Span
from common.transfer.channel import BlockMap, RateLimit, check_generations, runs, settled
from common.transfer.key import Identity, TransferKey
from common.transfer.pool_memory import PoolMemory
from common.transfer.tables import PublicationTables

log = logging.getLogger(__name__)

NONCE_BYTES = 16
HANDSHAKE_SECONDS = 2.0
MAX_CLIENTS = 64
_CLAIM = struct.Struct("<16sIII16s")  # request id, leg, attempt, part, ticket
_GRANTED = b"\x01"


def socket_path(run_dir: str | Path, owner: Identity) -> Path:
    """A short name: a socket's path has about 100 characters at most."""
    name = hashlib.sha256(f"{owner.worker_id}\0{owner.incarnation}".encode()).hexdigest()[:16]
    return Path(run_dir) / f"{name}.sock"


def private_dir(run_dir: str | Path) -> Path:
    """Makes the directory; raises PermissionError when others than this user could enter it."""
    path = Path(run_dir)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} must belong to this user alone (mode 0700)")
    return path


class ShmServer:
    """The owner's socket. run_dir: shared by all workers of the host, mode 0700; made when missing."""

    def __init__(self, run_dir: str | Path, publications: PublicationTables) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._publications = publications
        self._path = socket_path(private_dir(run_dir), publications.identity)
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        self._path.unlink(missing_ok=True)
        listener.bind(str(self._path))
        listener.listen(MAX_CLIENTS)
        self._listener = listener
        self._spawn(self._accept(listener))

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)

    def _spawn(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            if len(self._tasks) > MAX_CLIENTS:
                client.close()
                continue
            self._spawn(self._serve(client))

    async def _serve(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with client, contextlib.suppress(OSError, TimeoutError):
            client.setblocking(False)
            await loop.sock_sendall(client, self.nonce)
            # The puller opens its pull between the two, and may have to wait for the publication.
            async with asyncio.timeout(self._publications.limits.create_wait_seconds + HANDSHAKE_SECONDS):
                claim = await _receive(client, _CLAIM.size)
            *fields, ticket = _CLAIM.unpack(claim)
            key = TransferKey(*fields)
            with contextlib.suppress(TransferFailed):
                table = self._publications.of(key)
                if table.has_lease(key, ticket):
                    _grant(client, table.engine.pool)
            # closing without says no


def _grant(client: socket.socket, pool: PoolMemory) -> None:
    fd = pool.read_only_fd()
    try:
        socket.send_fds(client, [_GRANTED], [fd])
    finally:
        os.close(fd)


class ShmClient:
    """The puller's connection to an owner's socket: first the nonce, then, under the lease, the pool."""

    def __init__(self, sock: socket.socket, nonce: bytes) -> None:
        self._sock = sock
        self.nonce = nonce

    @classmethod
    async def connect(cls, run_dir: str | Path, owner: Identity) -> Self | None:
        """None when the owner is not on this host, or has no socket here."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await asyncio.get_running_loop().sock_connect(sock, str(socket_path(run_dir, owner)))
                return cls(sock, await _receive(sock, NONCE_BYTES))
        except (OSError, TimeoutError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise

    async def attach(self, key: TransferKey, ticket: bytes) -> PoolMemory:
        """The owner's pool, mapped read-only. Raises Unavailable when it is not given."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                claim = _CLAIM.pack(key.request_id, key.leg, key.attempt, key.part, ticket)
                await loop.sock_sendall(self._sock, claim)
                return PoolMemory.attach(await _receive_fd(self._sock))
        except (OSError, TimeoutError, ValueError) as error:
            raise Unavailable("the owner's pool cannot be mapped") from error

    def close(self) -> None:
        self._sock.close()


class ShmChannel:
    """Copies from the owner's mapped pool in worker threads."""

    name = "shm"
    encrypted = False  # plain memory, which every process of this user can map

    def __init__(
        self,
        source: PoolMemory,
        target: PoolMemory,
        blocks: BlockMap,
        threads: Executor,
        limit: RateLimit | None = None,
    ) -> None:
        self._source, self._target, self._blocks = source, target, blocks
        self._threads = threads
        self._limit = limit

    async def read(self, spans: Sequence[Span]) -> int:
        count = 0
        for span in spans:
            copied = await settled(asyncio.get_running_loop().run_in_executor(self._threads, self._copy, span))
            count += copied
            if self._limit:
                await self._limit.take(copied)
        return count

    def _copy(self, span: Span) -> int:
        """In a thread; numpy releases the GIL. Equal generations prove that the bytes were the transfer's."""
        blocks = self._blocks
        layers = slice(span.first_layer, span.first_layer + span.layer_count)
        part = slice(span.first_block, span.first_block + span.block_count)
        source, target = blocks.source[part], blocks.target[part]
        check_generations(self._source, span, blocks.source, blocks.generations)
        for index, first, length in runs(source):
            for offset, into, count in runs(target[index : index + length]):
                begin = first + offset
                self._target.data[layers, into : into + count] = self._source.data[layers, begin : begin + count]
        check_generations(self._source, span, blocks.source, blocks.generations)
        return span.units * int(self._target.unit_bytes)


async def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


async def _receive_fd(sock: socket.socket) -> int:
    """Raises ConnectionError when the owner closes without sending a descriptor."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    fds = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_LEN(fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if data != _GRANTED or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise ConnectionError("no descriptor")
    return fds[0]
