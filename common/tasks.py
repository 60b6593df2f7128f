"""Small helpers around asyncio tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any


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
