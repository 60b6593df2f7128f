"""What the encoder's loop asks of whatever turns files into rows."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint8]  # [level, row, hidden_size · itemsize]


class ImageExecutor(Protocol):
    """The vision part of a model. `prepare` is called from several threads, the others from one."""

    name: str
    weight_bytes: int

    def prepare(self, data: bytes, rows: int) -> Any:
        """The file, ready for `forward`. Raises InvalidArgument for what is no image, or has other than `rows` rows."""

    def forward(self, prepared: Sequence[Any]) -> list[Rows]:
        """The rows of each image of a batch."""

    def warm_up(self) -> None:
        """One image, before the first real one pays for paging in the weights and for the libraries' start."""
