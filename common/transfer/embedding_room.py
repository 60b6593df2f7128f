"""Where pulled embeddings lie at a worker that computes prompts, from their pull until its engine has read them."""

import asyncio
from collections import deque
from collections.abc import Sequence

from common.errors import NeverFits, Overloaded
from common.policies.handoff.terms import HandoffLimits


class EmbeddingRoom:
    """Blocks [0, num_blocks) of the engine's embedding pool.

    A request takes room for all of its images at once, in order of asking, and holds no other worker's blocks but those
    of encoders then (resource order: encoder room < embedding room < prefill blocks).
    """

    def __init__(
        self,
        num_blocks: int,
        wait_seconds: float = HandoffLimits().room_seconds,
        max_waiters: int = HandoffLimits().max_waiters,
    ) -> None:
        self.num_blocks = num_blocks
        self._wait_seconds, self._max_waiters = wait_seconds, max_waiters
        self._free = list(range(num_blocks - 1, -1, -1))
        # (blocks wanted, their time has come), who asked first is first.
        self._waiting: deque[tuple[int, asyncio.Event]] = deque()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, count: int) -> None:
        """Raises NeverFits for more than the whole room."""
        if count > self.num_blocks:
            raise NeverFits(
                f"the images take {count} blocks of rows; this worker has room for {self.num_blocks}",
                field="embeddings",
            )

    async def take(self, count: int) -> list[int]:
        """`count` blocks of unknown content; `give` them back.

        Raises NeverFits, and Overloaded when there is no room for too long, or at once when too many wait already.
        """
        self.check(count)
        if len(self._waiting) >= self._max_waiters:
            raise Overloaded(f"{len(self._waiting)} prompts wait for room for their images", retry_after_seconds=1.0)
        mine = (count, asyncio.Event())
        self._waiting.append(mine)
        self._wake_first()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await mine[1].wait()
            return [self._free.pop() for _ in range(count)]
        except TimeoutError:
            raise Overloaded("no room for image embeddings", retry_after_seconds=1.0) from None
        finally:
            self._waiting.remove(mine)
            self._wake_first()

    def give(self, blocks: Sequence[int]) -> None:
        """Nobody reads or writes them any more."""
        self._free += blocks
        self._wake_first()

    def _wake_first(self) -> None:
        # Only the first is woken, and only it takes blocks: what it was woken for is still there when it runs.
        if self._waiting and self._waiting[0][0] <= len(self._free):
            self._waiting[0][1].set()
