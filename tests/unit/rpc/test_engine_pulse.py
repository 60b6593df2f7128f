"""An engine that hangs is noticed; one that is idle, or in a long step, is not taken for one."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from common.engine.messages import Inspected, LoadReport
from common.errors import EngineFailed
from common.rpc import engine_pulse
from common.rpc.engine_pulse import EnginePulse


class FakeEngine:
    def __init__(self) -> None:
        self.heard_at = 0.0
        self.asked = 0
        self.gone = False
        self.free = asyncio.Event()  # cleared: in a step
        self.free.set()
        self.pool = self
        self.steps = 0

    def progress(self) -> tuple[int, int]:
        return (self.steps, 0)

    async def inspect(self) -> Inspected:
        self.asked += 1
        await self.free.wait()
        if self.gone:
            raise EngineFailed("gone")
        return Inspected(number=self.asked, errors=[], load=LoadReport())


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(engine_pulse, "ASK_SECONDS", 0.01)
    return FakeEngine()


@pytest.fixture
async def pulse(engine: FakeEngine) -> AsyncIterator[EnginePulse]:
    made = EnginePulse(engine, 0.1)  # type: ignore[arg-type]
    made.start()
    yield made
    await made.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_hangs_and_comes_back(engine: FakeEngine, pulse: EnginePulse) -> None:
    await until(lambda: engine.asked > 3)
    assert pulse.answers
    engine.free.clear()
    await until(lambda: not pulse.answers)
    asked = engine.asked
    engine.free.set()
    await until(lambda: pulse.answers)
    await until(lambda: engine.asked > asked)


async def test_a_long_step_shows_progress(engine: FakeEngine, pulse: EnginePulse) -> None:
    engine.free.clear()
    await until(lambda: engine.asked)
    seen = []
    for _ in range(40):
        engine.steps += 1
        await asyncio.sleep(0.01)
        seen.append(pulse.answers)
    assert seen.count(True) > 30  # a moment of this machine's own may have been too long
    await until(lambda: not pulse.answers)


async def test_one_that_talks_is_not_asked(engine: FakeEngine, pulse: EnginePulse) -> None:
    engine.heard_at = float("inf")
    before = engine.asked
    await asyncio.sleep(0.1)
    assert engine.asked <= before + 1


async def test_ends_with_the_engine(engine: FakeEngine, pulse: EnginePulse) -> None:
    engine.gone = True
    assert pulse._task is not None
    await asyncio.wait_for(asyncio.shield(pulse._task), 10)
