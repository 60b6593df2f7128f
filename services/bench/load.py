"""Sending a load: requests at their times, or so many at once."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from common.errors import EpdError
from services.bench.clock import Clock
from services.bench.outcome import UNFINISHED, Outcome
from services.bench.target import Target
from services.bench.workload import Ask

Told = Callable[[Outcome], None]


def _untold(outcome: Outcome) -> None:
    pass


async def open_loop(target: Target, asks: Sequence[Ask], stop: asyncio.Event, told: Told = _untold) -> list[Outcome]:
    """Each request at its own time, whatever has become of the others. Ends when all have ended, or with `stop`.

    A request is made while its time has not come yet, so that making it delays none.
    """
    clock = Clock()
    outcomes: list[Outcome] = []
    async with _Tasks() as tasks:
        for ask in asks:
            request = target.request(ask)
            if await _stopped(stop, ask.at - clock()):
                break
            outcomes.append(Outcome(number=ask.number, due=ask.at))
            tasks.add(_ask(target, request, outcomes[-1], clock, told))
        await tasks.finish(stop)
    return outcomes


async def closed_loop(
    target: Target, asks: Sequence[Ask], concurrency: int, stop: asyncio.Event, told: Told = _untold
) -> list[Outcome]:
    """`concurrency` requests at a time: the next begins when one has ended."""
    clock = Clock()
    outcomes: list[Outcome] = []

    async def take(left: Iterator[Ask]) -> None:
        for ask in left:  # one iterator, which all take from
            if stop.is_set():
                return
            request = target.request(ask)
            outcome = Outcome(number=ask.number, due=clock())
            outcomes.append(outcome)
            await _ask(target, request, outcome, clock, told)

    left = iter(asks)
    async with _Tasks() as tasks:
        for _ in range(min(concurrency, len(asks))):
            tasks.add(take(left))
        await tasks.finish(stop)
    return outcomes


async def _ask(target: Target, request: Any, outcome: Outcome, clock: Clock, told: Told) -> None:
    outcome.sent = clock()
    outcome.reason = UNFINISHED
    try:
        await target.send(request, outcome, clock)
        outcome.reason = ""
        if not outcome.arrivals:  # tokens without text, or none at all: the end is what was seen of them
            outcome.arrivals.append(clock())
    except EpdError as error:
        outcome.reason, outcome.message = error.reason, error.message
    finally:
        outcome.ended = clock()
        told(outcome)


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Waits so long, or less with `stop`; whether that is set."""
    if seconds > 0 and not stop.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stop.wait()
    return stop.is_set()


class _Tasks:
    """Running requests. Whatever ends the block, none is left behind."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def add(self, work: Any) -> None:
        self._running.add(asyncio.ensure_future(work))

    async def finish(self, stop: asyncio.Event) -> None:
        """Until all have ended, or `stop`; then what still runs is cancelled. Raises what one of them raised."""
        waiter = asyncio.ensure_future(stop.wait())
        try:
            left = set(self._running)
            while left and not stop.is_set():
                done, _ = await asyncio.wait({*left, waiter}, return_when=asyncio.FIRST_COMPLETED)
                left -= done
                for task in done - {waiter}:
                    await task
        finally:
            waiter.cancel()

    async def __aenter__(self) -> "_Tasks":
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
