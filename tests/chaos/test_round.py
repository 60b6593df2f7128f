"""Two minutes of chaos. `make chaos` is the same for longer."""

import logging

from rich.console import Console

from tests.chaos.run import run

MINUTES = 2.0
FAULTS_AT_LEAST = 10


async def test_two_minutes_of_chaos() -> None:
    """No wrong, lost or doubled token, nothing left; a resume in mid-stream at least has been seen."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # connections that the harness resets itself
    account = await run(MINUTES, interval=3.5, clients=8, pool_size=1)
    account.show(Console(width=120))
    assert not account.failures()
    assert account.faults.total() >= FAULTS_AT_LEAST
