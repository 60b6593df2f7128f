"""What is fuzzed, and the run: inputs by number, each made from its own random numbers."""

import asyncio
from collections import Counter
from collections.abc import Callable
from random import Random

from tests.fuzz.oracle import Fault

INPUT_SECONDS = 60.0  # a bound for broken code


class Surface:
    """One way in. `name` is unique; `at_once`: inputs under way together."""

    name = ""
    at_once = 16

    async def one(self, rng: Random) -> str:
        """Sends one input and judges the answer, whose status it returns. Raises Fault."""
        raise NotImplementedError

    async def alive(self) -> None:
        """Nothing is left of the inputs so far, and what is asked properly is answered properly. Raises Fault."""


class Ledger:
    """Inputs by surface and status, and the faults found."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def of(self, surface: str) -> Counter[str]:
        return Counter({status: count for (name, status), count in self.counts.items() if name == surface})


async def play(
    surface: Surface,
    seed: str,
    numbers: range,
    ledger: Ledger,
    *,
    until: Callable[[], bool] = lambda: False,
    stop_at_fault: bool = True,
) -> None:
    """Inputs `numbers` of a seed, in order, several at once. Raises the first Fault, or collects them in the ledger."""
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            if until():
                return
            try:
                async with asyncio.timeout(INPUT_SECONDS):
                    status = await surface.one(Random(f"{seed}/{surface.name}/{number}"))
            except Exception as error:
                while isinstance(error, ExceptionGroup):
                    error = error.exceptions[0]
                told = f"{surface.name}, seed {seed}, input {number}: {type(error).__name__} {error}"
                ledger.faults.append(told)
                ledger.counts[surface.name, "FAULT"] += 1
                if stop_at_fault:
                    raise Fault(told) from error
                continue
            ledger.counts[surface.name, status] += 1

    tasks = [asyncio.create_task(work()) for _ in range(surface.at_once)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    try:
        await surface.alive()
    except Exception as error:
        told = f"{surface.name}, seed {seed}, after inputs {numbers.start} to {numbers.stop}: {error}"
        ledger.faults.append(told)
        if stop_at_fault:
            raise Fault(told) from error
