"""The mesh that is disturbed: processes that are started again whenever they end, etcd among them."""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.registry.local_etcd import BINARY_ENV, LocalEtcd, free_port
from common.rpc.channel import connect
from epd.v1 import worker_pb2, worker_pb2_grpc
from tests.chaos.namespaces import Namespace, Namespaces
from tests.chaos.proxy import Proxy
from tests.mesh import MODEL
from tests.processes import END_SECONDS, Role

LEASE_SECONDS = 3
DRAIN_SECONDS = 8.0
FIRST_START_SECONDS = 900.0  # a bound for broken code: all at once, on cores that others use too
BEHIND = "127.0.0.2"  # where a process listens that has a proxy in front of it
RESTART_SECONDS = 0.3  # after an end, until the next start
PROBE_SECONDS = 2.0  # for one answer of a process that is looked at
KINDS = ("encode", "prefill", "decode", "gateway", "etcd")


class Process:
    """One that is kept running. `fault` names what is being done to it; `up` when it has said that it serves."""

    def __init__(self, kind: str, role: Role, probe: str, proxy: Proxy | None, namespace: Namespace | None) -> None:
        self.kind, self.role, self.probe, self.proxy, self.namespace = kind, role, probe, proxy, namespace
        self.name = role.name
        self.fault = ""
        self.up = False
        self.ours = False  # the next end is of our making
        self.disturbed: list[list[float]] = []  # [start, end] of faults and of what followed until it was up again
        self.task: asyncio.Task[None] | None = None

    def disturb(self) -> None:
        if not self.disturbed or self.disturbed[-1][1] < float("inf"):
            self.disturbed.append([time.monotonic(), float("inf")])

    def calm(self) -> None:
        if self.disturbed and self.disturbed[-1][1] == float("inf"):
            self.disturbed[-1][1] = time.monotonic()

    def was_disturbed(self, since: float, until: float) -> bool:
        return any(start <= until and end >= since for start, end in self.disturbed)

    @property
    def ready(self) -> bool:
        return self.up and not self.fault and self.role.alive


class ChaosMesh:
    """encode, prefill, decode: how many workers; two gateways, one etcd.

    Without namespaces every process has a proxy in front of it. With them only the first of each kind has; the others
    each live in a namespace of their own, and move bytes by the channel `grpc`.
    """

    def __init__(
        self, checkpoint: Path, directory: Path, counts: dict[str, int], namespaces: Namespaces | None
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.namespaces = directory, namespaces
        self.front = namespaces.address if namespaces else "127.0.0.1"
        self.etcd = LocalEtcd(directory / "etcd", binary=os.environ.get(BINARY_ENV) or shutil.which("etcd"))
        self.etcd_proxy: Proxy | None = None
        self.etcd_fault = ""
        self.etcd_disturbed_at = 0.0  # monotonic; when the last such fault was over
        self.unexpected: list[str] = []  # ends that nobody asked for
        self.late_starts = 0  # starts that gave up while etcd or the way to it was away
        self._free = list(namespaces.each) if namespaces else []
        self._checkpoint = checkpoint
        self._etcd_port = free_port()
        self._stopping = False
        self.processes: dict[str, Process] = {}
        self._proxies: list[Proxy] = []
        for kind, count in counts.items():
            for number in range(count):
                self._add(kind, number)

    def _add(self, kind: str, number: int) -> None:
        namespace = self._free.pop() if self._free and number else None
        name, port = f"{kind}-{number}", free_port()
        host = namespace.address if namespace else BEHIND
        front = namespace.address if namespace else self.front
        proxy = None if namespace else self._proxy(port)
        registry = {"endpoints": [f"{self.front}:{self._etcd_port}"]}
        settings: dict[str, Any]
        if kind == "gateway":
            http = free_port()
            if proxy is not None:
                self._proxy(http)
            settings = {
                **{"models": {MODEL: str(self._checkpoint)}, "etcd": registry, "salt_secret": "chaos"},
                **{"grpc_bind": f"{host}:{port}", "http_bind": f"{host}:{http}"},
                **{"drain_seconds": DRAIN_SECONDS, "keepalive_seconds": 5.0},
            }
        else:
            engine = {"dtype": "float32", "num_blocks": 320, "served_name": MODEL, "model_dir": str(self._checkpoint)}
            settings = {
                **{"roles": [kind], "worker_id": name, "host": host, "port": port, "advertise": front},
                **{"etcd": registry, "lease_ttl_seconds": LEASE_SECONDS, "run_dir": str(self.directory / "run")},
                **{"channels": ["grpc"] if namespace else ["shm", "grpc"]},
                **{"drain_seconds": DRAIN_SECONDS, "keepalive_seconds": 5.0, "engine": engine},
            }
        within = namespace.command if namespace else ()
        role = Role(
            "gateway" if kind == "gateway" else "worker", name, f"{front}:{port}", self.directory, settings, within
        )
        self.processes[name] = Process(kind, role, f"{host}:{port}", proxy, namespace)

    def _proxy(self, port: int) -> Proxy:
        proxy = Proxy((self.front, port), (BEHIND, port))
        self._proxies.append(proxy)
        return proxy

    def of(self, kind: str) -> list[Process]:
        return [process for process in self.processes.values() if process.kind == kind]

    def http(self, gateway: Process) -> str:
        """Base of its HTTP addresses, as clients reach it."""
        return f"http://{gateway.role.address.split(':')[0]}:{gateway.role.settings['http_bind'].split(':')[1]}"

    async def start(self) -> None:
        """Returns when all processes serve."""
        for proxy in self._proxies:
            await proxy.start()
        await self.etcd.start()
        self.etcd_proxy = Proxy((self.front, self._etcd_port), ("127.0.0.1", self.etcd.client_port))
        self._proxies.append(self.etcd_proxy)
        await self.etcd_proxy.start()
        for process in self.processes.values():
            process.task = asyncio.create_task(self._keep(process), name=f"keep {process.name}")
        await self.all_up(FIRST_START_SECONDS)

    async def all_up(self, seconds: float) -> None:
        """Raises AssertionError naming those that are not, in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not all(process.ready for process in self.processes.values()):
                    await asyncio.sleep(0.1)
        late = [process for process in self.processes.values() if not process.ready]
        assert not late, "not up: " + "; ".join(f"{each.name}: {each.role.logged()[-600:]}" for each in late)

    async def _keep(self, process: Process) -> None:
        while not self._stopping:
            process.up, process.ours = False, False
            await process.role.start()
            started = time.monotonic()
            watching = asyncio.create_task(self._serves(process))
            assert process.role.process is not None
            code = await process.role.process.wait()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            if not process.ours and not self._stopping:
                if not process.up and self.registry_disturbed(process, started):
                    self.late_starts += 1
                else:
                    self.unexpected.append(f"{process.name} ended with {code}: {process.role.logged()[-600:]}")
            process.up = False
            process.disturb()
            await asyncio.sleep(RESTART_SECONDS)

    def registry_disturbed(self, process: Process, since: float) -> bool:
        return (
            bool(self.etcd_fault) or self.etcd_disturbed_at >= since or process.was_disturbed(since, time.monotonic())
        )

    async def _serves(self, process: Process) -> None:
        """Sets `up` when health says so for the first time in this life."""
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with connect(process.probe) as channel:
                    answer = await health_pb2_grpc.HealthStub(channel).Check(
                        health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS
                    )
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    process.up = True
                    if not process.fault:
                        process.calm()
                    return
            await asyncio.sleep(0.2)

    async def status(self, process: Process) -> worker_pb2.GetStatusResponse:
        async with connect(process.probe) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=10.0)

    def orphans(self) -> list[psutil.Process]:
        """Living processes of lives that have ended."""
        return [
            left
            for process in self.processes.values()
            for left in process.role.left()
            if not process.role.alive or _group(left) != process.role.pid
        ]

    def tracebacks(self) -> list[str]:
        """What processes have logged with one: an error that nobody has foreseen."""
        found: list[str] = []
        for process in self.processes.values():
            lines = process.role.log.read_text(errors="replace").splitlines()
            found += [f"{process.name}: {line[-400:]}" for line in lines if "Traceback" in line]
        return found

    async def stop(self) -> list[str]:
        """SIGTERM to all; what did not end by itself, or left something behind."""
        self._stopping = True
        late: list[str] = []
        for process in self.processes.values():
            if process.role.alive:
                process.role.wake()
                process.role.process.terminate()  # type: ignore[union-attr]
        for process in self.processes.values():
            if process.role.alive:
                try:
                    await process.role.ended(DRAIN_SECONDS + END_SECONDS)
                except TimeoutError:
                    late.append(f"{process.name} did not end")
        await asyncio.sleep(0.5)
        for process in self.processes.values():
            late += [f"{process.name} left process {left.pid}" for left in process.role.left()]
        return late

    async def destroy(self) -> None:
        """Whatever state it is in."""
        self._stopping = True
        tasks = [process.task for process in self.processes.values() if process.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(process.role.destroy() for process in self.processes.values()), return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            await self.etcd.kill()
        for proxy in self._proxies:
            await proxy.stop()


@asynccontextmanager
async def chaos_mesh(
    checkpoint: Path, directory: Path, counts: dict[str, int], namespaces: Namespaces | None
) -> AsyncIterator[ChaosMesh]:
    mesh = ChaosMesh(checkpoint, directory, counts, namespaces)
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.destroy()


def _group(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0
