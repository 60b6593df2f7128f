"""Processes that are kept running: restarts, refusals, orderly and forced ends, and its own death."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ChildFailed
from common.process import readable
from services.supervisor import EXIT_REFUSED, ProcessSpec, Supervisor, restart_delay

WAIT = "import signal, time\nprint('up', flush=True)\nsignal.pause()\n"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
SECONDS = 30.0


class Watched:
    """A supervisor whose changes can be waited for."""

    def __init__(self, directory: Path, **scripts: str) -> None:
        self.reports: list[str] = []
        self._change = asyncio.Event()
        specs = [ProcessSpec(name=name, arguments=(script,)) for name, script in scripts.items()]
        self.supervisor = Supervisor(
            specs, directory, self.reports.append, self._change.set, command=(sys.executable, "-c")
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                self._change.clear()
                await self._change.wait()

    async def until_up(self, name: str) -> None:
        """Its script has set its signal handlers."""
        async with asyncio.timeout(SECONDS):
            while self.supervisor.children[name].last_line() != "up":
                await asyncio.sleep(0.01)


async def test_start_and_orderly_end(tmp_path: Path) -> None:
    watched = Watched(tmp_path, a=WAIT, b=WAIT)
    watched.supervisor.start("a", "b")
    await watched.until(lambda: all(child.pid for child in watched.supervisor.children.values()))
    pids = [child.pid for child in watched.supervisor.children.values()]
    await watched.supervisor.stop("a", "b", grace=SECONDS)
    assert [child.state for child in watched.supervisor.children.values()] == ["ended", "ended"]
    assert watched.reports == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


async def test_a_dead_child_is_reported_and_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, a=WAIT)
    child = watched.supervisor.children["a"]
    watched.supervisor.start("a")
    await watched.until(lambda: child.pid is not None)
    first = child.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await watched.until(lambda: child.state == "running" and child.pid not in (None, first))
    assert child.restarts == 1
    assert "SIGKILL" in watched.reports[0]
    assert str(child.log) in watched.reports[0]
    await watched.supervisor.stop("a", grace=SECONDS)


async def test_a_refusal_is_final_and_told_in_the_childs_words(tmp_path: Path) -> None:
    watched = Watched(tmp_path, a=WAIT, b=f"print('epd: port 1 is taken'); raise SystemExit({EXIT_REFUSED})")
    watched.supervisor.start("a", "b")
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ChildFailed, match="b: epd: port 1 is taken"):
            await watched.supervisor.failed()
    assert watched.supervisor.children["b"].restarts == 0
    await watched.supervisor.stop("a", grace=SECONDS)


async def test_patience_ends(tmp_path: Path) -> None:
    watched = Watched(tmp_path, a="print('no luck'); raise SystemExit(1)")
    watched.supervisor.patience = 2
    watched.supervisor.start("a")
    async with asyncio.timeout(SECONDS):
        with pytest.raises(ChildFailed, match="2 times in a row: no luck"):
            await watched.supervisor.failed()


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    watched = Watched(tmp_path, a=STUBBORN)
    watched.supervisor.start("a")
    await watched.until_up("a")
    process = watched.supervisor.children["a"].process
    assert process is not None
    await watched.supervisor.stop("a", grace=0.2)
    assert process.returncode == -signal.SIGKILL


async def test_stopping_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    watched = Watched(tmp_path, a="raise SystemExit(1)")
    child = watched.supervisor.children["a"]
    child.failures = 10  # the next start is a quarter of a minute away
    watched.supervisor.start("a")
    await watched.until(lambda: child.state == "restarting")
    async with asyncio.timeout(5):
        await watched.supervisor.stop("a", grace=SECONDS)
    assert child.state == "ended"


def test_delays_grow_and_stay_bounded() -> None:
    delays = [restart_delay(failures) for failures in range(40)]
    assert delays[:3] == [0.5, 1.0, 2.0]
    assert delays == sorted(delays)
    assert max(delays) == 15.0


def test_children_end_with_a_killed_supervisor(tmp_path: Path) -> None:
    """As with `kill -9`: nothing of ours runs any more, so only the kernel can do it."""
    child = "from common.process import end_with_parent\nend_with_parent()\n" + STUBBORN
    parent = f"""
import asyncio, sys
from pathlib import Path
from services.supervisor import ProcessSpec, Supervisor

async def main():
    spec = ProcessSpec(name="a", arguments=({child!r},))
    supervisor = Supervisor([spec], Path({str(tmp_path)!r}), command=(sys.executable, "-c"))
    supervisor.start("a")
    while supervisor.children["a"].last_line() != "up":
        await asyncio.sleep(0.01)
    print(supervisor.children["a"].pid, flush=True)
    await supervisor.failed()

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        pid = int(process.stdout.readline())
        descriptor = os.pidfd_open(pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with os.fdopen(descriptor):
        assert readable((descriptor,), SECONDS)
