"""The KV pool's memory: one memfd that the engine writes, its service serves, and pullers on the same host read.

    header     magic, geometry, progress counter          one page
    generations one uint64 a block: changes when the block gets a new owner   whole pages
    data       [layer][block][unit]                        unit = one block in one layer, canonical form

A reader compares a block's generation before and after its copy; equal means that the bytes belong to the transfer.
"""

import mmap
import os
import struct
from typing import Self

import numpy as np

_HEADER = struct.Struct("<8sQQQ")  # magic, num_layers, num_blocks, unit_bytes
_MAGIC = b"epdpool1"
_PROGRESS_OFFSET = 64
_LAYER_BITS = 16
PAGE = mmap.PAGESIZE


class PoolMemory:
    """Mapped pool. `create` makes one (writable), `attach` maps the memfd of another process.

    Attributes: num_layers, num_blocks, unit_bytes, fd; `data` uint8 [num_layers, num_blocks, unit_bytes];
    `generations` uint64 [num_blocks].
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        size = os.fstat(fd).st_size
        self.fd = fd
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        magic, self.num_layers, self.num_blocks, self.unit_bytes = _HEADER.unpack_from(self._map)
        if magic != _MAGIC or size != _size(self.num_layers, self.num_blocks, self.unit_bytes):
            raise ValueError("not a pool of this version")
        self._progress = np.frombuffer(self._map, np.uint64, 1, _PROGRESS_OFFSET)
        self.generations = np.frombuffer(self._map, np.uint64, self.num_blocks, PAGE)
        count = self.num_layers * self.num_blocks * self.unit_bytes
        start = PAGE + _pages(8 * self.num_blocks)
        self.data = np.frombuffer(self._map, np.uint8, count, start).reshape(
            self.num_layers, self.num_blocks, self.unit_bytes
        )

    @classmethod
    def create(cls, num_layers: int, num_blocks: int, unit_bytes: int) -> Self:
        """A zeroed pool in a new memfd."""
        fd = os.memfd_create("epd-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, _size(num_layers, num_blocks, unit_bytes))
        os.pwrite(fd, _HEADER.pack(_MAGIC, num_layers, num_blocks, unit_bytes), 0)
        return cls(fd, writable=True)

    @classmethod
    def attach(cls, fd: int, *, writable: bool = False) -> Self:
        """Map a pool by its file descriptor, which this object then owns."""
        return cls(fd, writable=writable)

    def read_only_fd(self) -> int:
        """A new descriptor of the same memory that cannot be mapped for writing."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def set_progress(self, step: int, layers: int) -> None:
        """Engine only: in step `step`, layers [0, layers) are written. Never goes back."""
        self._progress[0] = (step << _LAYER_BITS) | layers

    def progress(self) -> tuple[int, int]:
        """(step, layers done in it). All steps before it are complete."""
        value = int(self._progress[0])
        return value >> _LAYER_BITS, value & ((1 << _LAYER_BITS) - 1)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last array that views it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _size(num_layers: int, num_blocks: int, unit_bytes: int) -> int:
    return PAGE + _pages(8 * num_blocks) + num_layers * num_blocks * unit_bytes
