"""What one worker has cached, as its block events tell it."""

import logging

from common.cache.keys import INDEX_KEY_BYTES
from epd.v1 import worker_pb2

_log = logging.getLogger(__name__)


class BlockIndex:
    """Keys cut to INDEX_KEY_BYTES; as many as the worker can have at all, whatever it says."""

    def __init__(self, worker_id: str, bound: int) -> None:
        self.keys: set[bytes] = set()
        self.sequence = 0  # of the last event applied
        self._worker_id = worker_id
        self._bound = bound
        self._in_snapshot = False

    def begin(self) -> None:
        """A watch begins, from `sequence` on."""
        self._in_snapshot = False

    def apply(self, blocks: worker_pb2.BlockEvents) -> bool:
        """False when events were missed."""
        if blocks.snapshot_start:
            self.keys = set()
            self.sequence = 0  # until its end: a watch that breaks off in between starts over
            self._in_snapshot = True
        if not self._in_snapshot:
            if blocks.sequence > self.sequence + 1:
                missed = f"{self.sequence + 1} to {blocks.sequence - 1}"
                _log.warning("worker %s: block events %s missed", self._worker_id, missed)
                self.sequence = 0
                return False
            if blocks.sequence <= self.sequence:
                return True  # known already
        self.keys.difference_update(key[:INDEX_KEY_BYTES] for key in blocks.removed)
        room = max(0, self._bound - len(self.keys))
        self.keys.update(key[:INDEX_KEY_BYTES] for key in blocks.stored[:room])
        if blocks.snapshot_end:
            self._in_snapshot = False
        if not self._in_snapshot:
            self.sequence = blocks.sequence
        return True
