"""Between the readers of workers' streams and the writer to the client: what is pending goes out in one message.

A client that keeps up gets a message a step. For a slow one tokens add up here and go out together; past a bound the
readers wait, so that the workers' streams fill and they coalesce in their turn.
"""

import asyncio
from collections.abc import Sequence

from epd.v1 import generation_pb2
from services.gateway.choice import Choice


class Outbox:
    def __init__(self, choices: Sequence[Choice], *, interval: int, bound: int) -> None:
        self._choices = choices
        self._interval = interval
        self._bound = bound
        self._closed = False
        self._drained = asyncio.get_running_loop().create_future()
        self._ready: asyncio.Future[None] | None = None  # the writer waits
        self._room: asyncio.Future[None] | None = None  # readers wait

    def notify(self) -> None:
        """A choice has something new. The writer is woken only for a message that is due."""
        if self._ready is not None and not self._ready.done() and (self._closed or self._due()):
            self._ready.set_result(None)

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self.notify()

    @property
    def full(self) -> bool:
        return sum(choice.pending_tokens for choice in self._choices) > self._bound

    async def room(self) -> None:
        """Returns when the client has caught up."""
        while self.full:
            if self._room is None or self._room.done():
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    async def drained(self) -> None:
        """Returns once it is closed and the writer has taken everything."""
        await asyncio.shield(self._drained)

    def _due(self) -> bool:
        interval = self._interval
        return any(choice.ready(interval) for choice in self._choices)

    async def take(self) -> list[generation_pb2.ChoiceDelta] | None:
        """The next message's deltas, waiting for one to be due; None after the last."""
        while True:
            if self._due():
                deltas = [choice.take() for choice in self._choices if choice.ready(self._interval)]
                if self._room is not None and not self._room.done():
                    self._room.set_result(None)
                return deltas
            if self._closed:
                if not self._drained.done():
                    self._drained.set_result(None)
                return None
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
