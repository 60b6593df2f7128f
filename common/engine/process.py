"""EngineProcess: an engine apart from the event loop, with its streams and its pools."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, Self

import common.engine.messages as msg
from common.cache.keys import EmbeddingLayout, KvLayout
from common.engine.child import ComputeProcess
from common.engine.dtype import resolve_dtype
from common.engine.embedding_pool import create_embedding_pool
from common.engine.settings import EngineSettings
from common.engine.streams import EmbeddingReaders, SequenceStream
from common.engine.wire import Launch, encode, event_reader
from common.errors import DuplicateRequest, EngineFailed
from common.models.config import embedding_layout, kv_layout
from common.transfer.pool_memory import PoolMemory

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


class EngineProcess(ComputeProcess):
    """Implements common.engine.client.Engine; made by `launch`. All methods belong to the event loop that launched
    it."""

    ready: msg.Ready

    def __init__(self, settings: EngineSettings, layout: KvLayout, embedding_layout: EmbeddingLayout | None) -> None:
        super().__init__()
        self.settings = settings
        self.layout, self.embedding_layout = layout, embedding_layout
        self.pool = PoolMemory.create(layout.num_layers, settings.num_blocks, layout.unit_bytes)
        self.embeddings = create_embedding_pool(settings, embedding_layout)
        self.load = _NO_LOAD
        self.heard_at = self._loop.time()
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reader = event_reader()
        self._streams: dict[str, SequenceStream] = {}
        self._readers = EmbeddingReaders()
        self._waiters: list[tuple[tuple[int, int], asyncio.Future[None]]] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}  # of Inspect and LoadAdapter
        self._asked = 0
        self._on_blocks: list[Callable[[msg.Blocks], None]] = []
        self._on_load: list[Callable[[msg.LoadReport], None]] = []

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
        engine._loop.add_reader(engine._doorbell, engine._rung)
        launch = Launch(settings, *layouts)
        fds = [engine._doorbell, engine.pool.fd]
        if engine.embeddings is not None:
            fds.append(engine.embeddings.read_only_fd())

        def run(sock: socket.socket) -> None:
            from common.engine.loop import run_engine

            run_engine(sock, engine._doorbell, launch, engine.pool, engine.embeddings)

        try:
            await engine._start("common.engine", fds, launch.encode(), settings.threads, run if in_thread else None)
        finally:
            if engine.embeddings is not None:
                os.close(fds[-1])
        return engine

    def _shutdown_frame(self) -> bytes:
        return encode([msg.Shutdown()])

    def _fail_waiting(self, error: EngineFailed) -> None:
        for seq, stream in list(self._streams.items()):
            stream.put(msg.Failed(seq=seq, reason=error.reason, message=error.message))
        self._streams.clear()
        self._readers.clear()
        for waiting in [future for _, future in self._waiters] + list(self._answers.values()):
            if not waiting.done():
                waiting.set_exception(error)
        self._waiters.clear()
        self._answers.clear()
        self._loop.remove_reader(self._doorbell)
        os.close(self._doorbell)

    async def close(self) -> None:
        """Ends the engine within bounds. Idempotent."""
        await super().close()
        self.pool.close()
        if self.embeddings is not None:
            self.embeddings.close()

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
        self._write(encode([command]))

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
        found: msg.Inspected = await self._ask(lambda number: msg.Inspect(number=number))
        return found

    async def load_adapter(self, path: str, *, max_rank: int, max_adapters: int) -> msg.AdapterLoaded:
        found: msg.AdapterLoaded = await self._ask(
            lambda number: msg.LoadAdapter(number=number, path=path, max_rank=max_rank, max_adapters=max_adapters)
        )
        return found

    async def _ask(self, command: Callable[[int], msg.AnyCommand]) -> Any:
        if self._lost.done():
            raise EngineFailed("the engine is gone")
        self._asked += 1
        future = self._answers[self._asked] = self._loop.create_future()
        self.send(command(self._asked))
        return await future

    # --- the socket's events ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self.heard_at = self._loop.time()
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
            case msg.Inspected() | msg.AdapterLoaded():
                waiting = self._answers.pop(event.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(event)
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
