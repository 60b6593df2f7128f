"""Whether a worker's engine still answers. The service beside it is alive in any case, and must not speak for it."""

import asyncio

from common.engine.client import Engine
from common.errors import EngineFailed

ASK_SECONDS = 0.5


class EnginePulse:
    """Asks an engine that has said nothing for a while; one in a long step shows by its progress that it works."""

    def __init__(self, engine: Engine, hang_seconds: float) -> None:
        """hang_seconds: without an answer or progress, then it counts as hanging."""
        self.answers = True
        self._engine = engine
        self._hang_seconds = hang_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_asking(), name="engine-pulse")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep_asking(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(ASK_SECONDS)
            if loop.time() - self._engine.heard_at < ASK_SECONDS:
                continue
            asked = asyncio.create_task(self._engine.inspect())
            try:
                await self._watch(asked)
                asked.result()
            except EngineFailed:
                return  # it is gone, which others notice
            finally:
                asked.cancel()
            self.answers = True

    async def _watch(self, asked: asyncio.Task[object]) -> None:
        loop, pool = asyncio.get_running_loop(), self._engine.pool
        progress, since = pool.progress(), loop.time()
        while not asked.done():
            await asyncio.wait((asked,), timeout=ASK_SECONDS)
            if pool.progress() != progress:
                progress, since = pool.progress(), loop.time()
            self.answers = loop.time() - since < self._hang_seconds
