"""A worker's prefix index as its watchers see it: the set of keys and a bounded log of its changes."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec


class BlockChange(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that came and went; `sequence` grows by one a change. Snapshots carry the sequence they stand for."""

    sequence: int
    stored: list[bytes] = []
    removed: list[bytes] = []
    snapshot_start: bool = False
    snapshot_end: bool = False


class BlockLog:
    """Applies changes in order and replays them to watchers, by snapshot when the log no longer reaches back."""

    def __init__(self, capacity: int = 4096, snapshot_keys: int = 16384) -> None:
        self._keys: set[bytes] = set()
        self._log: deque[BlockChange] = deque(maxlen=capacity)
        self._snapshot_keys = snapshot_keys  # keys in one message: 16384 · 16 bytes is far below the message limit
        self._changed = asyncio.Event()
        self.sequence = 0

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        stored, removed = list(stored), list(removed)
        if not stored and not removed:
            return
        self._keys.difference_update(removed)
        self._keys.update(stored)
        self.sequence += 1
        self._log.append(BlockChange(sequence=self.sequence, stored=stored, removed=removed))
        self._changed.set()
        self._changed = asyncio.Event()

    def after(self, sequence: int) -> Iterator[BlockChange]:
        """Changes later than `sequence`, or a whole snapshot when the log has lost some of them (or sequence is 0)."""
        if sequence == 0 or sequence > self.sequence or (self._log and sequence + 1 < self._log[0].sequence):
            yield from self._snapshot()
            return
        yield from [change for change in self._log if change.sequence > sequence]

    def _snapshot(self) -> Iterator[BlockChange]:
        keys, size = list(self._keys), self._snapshot_keys
        pieces = [keys[i : i + size] for i in range(0, len(keys), size)] or [[]]
        sequence = self.sequence
        for i, piece in enumerate(pieces):
            yield BlockChange(sequence=sequence, stored=piece, snapshot_start=i == 0, snapshot_end=i == len(pieces) - 1)

    def changed(self) -> asyncio.Event:
        """Set at the next change; take it before reading the log so that none is missed."""
        return self._changed
