"""Keeps a set of processes running: starts them, restarts what dies, ends them together."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from common.errors import ChildFailed
from common.process import PARENT_VARIABLE

# A role ends with this code when starting it again cannot help: a wrong option, a missing model, a taken port.
EXIT_REFUSED = 2
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 15.0
STEADY_SECONDS = 30.0  # a process that lived this long starts again with the first delay
TAIL_BYTES = 4096


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process: arguments of `epd`, and what its environment has beyond ours."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = {}


def restart_delay(failures: int) -> float:
    """Seconds before start number `failures` + 1, when the ones before it all ended early."""
    return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(failures, 10))


class Child:
    """One supervised process over all its lives. state: waiting | running | restarting | ended."""

    def __init__(self, spec: ProcessSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.state = "waiting"
        self.restarts = 0
        self.failures = 0  # in a row
        self.started = 0.0  # monotonic seconds
        self.process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    def send(self, signum: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signum)

    def last_line(self) -> str:
        """The last line of its log, for a report."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""


class Supervisor:
    """Runs `epd <arguments>` for every spec. Start it from the main thread (see common.process)."""

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        log_dir: Path,
        report: Callable[[str], None] = lambda _: None,
        changed: Callable[[], None] = lambda: None,
        command: Sequence[str] = (sys.executable, "-P", "-m", "services.cli"),
    ) -> None:
        """command: what the arguments of a spec follow; -P since the working directory may hold folders named as ours.

        report: told of every death and restart, in words. changed: called whenever a child's state has changed."""
        self.children = {spec.name: Child(spec, log_dir / f"{spec.name}.log") for spec in specs}
        self.stopping = False
        self.patience: int | None = None  # a child that ends this often in a row fails for good; None: never
        self._command = tuple(command)
        self._report = report
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, *names: str) -> None:
        """Start these children and keep them running."""
        for name in names:
            self._tasks[name] = asyncio.create_task(self._keep(self.children[name]), name=f"keep {name}")

    async def failed(self) -> None:
        """Returns only by raising ChildFailed, once a child refuses to start."""
        done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        await asyncio.Event().wait()

    async def stop(self, *names: str, grace: float) -> None:
        """SIGTERM to these children at once, then SIGKILL to those that outlast `grace` seconds."""
        self.stopping = True
        children = [self.children[name] for name in names]
        tasks = [self._tasks[name] for name in names if name in self._tasks]
        for child in children:
            if child.pid is None and child.spec.name in self._tasks:
                self._tasks[child.spec.name].cancel()  # it waits for its restart
            child.send(signal.SIGTERM)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            if late:
                for child in children:
                    child.send(signal.SIGKILL)
                await asyncio.wait(late)

    def kill(self) -> None:
        """SIGKILL to all, at once and without waiting."""
        self.stopping = True
        for child in self.children.values():
            child.send(signal.SIGKILL)

    async def _keep(self, child: Child) -> None:
        try:
            while not self.stopping:
                code = await self._live(child)
                if self.stopping:
                    return
                if code == EXIT_REFUSED:
                    raise ChildFailed(
                        f"{child.spec.name}: {child.last_line() or 'refused to start'} (log: {child.log})"
                    )
                if time.monotonic() - child.started >= STEADY_SECONDS:
                    child.failures = 0
                delay = restart_delay(child.failures)
                child.failures += 1
                if self.patience is not None and child.failures >= self.patience:
                    raise ChildFailed(
                        f"{child.spec.name} {_ending(code)}, {child.failures} times in a row: {child.last_line()} "
                        f"(log: {child.log})"
                    )
                child.restarts += 1
                child.state = "restarting"
                self._changed()
                self._report(f"{child.spec.name} {_ending(code)}; starting it again in {delay:g} s (log: {child.log})")
                await asyncio.sleep(delay)
        finally:
            child.state = "ended"
            self._changed()

    async def _live(self, child: Child) -> int:
        """One life, from start to exit code."""
        environment = os.environ | child.spec.environment | {PARENT_VARIABLE: str(os.getpid())}
        with child.log.open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches only us, and we end the children in order.
            child.process = await asyncio.create_subprocess_exec(
                *self._command,
                *child.spec.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        child.started = time.monotonic()
        child.state = "running"
        if self.stopping:  # told to stop while the process was being made
            child.send(signal.SIGTERM)
        self._changed()
        try:
            return await child.process.wait()
        except asyncio.CancelledError:
            child.send(signal.SIGKILL)
            raise


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
