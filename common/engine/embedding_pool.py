"""The pool of pulled image embeddings: the service fills it, the engine reads what Submit.media names."""

import numpy as np

from common.cache.keys import EmbeddingLayout
from common.engine.settings import EngineSettings
from common.transfer.pool_memory import PoolMemory


def create_embedding_pool(settings: EngineSettings, layout: EmbeddingLayout | None) -> PoolMemory | None:
    """Room for embedding_rows rows in whole blocks; None for a model without images, or without room for a block."""
    blocks = settings.embedding_rows // layout.block_rows if layout is not None else 0
    return PoolMemory.create(layout.num_layers, blocks, layout.unit_bytes) if layout is not None and blocks else None


class EmbeddingRows:
    """Reads rows of an embedding pool. Row r is row r % block_rows of block r // block_rows."""

    def __init__(self, layout: EmbeddingLayout, memory: PoolMemory) -> None:
        self.levels = layout.levels
        self._data = memory.data.reshape(layout.levels, -1, layout.hidden_size * layout.itemsize)

    def read(self, level: int, rows: np.ndarray) -> np.ndarray:
        """rows int64 [n] → uint8 [n, hidden_size · itemsize], a copy."""
        read: np.ndarray = self._data[level][rows]
        return read
