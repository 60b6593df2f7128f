"""The service's side of its engine."""

from collections.abc import Callable
from typing import Protocol

from common.cache.keys import EmbeddingLayout, KvLayout
from common.engine.messages import (
    AdapterLoaded,
    AnyCommand,
    AnyEvent,
    Blocks,
    Inspected,
    LoadReport,
    Ready,
    Reserve,
    Submit,
)
from common.transfer.pool_memory import PoolMemory


class EngineStream(Protocol):
    """Events of one sequence in order; ends after Done, Failed or (without decode and publish) Prefilled."""

    def __aiter__(self) -> "EngineStream": ...

    async def __anext__(self) -> AnyEvent: ...

    def drain(self) -> list[AnyEvent]:
        """Events that are already there, without waiting."""


class Engine(Protocol):
    """What services know of an engine; the real one is common.engine.process.EngineProcess."""

    ready: Ready
    layout: KvLayout
    pool: PoolMemory  # mapped writable: the service's puller fills reserved blocks
    embedding_layout: EmbeddingLayout | None  # None: the model takes no images
    embeddings: PoolMemory | None  # None: prompts with images are not computed here. The service allocates and fills it
    load: LoadReport
    heard_at: float  # when it last told anything, on the event loop's clock

    def open(self, command: Submit | Reserve) -> EngineStream: ...

    def send(self, command: AnyCommand) -> None:
        """For sequences opened before, and for Cancel of any id. Never blocks."""

    async def embeddings_freed(self, seq: str) -> None:
        """Returns once the engine reads the media blocks of this submission no more, whether it was computed, failed or
        was cancelled, or the engine is gone. At once for one that has none. Cancelling the wait changes nothing."""

    async def wait_progress(self, step: int, layers: int) -> None:
        """Returns once the pool's progress counter has reached (step, layers), or a later step."""

    def on_blocks(self, callback: Callable[[Blocks], None]) -> None:
        """Calls back with every change of the prefix index."""

    def on_load(self, callback: Callable[[LoadReport], None]) -> None: ...

    async def load_adapter(self, path: str, *, max_rank: int, max_adapters: int) -> AdapterLoaded:
        """From a directory; what is wrong with it is told in the answer. Raises EngineFailed if the engine is gone."""

    async def inspect(self) -> Inspected: ...

    async def closed(self) -> str:
        """Returns, with the cause, once the engine is gone."""

    async def close(self) -> None: ...
