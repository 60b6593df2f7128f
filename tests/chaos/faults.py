"""What is done to the processes: drawn from a seed, several at once, never to the last that is well of its kind."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import psutil

from tests.chaos.mesh import DRAIN_SECONDS, KINDS, LEASE_SECONDS, ChaosMesh, Process

KILL, PAUSE, RESTART, CUT, PARTITION, WIPE = "kill -9", "pause", "restart", "cut", "partition", "wiped"
FAULTS = (KILL, PAUSE, RESTART, CUT, PARTITION, WIPE)
WEIGHTS = {KILL: 15, PAUSE: 28, RESTART: 9, CUT: 28, PARTITION: 20}
END_SECONDS = 30.0  # for a process to end; bounds for broken code, on cores that others use too
START_SECONDS = 300.0
KIND_WEIGHTS = {"encode": 3, "prefill": 5, "decode": 7, "gateway": 3, "etcd": 2}
MOST_KILLS = 80  # and a quarter of all
SHORTEST, LONGEST = 0.5, 8.0  # seconds of a pause or a partition


class Faults:
    """Counts by (fault, kind of process). interval: mean seconds between two."""

    def __init__(self, mesh: ChaosMesh, seed: int, interval: float) -> None:
        self._mesh, self._interval = mesh, interval
        self._rng = random.Random(f"faults {seed}")
        self.done: Counter[tuple[str, str]] = Counter()
        self.log: list[tuple[float, str, str]] = []  # monotonic seconds, fault, process
        self.late_ends: list[str] = []  # that did not end in time when asked to
        self._running: set[asyncio.Task[None]] = set()

    @property
    def total(self) -> int:
        return sum(self.done.values())

    @property
    def kills(self) -> int:
        return sum(count for (fault, _), count in self.done.items() if fault in (KILL, WIPE))

    async def run(self, seconds: float) -> None:
        """Until the time is over and what was begun has been ended."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._rng.expovariate(1 / self._interval) if self.total else 0.5))
            if time.monotonic() >= until:
                break
            if drawn := self._draw():
                task = asyncio.create_task(self._begin(*drawn))
                self._running.add(task)
                task.add_done_callback(self._ended)
        if self._running:
            await asyncio.wait(self._running, timeout=DRAIN_SECONDS + LEASE_SECONDS * 4 + END_SECONDS)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.late_ends.append(f"a fault could not be made: {error!r}")

    def _draw(self) -> tuple[str, Process | None] | None:
        """Each kind of process is hit early on; then by weight. None while none has one to spare."""
        well = {kind: [process for process in self._mesh.of(kind) if process.ready] for kind in KINDS}
        kinds = [kind for kind in KINDS if len(well[kind]) > 1 or (kind == "etcd" and not self._mesh.etcd_fault)]
        if not kinds:
            return None
        hit = {kind for _, kind in self.done}
        missing = [kind for kind in kinds if kind not in hit]
        kind = missing[0] if missing else self._rng.choices(kinds, [KIND_WEIGHTS[kind] for kind in kinds])[0]
        weights = dict(WEIGHTS)
        if self.kills >= MOST_KILLS or self.kills > self.total / 4:
            weights[KILL] = 0
        fault = self._rng.choices([*weights], [*weights.values()])[0]
        if kind == "etcd":
            return (self._rng.choice((KILL, WIPE)) if fault == KILL else fault), None
        return fault, self._rng.choice(well[kind])

    async def _begin(self, fault: str, process: Process | None) -> None:
        name = process.name if process else "etcd"
        self.log.append((time.monotonic(), fault, name))
        self.done[fault, process.kind if process else "etcd"] += 1
        if process is None:
            await self._etcd(fault)
            return
        process.fault = fault
        process.disturb()
        try:
            await {KILL: self._kill, PAUSE: self._pause, RESTART: self._restart, CUT: self._cut}.get(
                fault, self._partition
            )(process)
        finally:
            process.fault = ""
            if process.up:
                process.calm()

    def _seconds(self) -> float:
        return self._rng.uniform(SHORTEST, LONGEST)

    async def _kill(self, process: Process) -> None:
        """The service, or one time in three the engine below it."""
        process.ours = True
        below = psutil.Process(process.role.pid).children()
        if below and self._rng.random() < 1 / 3:
            self._rng.choice(below).kill()
        else:
            process.role.signal(signal.SIGKILL)
        await self._gone(process, END_SECONDS)

    async def _restart(self, process: Process) -> None:
        process.ours = True
        process.role.signal(signal.SIGTERM)
        await self._gone(process, DRAIN_SECONDS + END_SECONDS)

    async def _gone(self, process: Process, seconds: float) -> None:
        """Its end, and its next life."""
        pid = process.role.pid
        if not await _until(lambda: not process.up or process.role.pid != pid, seconds):
            self.late_ends.append(f"{process.name} did not end within {seconds:g} s")
            process.role.signal(signal.SIGKILL)
        await _until(lambda: process.up and process.role.pid != pid, START_SECONDS)

    async def _pause(self, process: Process) -> None:
        """All its processes, or only the service's."""
        whole, pid = self._rng.random() < 0.7, process.role.pid
        send = os.killpg if whole else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._seconds())
            finally:
                send(pid, signal.SIGCONT)

    async def _cut(self, process: Process) -> None:
        if process.proxy is not None:
            process.proxy.cut()
        elif process.namespace is not None:
            await asyncio.to_thread(process.namespace.reset_connections)
        await asyncio.sleep(0.2)

    async def _partition(self, process: Process) -> None:
        """From everybody; or, where it has a namespace, from one other machine only."""
        seconds, namespace = self._seconds(), process.namespace
        if process.proxy is not None:
            process.proxy.hold()
            try:
                await asyncio.sleep(seconds)
            finally:
                process.proxy.go_on()
            return
        assert namespace is not None
        peers = sorted(
            {each.role.address.split(":")[0] for each in self._mesh.processes.values()} - {namespace.address}
        )
        peer = self._rng.choice(peers) if self._rng.random() < 0.4 else ""
        begin: Callable[[], None] = (lambda: namespace.lose(peer)) if peer else (lambda: namespace.link(up=False))
        end: Callable[[], None] = (lambda: namespace.find(peer)) if peer else (lambda: namespace.link(up=True))
        await asyncio.to_thread(begin)
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.to_thread(end)

    async def _etcd(self, fault: str) -> None:
        """A pause is for three leases; WIPE starts it again with nothing in it."""
        mesh, etcd, proxy = self._mesh, self._mesh.etcd, self._mesh.etcd_proxy
        assert proxy is not None
        assert etcd.process is not None
        mesh.etcd_fault = fault
        try:
            if fault == PAUSE:
                etcd.process.send_signal(signal.SIGSTOP)
                try:
                    await asyncio.sleep(3 * LEASE_SECONDS + 1)
                finally:
                    etcd.process.send_signal(signal.SIGCONT)
            elif fault == CUT:
                proxy.cut()
            elif fault == PARTITION:
                proxy.hold()
                try:
                    await asyncio.sleep(self._seconds())
                finally:
                    proxy.go_on()
            else:
                await (etcd.stop() if fault == RESTART else etcd.kill())
                await etcd.start(wipe=fault == WIPE)
        finally:
            mesh.etcd_disturbed_at = time.monotonic()
            mesh.etcd_fault = ""


async def _until(condition: Callable[[], object], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.05)
            return True
    return False
