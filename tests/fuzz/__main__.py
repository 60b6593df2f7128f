"""make fuzz MINUTES=…: every surface in turn with new seeds, until the time is over.

SURFACE=… one of them alone; SEED=… the seed of a fault, to see it again. Exits with 1 when faults were found, which are
listed with seed and number of the input.
"""

import argparse
import asyncio
import logging
import secrets
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.fuzz.surface import Ledger, play
from tests.fuzz.tour import CI, opened
from tests.fuzz.world import world

ROUND = 200  # inputs between two looks at whether all still live


async def run(seconds: float, names: list[str], seed: str, ledger: Ledger, progress: Progress) -> None:
    """Surfaces share the time, in rounds, so that a short run visits all of them."""
    begin = time.monotonic()
    bar = progress.add_task("", total=seconds)

    def over() -> bool:
        used = time.monotonic() - begin
        told = f"{ledger.total} inputs, {len(ledger.faults)} faults"
        progress.update(bar, completed=min(used, seconds), description=told)
        return used >= seconds

    first = 0
    with tempfile.TemporaryDirectory() as directory:
        async with world(Path(directory)) as made:
            while not over():
                for name in names:
                    if not over():
                        async with opened(name, made) as surface:
                            numbers = range(first, first + ROUND)
                            await play(surface, seed, numbers, ledger, until=over, stop_at_fault=False)
                first += ROUND


def table(ledger: Ledger) -> Table:
    found = Table("surface", "inputs", "statuses", title="Inputs by surface and status")
    for name in CI:
        counts = ledger.of(name)
        if counts:
            told = ", ".join(f"{status} {count}" for status, count in counts.most_common())
            found.add_row(name, str(counts.total()), told)
    found.add_row("all", str(ledger.total), f"{len(ledger.faults)} faults")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--surface", choices=[*CI, ""], default="")
    parser.add_argument("--seed", default="")
    asked = parser.parse_args()
    seed = asked.seed or secrets.token_hex(4)
    logging.root.setLevel(logging.ERROR)
    logging.root.addHandler(logging.NullHandler())
    console, ledger = Console(), Ledger()
    console.print(f"seed {seed}")
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, redirect_stderr=False) as progress:
        asyncio.run(run(60 * asked.minutes, [asked.surface] if asked.surface else list(CI), seed, ledger, progress))
    console.print(table(ledger))
    for fault in ledger.faults:
        console.print(f"[red]FAULT[/] {fault}", markup=True, highlight=False)
    return 1 if ledger.faults else 0


if __name__ == "__main__":
    sys.exit(main())
