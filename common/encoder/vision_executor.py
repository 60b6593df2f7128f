"""The encoder of a real checkpoint: its vision part, and nothing of its language model."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from common.cache.keys import EmbeddingLayout
from common.encoder.executor import Rows
from common.engine.settings import EngineSettings
from common.errors import InvalidArgument
from common.media.images import open_image
from common.media.limits import MediaLimits
from common.models.vision.tower import Processed, VisionTower


class VisionExecutor:
    """Decodes files as common/media does, processes them as the checkpoint says, encodes them in the layout's dtype."""

    name = "modules"

    def __init__(self, engine: EngineSettings, layout: EmbeddingLayout, limits: MediaLimits) -> None:
        device = engine.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tower = VisionTower(engine.model_dir, getattr(torch, layout.dtype), device)
        self._dtype = getattr(torch, layout.dtype)
        self._limits = limits
        self.weight_bytes = self._tower.weight_bytes

    def prepare(self, data: bytes, rows: int) -> Processed:
        processed = self._tower.process([open_image(data, self._limits)])[0]
        if processed.rows != rows:
            raise InvalidArgument(f"the image makes {processed.rows} rows; its prompt has place for {rows}")
        return processed

    def forward(self, prepared: Sequence[Processed]) -> list[Rows]:
        return [_bytes(each.to("cpu", self._dtype)) for each in self._tower.forward(prepared)]

    def warm_up(self) -> None:
        # Of a common size: some processors refuse pictures that are very small.
        self._tower.forward(self._tower.process([Image.new("RGB", (64, 64), "white")]))


def _bytes(levels: torch.Tensor) -> np.ndarray:
    """[levels, rows, hidden] → uint8 [levels, rows, row bytes]."""
    return levels.contiguous().view(torch.uint8).numpy()
