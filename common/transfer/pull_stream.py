"""The owner's end of one pull."""

import asyncio
from collections import deque

from common.errors import EpdError
from common.policies.handoff.terms import Finished, Started, Watermark
from common.transfer.key import TransferKey


class PullStream:
    """The owner's end of one pull: what is to be told, in order. Yields None once accepted, then Started, Watermark and
    Finished; ends when the puller is done; raises an EpdError when refused or ended otherwise."""

    def __init__(self, number: int, key: TransferKey) -> None:
        self.number = number
        self.key = key
        self._items: deque[Started | Watermark | Finished | None] = deque()
        self._over: EpdError | bool = False  # True: a good end
        self._wake = asyncio.Event()

    def put(self, item: Started | Watermark | Finished | None) -> None:
        if isinstance(item, Watermark) and self._items and isinstance(self._items[-1], Watermark):
            self._items.pop()  # the newer one says it all
        self._items.append(item)
        self._wake.set()

    def end(self, error: EpdError | None) -> None:
        """A bad end cuts off what was not told yet."""
        if self._over:
            return
        if error:
            self._items.clear()
        self._over = error or True
        self._wake.set()

    def __aiter__(self) -> "PullStream":
        return self

    async def __anext__(self) -> Started | Watermark | Finished | None:
        while not self._items:
            if isinstance(self._over, EpdError):
                raise self._over
            if self._over:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()
