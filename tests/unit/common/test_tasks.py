"""Helpers around tasks: nothing they start outlives them."""

import asyncio

import pytest

from common.tasks import ended, unless


async def test_the_works_result_or_none() -> None:
    event = asyncio.Event()

    async def work() -> int:
        await asyncio.sleep(0)
        return 3

    assert await unless(event, work()) == 3
    assert await unless(None, work()) == 3
    event.set()
    assert await unless(event, asyncio.Event().wait()) is None


async def test_errors_of_the_work_are_raised() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await unless(asyncio.Event(), work())


@pytest.mark.parametrize("how", ["event", "cancel"])
async def test_the_work_has_ended(how: str) -> None:
    """Even one that takes its time to."""
    event, started, left = asyncio.Event(), asyncio.Event(), False

    async def work() -> None:
        nonlocal left
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(3):
                await asyncio.sleep(0)
            left = True

    task = asyncio.create_task(unless(event, work()))
    await started.wait()
    if how == "event":
        event.set()
        assert await task is None
    else:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert left


async def test_ended_outlasts_cancellation() -> None:
    release = asyncio.Event()
    inner = asyncio.create_task(release.wait())
    waiting = asyncio.create_task(ended(inner))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    release.set()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert inner.result() is True
