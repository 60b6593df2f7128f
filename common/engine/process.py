"""EngineProcess: an engine apart from the event loop, with its streams and its pool."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import common
import common.engine.messages as msg
from common.cache.keys import EmbeddingLayout, KvLayout
from common.engine.dtype import resolve_dtype
from common.engine.embedding_pool import create_embedding_pool
from common.engine.settings import EngineSettings
from common.engine.streams import EmbeddingReaders, SequenceStream
from common.engine.wire import Launch, encode, event_reader
from common.errors import DuplicateRequest, EngineFailed
from common.models.config import embedding_layout, kv_layout
from common.transfer.pool_memory import PoolMemory

log = logging.getLogger(__name__)

READY_TIMEOUT_SECONDS = 600.0  # a large model from a cold disk
CLOSE_TIMEOUT_SECONDS = 5.0


_NO_LOAD = msg.LoadReport(
    running=0,
    waiting=0,
    pending_prefill_tokens=0,
    active_blocks=0,
    free_blocks=0,
    cached_blocks=0,
    held_blocks=0,
    total_blocks=0,
    steps=0,
)


class EngineProcess(asyncio.Protocol):
    """Implements common.engine.client.Engine; made by `launch`. All methods belong to the event loop that launched
    it."""

    ready: msg.Ready

    def __init__(self, settings: EngineSettings, layout: KvLayout, embedding_layout: EmbeddingLayout | None) -> None:
        self.settings = settings
        self.layout, self.embedding_layout = layout, embedding_layout
        self.pool = PoolMemory.create(layout.num_layers, settings.num_blocks, layout.unit_bytes)
        self.embeddings = create_embedding_pool(settings, embedding_layout)
        self.load = _NO_LOAD
        self.pid: int | None = None
        self._loop = asyncio.get_running_loop()
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reader = event_reader()
        self._streams: dict[str, SequenceStream] = {}
        self._readers = EmbeddingReaders()
        self._waiters: list[tuple[tuple[int, int], asyncio.Future[None]]] = []
        self._inspections: dict[int, asyncio.Future[msg.Inspected]] = {}
        self._inspection = 0
        self._on_blocks: list[Callable[[msg.Blocks], None]] = []
        self._on_load: list[Callable[[msg.LoadReport], None]] = []
        self._transport: asyncio.WriteTransport | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._thread_cause = ""

    # --- start and end ----------------------------------------------------------------------------------------------

    @classmethod
    async def launch(cls, settings: EngineSettings, *, in_thread: bool = False) -> Self:
        """Starts an engine and returns once its model is loaded.

        in_thread: in a thread of this process, for tests. Raises InvalidArgument or ModelNotFound for a model that
        cannot be served, EngineFailed when the engine ends before it is ready.
        """
        settings = resolve_dtype(settings)
        layouts = await asyncio.to_thread(lambda: (kv_layout(settings), embedding_layout(settings)))
        engine = cls(settings, *layouts)
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            engine._loop.add_reader(engine._doorbell, engine._rung)
            await engine._loop.create_unix_connection(lambda: engine, sock=ours)
            if in_thread:
                engine._start_thread(theirs)
            else:
                await engine._start_process(theirs)
            engine._supervisor = asyncio.create_task(engine._supervise())
            either: list[asyncio.Future[Any]] = [engine._ready, engine._closed]
            await asyncio.wait(either, timeout=READY_TIMEOUT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not engine._ready.done():
                cause = engine._closed.result() if engine._closed.done() else "it took too long"
                raise EngineFailed(f"the engine did not start: {cause}")
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _start_process(self, theirs: socket.socket) -> None:
        fds = [theirs.fileno(), self._doorbell, self.pool.fd]
        if self.embeddings is not None:
            fds.append(self.embeddings.read_only_fd())
        root = str(Path(next(iter(common.__path__))).parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        threads = str(self.settings.threads)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "common.engine",
                *map(str, fds),
                pass_fds=fds,
                stdin=asyncio.subprocess.DEVNULL,
                env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": threads},
            )
        finally:
            if self.embeddings is not None:
                os.close(fds[-1])
        self.pid = self._process.pid
        theirs.close()
        assert self._transport is not None
        self._transport.write(self._launch().encode())

    def _launch(self) -> Launch:
        return Launch(self.settings, self.layout, self.embedding_layout)

    def _start_thread(self, theirs: socket.socket) -> None:
        from common.engine.loop import run_engine

        def run() -> None:
            with theirs:
                try:
                    run_engine(theirs, self._doorbell, self._launch(), self.pool, self.embeddings)
                except Exception as error:  # what would end a process must not end this one
                    self._thread_cause = f"{type(error).__name__} in the engine's thread"
                    log.exception("the engine's thread failed")

        threading.Thread(target=run, name="epd-engine", daemon=True).start()

    async def _supervise(self) -> None:
        """Waits for the engine's end and tells everybody who waits for it."""
        await self._lost
        cause = self._thread_cause or "the engine's thread ended"
        if self._process is not None:
            # It has closed its socket, so it is ending; what hangs in that is killed.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_SECONDS)
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            cause = f"the engine process ended with code {self._process.returncode}"
        error = EngineFailed(cause)
        for seq, stream in list(self._streams.items()):
            stream.put(msg.Failed(seq=seq, reason=error.reason, message=error.message))
        self._streams.clear()
        self._readers.clear()
        for waiting in [future for _, future in self._waiters] + list(self._inspections.values()):
            if not waiting.done():
                waiting.set_exception(error)
        self._waiters.clear()
        self._inspections.clear()
        self._loop.remove_reader(self._doorbell)
        os.close(self._doorbell)
        self._closed.set_result(cause)

    async def closed(self) -> str:
        return await asyncio.shield(self._closed)

    async def close(self) -> None:
        """Ends the engine within bounds: Shutdown, then SIGTERM, then SIGKILL. Idempotent."""
        if self._supervisor is not None:
            self.send(msg.Shutdown())
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
        self.pool.close()
        if self.embeddings is not None:
            self.embeddings.close()

    async def _ended(self, timeout: float) -> bool:
        await asyncio.wait([self._closed], timeout=timeout)
        return self._closed.done()

    # --- sequences --------------------------------------------------------------------------------------------------

    def open(self, command: msg.Submit | msg.Reserve) -> SequenceStream:
        """Raises DuplicateRequest while a sequence of this name lives, EngineFailed when the engine is gone."""
        if command.seq in self._streams:
            raise DuplicateRequest("the engine has this sequence already")
        if self._lost.done():
            raise EngineFailed("the engine is gone")
        stream = self._streams[command.seq] = SequenceStream(command)
        if isinstance(command, msg.Submit) and command.media:
            self._readers.add(command.seq)
        self.send(command)
        return stream

    def send(self, command: msg.AnyCommand) -> None:
        if isinstance(command, msg.Cancel) and (stream := self._streams.pop(command.seq, None)):
            stream.end()
        if self._transport is not None and not self._lost.done():
            self._transport.write(encode([command]))

    async def embeddings_freed(self, seq: str) -> None:
        await self._readers.wait(seq)

    async def wait_progress(self, step: int, layers: int) -> None:
        """Raises EngineFailed when the engine is gone before."""
        if self.pool.progress() >= (step, layers):
            return
        if self._closed.done():
            raise EngineFailed("the engine is gone")
        future: asyncio.Future[None] = self._loop.create_future()
        waiter = ((step, layers), future)
        self._waiters.append(waiter)
        try:
            await future
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def on_blocks(self, callback: Callable[[msg.Blocks], None]) -> None:
        self._on_blocks.append(callback)

    def on_load(self, callback: Callable[[msg.LoadReport], None]) -> None:
        self._on_load.append(callback)

    async def inspect(self) -> msg.Inspected:
        if self._lost.done():
            raise EngineFailed("the engine is gone")
        self._inspection += 1
        future: asyncio.Future[msg.Inspected] = self._loop.create_future()
        self._inspections[self._inspection] = future
        self.send(msg.Inspect(number=self._inspection))
        return await future

    # --- the socket's events ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self._lost.done():
            self._lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        for event in self._reader.feed(data):
            self._route(event)
        self._wake_waiters()

    def _route(self, event: msg.AnyEvent) -> None:
        match event:
            case msg.Tokens():
                mine: dict[str, msg.Tokens] = {}
                for seq, tokens in event.items:
                    mine.setdefault(seq, msg.Tokens(step=event.step, items=[])).items.append((seq, tokens))
                for seq, part in mine.items():
                    self._deliver(seq, part)
            case msg.Ready():
                self.ready = event
                if not self._ready.done():
                    self._ready.set_result(None)
            case msg.LoadReport():
                self.load = event
                for on_load in self._on_load:
                    on_load(event)
            case msg.Blocks():
                for on_blocks in self._on_blocks:
                    on_blocks(event)
            case msg.Inspected():
                inspection = self._inspections.pop(event.number, None)
                if inspection is not None and not inspection.done():
                    inspection.set_result(event)
            case msg.EmbeddingsFreed():
                self._readers.remove(event.seq)
            case _:
                self._deliver(event.seq, event)

    def _deliver(self, seq: str, event: msg.AnyEvent) -> None:
        stream = self._streams.get(seq)  # none: cancelled meanwhile
        if stream is not None and stream.put(event):
            del self._streams[seq]

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._doorbell)
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        if self._waiters:
            progress = self.pool.progress()
            for goal, future in self._waiters:
                if progress >= goal and not future.done():
                    future.set_result(None)
            self._waiters = [waiter for waiter in self._waiters if not waiter[1].done()]
