"""`python -m tests.chaos --minutes 20`: the run, a table, and an exit code that is 0 only when all is well."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from tests.chaos.run import run

REPORT = Path("chaos-report.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults")
    parser.add_argument("--seed", type=int, default=0, help="of faults, requests and clients")
    parser.add_argument("--interval", type=float, default=2.4, help="mean seconds between two faults")
    parser.add_argument("--clients", type=int, default=12, help="requests at once")
    parser.add_argument("--no-namespaces", action="store_true", help="partitions by proxies alone")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this directory")
    options = parser.parse_args()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # connections that we reset ourselves
    console = Console()
    with Progress(console=console) as bar:
        task = bar.add_task("starting", total=1.0)
        account = asyncio.run(
            run(
                options.minutes,
                seed=options.seed,
                interval=options.interval,
                clients=options.clients,
                use_namespaces=not options.no_namespaces,
                directory=options.logs,
                progress=lambda words, done: bar.update(task, description=words, completed=done),
            )
        )
    account.show(console)
    account.write(REPORT)
    console.print(f"written to {REPORT}")
    return 1 if account.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
