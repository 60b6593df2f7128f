"""EncoderProcess: the vision part apart from the event loop, with the pool that it writes to."""

import asyncio
import socket
from collections.abc import Callable
from typing import Self

import common.encoder.messages as msg
from common.encoder.settings import EncoderSettings
from common.encoder.wire import Launch, answer_reader
from common.engine.child import ComputeProcess
from common.engine.dtype import resolve_dtype
from common.engine.settings import EngineSettings
from common.engine.wire import encode
from common.errors import EngineFailed, InvalidArgument
from common.models.config import embedding_layout
from common.transfer.pool_memory import PoolMemory


class EncoderProcess(ComputeProcess):
    """Made by `launch`. on_answer, on_gone: set them before the first command."""

    noun = "encoder"
    ready: msg.Ready

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self.layout = launch.layout
        blocks = launch.settings.rows // launch.layout.block_rows
        if blocks < 1:
            raise InvalidArgument(f"rows must be at least {launch.layout.block_rows}", field="encoder.rows")
        self.pool = PoolMemory.create(launch.layout.levels, blocks, launch.layout.unit_bytes)
        self.on_answer: Callable[[msg.AnyAnswer], None] = lambda _: None
        self.on_gone: Callable[[EngineFailed], None] = lambda _: None
        self._launched = launch
        self._reader = answer_reader()

    @classmethod
    async def launch(cls, engine: EngineSettings, settings: EncoderSettings, *, in_thread: bool = False) -> Self:
        """Returns once the vision part is loaded.

        in_thread: in a thread of this process, for tests. Raises InvalidArgument or ModelNotFound for a model that
        cannot be served or takes no images, EngineFailed when the process ends before it is ready.
        """
        engine = resolve_dtype(engine)
        layout = await asyncio.to_thread(embedding_layout, engine)
        if layout is None:
            raise InvalidArgument("the model takes no images: the role encode has nothing to do", field="roles")
        process = cls(Launch(engine, settings, layout))
        frame, run = process._launched.encode(), process._run if in_thread else None
        await process._start("common.encoder", (process.pool.fd,), frame, engine.threads, run)
        return process

    def send(self, command: msg.AnyCommand) -> None:
        """Never blocks."""
        self._write(encode([command]))

    async def close(self) -> None:
        await super().close()
        self.pool.close()

    def data_received(self, data: bytes) -> None:
        for answer in self._reader.feed(data):
            if isinstance(answer, msg.Ready):
                self.ready = answer
                if not self._ready.done():
                    self._ready.set_result(None)
            else:
                self.on_answer(answer)

    def _run(self, theirs: socket.socket) -> None:
        from common.encoder.loop import run_encoder

        run_encoder(theirs, self.pool, self._launched)

    def _fail_waiting(self, error: EngineFailed) -> None:
        self.on_gone(error)

    def _shutdown_frame(self) -> bytes:
        return encode([msg.Shutdown()])
