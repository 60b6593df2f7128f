"""The harness with an embedding pool, as a prefill service would fill it: rooms given back are overwritten."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import common.engine.messages as msg
from common.engine.settings import TimedModel
from tests.unit.engine.harness import INSTANT, Harness

IMAGES = {name: getattr(INSTANT, name) for name in INSTANT.__struct_fields__} | {"image_hidden_size": 4}


class MediaHarness(Harness):
    """Every block is NaN unless a submission that was not answered with EmbeddingsFreed has its image there."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"timed": TimedModel(**IMAGES), "embedding_rows": 1024, **settings})
        self.freed: list[str] = []
        self._rooms: dict[str, list[int]] = {}
        self._free = list(range(self.embeddings.num_blocks))[::-1]  # out of order: blocks need not follow each other
        self._free[::2] = self._free[::2][::-1]
        self.embeddings.data[:] = 0xFF

    def place(self, seq: str, media: Sequence[msg.Media], rows: Sequence[np.ndarray] = ()) -> list[msg.Media]:
        """The same images with blocks of this pool; rows: uint8 [levels, rows, bytes] of each, written there."""
        size = self.embedding_layout.block_rows
        placed: list[msg.Media] = []
        for number, item in enumerate(media):
            blocks = [self._free.pop() for _ in range(self.embedding_layout.blocks(item.rows))]
            self._rooms.setdefault(seq, []).extend(blocks)
            for row in range(item.rows if rows else 0):
                unit = self.embeddings.data[:, blocks[row // size]].reshape(len(rows[number]), size, -1)
                unit[:, row % size] = rows[number][:, row]
                self.embeddings.data[:, blocks[row // size]] = unit.reshape(len(unit), -1)
            placed.append(with_blocks(item, blocks))
        return placed

    def _take(self, event: Any) -> None:
        super()._take(event)
        if isinstance(event, msg.EmbeddingsFreed):
            self.freed.append(event.seq)
            blocks = self._rooms.pop(event.seq, [])
            self.embeddings.data[:, blocks] = 0xFF
            self._free += blocks

    def clean(self) -> None:
        super().clean()
        assert self._rooms == {}
        assert len(self._free) == self.embeddings.num_blocks


def with_blocks(item: msg.Media, blocks: Sequence[int]) -> msg.Media:
    return msg.Media(
        key=item.key, start=item.start, length=item.length, rows=item.rows, grid=item.grid, blocks=tuple(blocks)
    )


def image(name: str, start: int, rows: int = 20) -> msg.Media:
    """For `timed`, which takes any tokens for an image's."""
    return msg.Media(key=hashlib.sha256(name.encode()).digest(), start=start, length=rows, rows=rows)
