"""Stands where Jaeger does and keeps every span as a line of JSON:  python -m tests.compose.receiver FILE"""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from tests.otlp import Collector, Received

OTLP = "0.0.0.0:4317"


class Kept(list[Received]):
    """A list of spans that is a file too."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", buffering=1)

    def append(self, span: Received) -> None:
        print(json.dumps(dataclasses.asdict(span)), file=self._file)


async def main(path: Path) -> None:
    collector = Collector(bind=OTLP)
    collector.spans = Kept(path)
    async with collector:
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
