"""Two attempts side by side, when a worker of the first has fallen silent before its first token.

Whichever has a token first goes on, the other is let go. They share no stream, no ticket and no leg at the workers, so
what the slower one may still say reaches nobody.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from common.errors import EpdError, WorkerLost
from services.gateway.accounting import AttemptRecord
from services.gateway.attempt import Attempt, Turn
from services.gateway.call import CallFailed
from services.gateway.worker import Worker

HEDGE_LEG = 1 << 16  # added to the leg of a second attempt: a worker that serves both keeps them apart
Beside = Callable[[Turn, Worker], tuple[AttemptRecord, Coroutine[Any, Any, None]] | None]


class Race:
    """Of one attempt, and of the second one if it comes to that. `close` it."""

    def __init__(
        self, record: AttemptRecord, beside: Beside, ended: Callable[[str], None], won: Callable[[AttemptRecord], None]
    ) -> None:
        """beside: makes the second attempt when that worker is silent, or None when there had better be none. ended:
        told how it went. won: told when the second one speaks."""
        self.turn = Turn()
        self.turn.on_taken = self._taken
        self._record = record
        self._beside, self._ended, self._won = beside, ended, won
        self._context = contextvars.copy_context()  # the request's: suspicions arise elsewhere
        self._first: Attempt | None = None
        self._silent = ""
        self._second: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watching(self, attempt: Attempt, workers: Iterable[Worker]) -> Iterator[None]:
        """While the first attempt runs with these."""
        self._first = attempt
        watched = [(worker, self._suspicion(worker)) for worker in set(workers)]
        for worker, callback in watched:
            worker.on_suspicion.add(callback)
            if worker.suspected:
                callback()
        try:
            yield
        finally:
            self._first = None
            for worker, callback in watched:
                worker.on_suspicion.discard(callback)

    async def settle(self, failure: CallFailed | None) -> None:
        """The first attempt has ended, with a failure or not. Returns when all is well, by either; else raises."""
        if self._second is None or self.turn.speaker is self._record:
            if failure is not None:
                raise failure
            return
        try:
            await self._second
        except (CallFailed, EpdError) as second:
            if failure is None or self.turn.speaker is not None:
                raise
            raise failure from second

    async def close(self) -> None:
        if self._second is not None:
            self._second.cancel()
            await asyncio.gather(self._second, return_exceptions=True)

    def _suspicion(self, worker: Worker) -> Callable[[], None]:
        def suspected() -> None:
            if self._second is not None or self.turn.speaker is not None:
                return
            self._silent = worker.worker_id
            made = self._beside(self.turn, worker)
            if made is not None:
                record, work = made
                self._second = asyncio.get_running_loop().create_task(self._run(record, work), context=self._context)

        return suspected

    async def _run(self, record: AttemptRecord, work: Coroutine[Any, Any, None]) -> None:
        outcome = "failed"
        try:
            await work
        except asyncio.CancelledError:
            outcome = "lost"
            raise
        finally:
            self._ended("won" if self.turn.speaker is record else outcome)

    def _taken(self) -> None:
        speaker = self.turn.speaker
        assert speaker is not None
        if speaker is not self._record:
            self._record.failed = speaker.started  # given up then
            self._won(speaker)
            if self._first is not None:
                lost = WorkerLost(f"{self._silent} has fallen silent")
                self._first.abort(CallFailed(lost, self._first.worker))
        elif self._second is not None:
            self._second.cancel()
