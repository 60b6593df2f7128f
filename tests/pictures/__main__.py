"""`make pictures`: docs/pictures/ anew, the trace of one request and every provisioned dashboard.

Runs a mesh under load on this machine and a Prometheus that scrapes it as in compose, asks it each panel's
own queries, and draws the answers. Fails when a panel has no data that should have some.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.pictures import panels
from tests.pictures.draw import draw
from tests.pictures.prometheus import binary, prometheus
from tests.pictures.scene import default_scene, loaded_scene

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
KINDS = ["trace", "dashboards"]
ANSWERS = ROOT / ".run" / "pictures.json"


async def trace(directory: Path) -> None:
    async with default_scene(directory) as staged:
        await staged.trace(PICTURES / "trace.svg")
    print(PICTURES / "trace.svg", flush=True)


async def collect(minutes: float, program: str, directory: Path) -> list[panels.Board]:
    """What the dashboards say of some minutes of load. directory: an empty one, for logs and data."""
    async with loaded_scene(directory) as staged, prometheus(program, directory, staged.targets) as server:
        await server.scraping()
        print(f"{minutes:g} minutes of load", flush=True)
        start = time.time()
        await staged.load(60 * minutes)
        return await panels.ask(server, start, start + 60 * minutes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make pictures", description=__doc__)
    parser.add_argument("which", nargs="*", default=KINDS, help=" and ".join(KINDS))
    parser.add_argument("--minutes", type=float, default=4.0, help="of load")
    parser.add_argument("--prometheus", default="", help="the server's binary; default: that on the path")
    parser.add_argument("--answers", type=Path, default=ANSWERS, help="file that keeps what was answered")
    parser.add_argument("--redraw", action="store_true", help="draw from the answers of the run before")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if "trace" in options.which:
        with TemporaryDirectory(prefix="epd-pictures-") as directory:
            asyncio.run(trace(Path(directory)))
    if "dashboards" not in options.which:
        return 0
    if not options.redraw:
        program = binary(options.prometheus)
        with TemporaryDirectory(prefix="epd-pictures-") as directory:
            boards = asyncio.run(collect(options.minutes, program, Path(directory)))
        options.answers.parent.mkdir(exist_ok=True)
        panels.save(boards, options.answers)
    boards = panels.load(options.answers)
    for board in boards:
        file = PICTURES / f"dashboard-{board.name}.svg"
        draw(board, file)
        print(f"{file}: {len(board.panels)} panels, {file.stat().st_size / 1000:.0f} kB")
        for panel in board.panels:
            if panel.empty:
                why = panels.MAY_BE_EMPTY.get(f"{board.name}: {panel.title}", "NOT EXPECTED")
                print(f"  no data: {panel.title} ({why})")
    return 1 if panels.unexpectedly_empty(boards) else 0


if __name__ == "__main__":
    sys.exit(main())
