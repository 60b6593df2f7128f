"""Small helpers around asyncio tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def first(*coroutines: Coroutine[Any, Any, Any]) -> int:
    """Runs all until one ends, cancels the others, and returns that one's index. Raises what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    winner = next(task for task in tasks if task in done)
    winner.result()
    return tasks.index(winner)


async def together(*tasks: asyncio.Task[Any]) -> None:
    """Returns when all have ended; a cancelled one counts as ended. The first failure cancels the others, is waited for
    with them and raised.

    Not asyncio.TaskGroup: up to Python 3.12 a child's failure leaves the parent with a cancellation that nobody asked
    for, and the next timeout around it raises CancelledError instead of TimeoutError.
    """
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and not task.cancelled() and task.exception() is not None]
    finally:
        for task in tasks:
            task.cancel()
        await ended(*tasks)
    if failed:
        failed[0].result()


async def unless(event: asyncio.Event | None, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work returns or raises; None when the event is set first. The work has ended in every case."""
    task = asyncio.ensure_future(work)
    waiting = None if event is None else asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task] if waiting is None else [task, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()  # without effect on what has ended
        if waiting is not None:
            waiting.cancel()
        await ended(task)
    return None if task.cancelled() else task.result()


async def ended(*tasks: asyncio.Task[Any]) -> None:
    """Returns when all have ended, whatever they raised; cancelled meanwhile, it raises that afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved
    if cancelled:
        raise cancelled
