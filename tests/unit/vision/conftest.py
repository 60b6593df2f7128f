from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.vlm_checkpoints import VLM_CHECKPOINTS, vlm_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint's directory by name, made when first asked for. Not to be changed: copy it."""
    root = tmp_path_factory.mktemp("vlm")
    return lambda name: vlm_checkpoint(name, root)


@pytest.fixture(params=VLM_CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints(request.param)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)
