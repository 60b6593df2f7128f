"""A TCP proxy in front of one process: it cuts connections and holds what passes, without any rights."""

import asyncio
import contextlib
import socket
import struct

_CHUNK = 64 * 1024  # bytes
_CONNECT_SECONDS = 5.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class Proxy:
    """Connections are passed on from one address to another as they come."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._listen, self._target = listen, target
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Raises OSError when it cannot listen."""
        self._server = await asyncio.start_server(self._accepted, *self._listen, limit=_CHUNK)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> int:
        """Resets every connection, on both sides; how many there were."""
        for writer in self._open:
            _reset(writer)
        return len(self._open) // 2

    def hold(self) -> None:
        """Nothing passes in either direction and nobody is told: a partition. New connections wait."""
        self._flowing.clear()

    def go_on(self) -> None:
        self._flowing.set()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._open.add(writer)
        onwards: asyncio.StreamWriter | None = None
        try:
            await self._flowing.wait()
            there, onwards = await asyncio.wait_for(asyncio.open_connection(*self._target), _CONNECT_SECONDS)
            self._open.add(onwards)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, onwards))
                group.create_task(self._pass(there, writer))
        except* (OSError, TimeoutError):
            _reset(writer)
            if onwards is not None:
                _reset(onwards)
        finally:
            for each in (writer, onwards):
                if each is not None:
                    self._open.discard(each)
                    each.close()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            await self._flowing.wait()
            sink.write(data)
            await sink.drain()
        await self._flowing.wait()  # an end travels no faster than data
        with contextlib.suppress(OSError):
            sink.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        connection = writer.get_extra_info("socket")
        if connection is not None and connection.fileno() >= 0:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
