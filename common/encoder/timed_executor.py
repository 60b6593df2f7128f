"""The `timed` encoder: takes the time a model would take and makes deterministic rows, without a model."""

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from common.cache.keys import EmbeddingLayout
from common.encoder.executor import Rows
from common.encoder.settings import TimedVision


class TimedImageExecutor:
    """Stand-in for tests of everything around it. A file may be anything; it has as many rows as the request says."""

    name = "timed"
    weight_bytes = 0

    def __init__(
        self, model: TimedVision, layout: EmbeddingLayout, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._model, self._layout, self._sleep = model, layout, sleep

    def prepare(self, data: bytes, rows: int) -> tuple[bytes, int]:
        if self._model.preprocess_seconds:
            self._sleep(self._model.preprocess_seconds)
        return hashlib.sha256(data).digest(), rows

    def forward(self, prepared: Sequence[tuple[bytes, int]]) -> list[Rows]:
        self._sleep(self._model.base_seconds + self._model.seconds_per_row * sum(rows for _, rows in prepared))
        return [_rows(digest, rows, self._layout) for digest, rows in prepared]

    def warm_up(self) -> None:
        pass


def expected_rows(data: bytes, rows: int, layout: EmbeddingLayout) -> Rows:
    """What the pool holds for a file: uint8 [level, row, row bytes].

    As float32, every value is row + level + a fraction that only this file has.
    """
    return _rows(hashlib.sha256(data).digest(), rows, layout)


def _rows(digest: bytes, rows: int, layout: EmbeddingLayout) -> Rows:
    fraction = int.from_bytes(digest[:2], "little") / 2**16
    values = np.empty((layout.levels, rows, layout.hidden_size), np.float32)
    values[:] = (np.arange(rows)[:, None] + np.arange(layout.levels)[:, None, None]) + fraction
    return values.view(np.uint8)
