"""Frames between processes of one host: of engines and encoders, and the shm channel's hand-shake at both ends."""

import asyncio
import os
import socket
import struct
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import common.encoder.wire
import common.engine.wire
from common.encoder.messages import Drop
from common.engine.messages import Cancel, Failed, Finish, LoadReport, Submit
from common.engine.wire import FrameReader, encode
from common.errors import EpdError
from common.sampling import SamplingParams
from common.transfer.channel_shm import ShmClient, socket_path
from common.transfer.key import Identity, TransferKey
from common.transfer.pool_memory import PoolMemory
from tests.fuzz.messages import damaged
from tests.fuzz.oracle import Fault
from tests.fuzz.surface import Surface
from tests.fuzz.world import World

_COMMANDS = (
    Submit(seq="a", prompt=[1, 2], output=[], choices=[0], sampling=SamplingParams()),
    Cancel(seq="a"),
    Finish(seq="a", choices=[1]),
)
_EVENTS = (LoadReport(), Failed(seq="a", reason="x", message="y"))


class EngineFrames(Surface):
    """What no frame of ours is ends with ValueError, which the connection takes for the peer's end."""

    name = "engine frames"
    at_once = 1

    async def one(self, rng: Random) -> str:
        reader: FrameReader[Any]
        kind = rng.randrange(3)
        if kind == 0:
            data, reader = encode(rng.choices(_COMMANDS, k=3)), common.engine.wire.command_reader()
        elif kind == 1:
            data, reader = encode(rng.choices(_EVENTS, k=3)), common.engine.wire.event_reader()
        else:
            data, reader = encode([Drop(job=3)]), common.encoder.wire.command_reader()
        body = data[4:]
        match rng.randrange(4):
            case 0:
                data = damaged(rng, data)
            case 1:
                body = damaged(rng, body)
                data = struct.pack("<I", len(body)) + body
            case 2:
                body = b"\x91" * rng.choice((10, 20_000)) + body
                data = struct.pack("<I", len(body)) + body
        cut = rng.randrange(len(data) + 1)
        try:
            found = [*reader.feed(data[:cut]), *reader.feed(data[cut:])]
        except ValueError:
            return "refused"
        return "OK" if found else "incomplete"

    async def alive(self) -> None:
        if len(list(common.engine.wire.command_reader().feed(encode(_COMMANDS)))) != len(_COMMANDS):
            raise Fault("good frames are not read any more")


class Handshakes(Surface):
    """An owner's socket with wrong claims; a puller that meets a wrong owner."""

    name = "shm hand-shake"
    at_once = 8

    def __init__(self, world: World) -> None:
        self._world = world
        self._directory = Path(tempfile.mkdtemp(dir=world.directory))
        self._number = 0

    async def one(self, rng: Random) -> str:
        return await (self._claim(rng) if rng.random() < 0.5 else self._meet(rng))

    async def _claim(self, rng: Random) -> str:
        worker = self._world.worker(rng.choice(("encode", "prefill")))
        path = socket_path(self._world.directory / "run", worker.context.identity)
        reader, writer = await asyncio.open_unix_connection(str(path))
        try:
            if len(await reader.readexactly(16)) != 16:
                raise Fault("no nonce")
            claim = rng.randbytes(16) + struct.pack("<III", *(rng.choice((0, 1, 2**32 - 1)) for _ in range(3)))
            writer.write(
                (claim + rng.randbytes(16))[: rng.choice((0, 1, 43, 44, 44))] + rng.randbytes(rng.choice((0, 0, 9)))
            )
            writer.write_eof()
            if await reader.read(100):
                raise Fault("a wrong claim was granted")
        except ConnectionError:
            pass  # closed before it had read everything
        finally:
            writer.close()
        return "refused"

    async def _meet(self, rng: Random) -> str:
        """The owner sends too little, nothing, or descriptors of something else."""
        self._number += 1
        owner = Identity("evil", str(self._number))
        path = socket_path(self._directory, owner)

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock: socket.socket = writer.get_extra_info("socket")._sock
            writer.write(rng.randbytes(rng.choice((0, 15, 16, 16, 16))))
            await writer.drain()
            fds = [_descriptor(rng) for _ in range(rng.choice((0, 1, 1, 2)))]
            try:
                if fds:
                    socket.send_fds(sock, [rng.choice((b"\x01", b"\x00"))], fds)
            except OSError:
                pass  # gone already
            finally:
                for fd in fds:
                    os.close(fd)
                writer.close()

        server = await asyncio.start_unix_server(serve, str(path))
        async with server:
            client = await ShmClient.connect(self._directory, owner)
            if client is None:
                return "no owner"
            try:
                memory = await client.attach(TransferKey(bytes(16), 0, 1), bytes(16))
            except EpdError as error:
                return error.reason
            finally:
                client.close()
            memory.close()
            return "OK"

    async def alive(self) -> None:
        await self._world.alive()


def _descriptor(rng: Random) -> int:
    """Of a device, an empty file, a file of noise, a pool whose header lies, or a pool."""
    kind = rng.randrange(5)
    if kind == 0:
        return os.open("/dev/null", os.O_RDONLY)
    if kind == 1:
        return os.memfd_create("fuzz")
    if kind == 2:
        fd = os.memfd_create("fuzz")
        os.write(fd, rng.randbytes(rng.choice((1, 31, 32, 4096, 9000))))
        return fd
    pool = PoolMemory.create(2, 4, 64)
    if kind == 3:
        lie = rng.choice((0, 1, 2**31, 2**63, 2**64 - 1))
        os.pwrite(pool.fd, struct.pack("<Q", lie), rng.choice((8, 16, 24)))
    return os.dup(pool.fd)
