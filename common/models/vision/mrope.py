"""Three-fold positions of Qwen's vision-language models (M-RoPE, Qwen2-VL §2.1), for prompts with images."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Image(Protocol):
    """An image in a prompt, as common.engine.messages.Media and spec.Placement say it. grid: (time, height, width)."""

    @property
    def start(self) -> int: ...
    @property
    def grid(self) -> tuple[int, ...]: ...


def mrope_positions(length: int, media: Sequence[Image]) -> tuple[npt.NDArray[np.int64], int]:
    """(positions int64 [3, length], delta): time, height and width of every token of a prompt.

    Text counts on in all three. An image's tokens have the place in its grid from where the text stopped, and the text
    after it goes on behind the grid's longer side. Token n after the prompt has position n + delta in all three.
    media: in prompt order.
    """
    positions = np.empty((3, length), np.int64)
    done = position = 0
    for image in media:
        text = image.start - done
        positions[:, done : image.start] = np.arange(position, position + text)
        position += text
        time, height, width = image.grid
        done = image.start + time * height * width
        positions[:, image.start : done] = np.indices(image.grid).reshape(3, -1) + position
        position += max(height, width)
    positions[:, done:] = np.arange(position, position + length - done)
    return positions, position - done
