"""The service's side of sequences: one's events in order, and who may still read embeddings."""

import asyncio
from collections import deque

import common.engine.messages as msg


class SequenceStream:
    """An EngineStream. Ends after Done, Failed or, when nothing follows it, Prefilled; and when the sequence is
    cancelled."""

    def __init__(self, command: msg.Submit | msg.Reserve) -> None:
        self.seq = command.seq
        self._prefilled_ends = isinstance(command, msg.Submit) and not command.decode and not command.publish
        self._events: deque[msg.AnyEvent] = deque()
        self._ended = False
        self._wake: asyncio.Future[None] | None = None

    def __aiter__(self) -> "SequenceStream":
        return self

    async def __anext__(self) -> msg.AnyEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        return self._events.popleft()

    def drain(self) -> list[msg.AnyEvent]:
        """Events that are already there, without waiting."""
        events = list(self._events)
        self._events.clear()
        return events

    def put(self, event: msg.AnyEvent) -> bool:
        """Appends an event; True when it was the last."""
        self._events.append(event)
        last = isinstance(event, msg.Done | msg.Failed) or (self._prefilled_ends and isinstance(event, msg.Prefilled))
        if last:
            self.end()
        else:
            self._notify()
        return last

    def end(self) -> None:
        self._ended = True
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class EmbeddingReaders:
    """Submissions whose image embeddings the engine may still read, cancelled ones too."""

    def __init__(self) -> None:
        self._reading: dict[str, list[asyncio.Future[None]]] = {}

    def add(self, seq: str) -> None:
        self._reading.setdefault(seq, []).append(asyncio.get_running_loop().create_future())

    def remove(self, seq: str) -> None:
        """The engine answers in the order of submission, also when a name was used again after a cancel."""
        if futures := self._reading.get(seq):
            futures.pop(0).set_result(None)
            if not futures:
                del self._reading[seq]

    def clear(self) -> None:
        for seq in list(self._reading):
            while seq in self._reading:
                self.remove(seq)

    async def wait(self, seq: str) -> None:
        """Returns once no submission of this name reads any more; at once when none does."""
        while futures := self._reading.get(seq):
            await asyncio.wait([futures[-1]])
