"""A process that computes, apart from the event loop: its start, its socket, its end. Engines and encoders are such."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
from common.errors import EngineFailed
from common.process import PARENT_VARIABLE

log = logging.getLogger(__name__)

READY_TIMEOUT_SECONDS = 600.0  # a large model from a cold disk
CLOSE_TIMEOUT_SECONDS = 5.0


class ComputeProcess(asyncio.Protocol):
    """A child process, or a thread of this one, behind a socket. All methods belong to the event loop that made it.

    Subclasses say what a lost process means for those who wait (`_fail_waiting`), what to send to end it
    (`_shutdown_frame`), and read its frames (`data_received`, which sets `_ready` once it can be used).
    """

    noun = "engine"  # in errors

    def __init__(self) -> None:
        self.pid: int | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._thread_cause = ""

    # --- what subclasses add ----------------------------------------------------------------------------------------

    def _fail_waiting(self, error: EngineFailed) -> None:
        """The process is gone: whoever waits for it gets this error."""
        raise NotImplementedError

    def _shutdown_frame(self) -> bytes:
        raise NotImplementedError

    # --- start and end ----------------------------------------------------------------------------------------------

    async def _start(
        self, module: str, fds: Sequence[int], launch: bytes, threads: int, run: Callable[[socket.socket], None] | None
    ) -> None:
        """Returns once the process is ready. Raises EngineFailed when it ends before.

        module: run by `python -m` with the socket's and these descriptors as arguments; launch: its first frame.
        run: instead of a process, in a thread.
        """
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            await self._loop.create_unix_connection(lambda: self, sock=ours)
            if run is not None:
                self._start_thread(theirs, run)
            else:
                await self._start_process(module, theirs, fds, launch, threads)
            self._supervisor = asyncio.create_task(self._supervise())
            either: list[asyncio.Future[Any]] = [self._ready, self._closed]
            await asyncio.wait(either, timeout=READY_TIMEOUT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                cause = self._closed.result() if self._closed.done() else "it took too long"
                raise EngineFailed(f"the {self.noun} did not start: {cause}")
        except BaseException:
            await self.close()
            raise

    async def _start_process(
        self, module: str, theirs: socket.socket, fds: Sequence[int], launch: bytes, threads: int
    ) -> None:
        fds = (theirs.fileno(), *fds)
        root = str(Path(next(iter(common.__path__))).parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *map(str, fds),
            pass_fds=fds,
            stdin=asyncio.subprocess.DEVNULL,
            env={
                "OMP_WAIT_POLICY": "passive",
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": str(threads),
                PARENT_VARIABLE: str(os.getpid()),
            },
        )
        self.pid = self._process.pid
        theirs.close()
        assert self._transport is not None
        self._transport.write(launch)

    def _start_thread(self, theirs: socket.socket, run: Callable[[socket.socket], None]) -> None:
        def guarded() -> None:
            with theirs:
                try:
                    run(theirs)
                except Exception as error:  # what would end a process must not end this one
                    self._thread_cause = f"{type(error).__name__} in the {self.noun}'s thread"
                    log.exception("the %s's thread failed", self.noun)

        threading.Thread(target=guarded, name=f"epd-{self.noun}", daemon=True).start()

    async def _supervise(self) -> None:
        """Waits for the end and tells everybody who waits for it."""
        await self._lost
        cause = self._thread_cause or f"the {self.noun}'s thread ended"
        if self._process is not None:
            # It has closed its socket, so it is ending; what hangs in that is killed.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            cause = f"the {self.noun} process ended with code {self._process.returncode}"
        self._fail_waiting(EngineFailed(cause))
        self._closed.set_result(cause)

    async def closed(self) -> str:
        """Returns, with the cause, once the process is gone."""
        return await asyncio.shield(self._closed)

    async def close(self) -> None:
        """Ends it within bounds: a word, then SIGTERM, then SIGKILL. Idempotent."""
        if self._supervisor is not None:
            self._write(self._shutdown_frame())
            if not await self._ended(CLOSE_TIMEOUT_SECONDS) and self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                if not await self._ended(CLOSE_TIMEOUT_SECONDS):
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
        if self._transport is not None:
            self._transport.abort()
        if self._supervisor is not None:
            await self._ended(2 * CLOSE_TIMEOUT_SECONDS)

    async def _ended(self, timeout: float) -> bool:
        await asyncio.wait([self._closed], timeout=timeout)
        return self._closed.done()

    # --- the socket -------------------------------------------------------------------------------------------------

    def _write(self, frame: bytes) -> None:
        """Never blocks; without effect once the process is gone."""
        if self._transport is not None and not self._lost.done():
            self._transport.write(frame)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
