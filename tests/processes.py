"""A mesh of real processes: etcd, a gateway and workers, each of which a test can kill, stop, drain and start again."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from common.process import PARENT_VARIABLE
from common.registry.local_etcd import free_port
from common.rpc.channel import connect
from epd.v1 import worker_pb2, worker_pb2_grpc
from tests.etcd import EtcdForTests, etcd_server
from tests.mesh import MODEL, MeshClient, left_in

ROOT = Path(__file__).parents[1]
START_SECONDS = 300.0  # a bound for broken code; six services that import torch take minutes on two overloaded cores
END_SECONDS = 15.0


def write_toml(path: Path, section: str, settings: Mapping[str, Any]) -> Path:
    """One table with dotted keys; JSON's strings, numbers, booleans and arrays are TOML's too."""

    def lines(prefix: str, table: Mapping[str, Any]) -> list[str]:
        found: list[str] = []
        for key, value in table.items():
            name = f"{prefix}{json.dumps(key)}"
            found += lines(f"{name}.", value) if isinstance(value, Mapping) else [f"{name} = {json.dumps(value)}"]
        return found

    path.write_text("\n".join([f"[{section}]", *lines("", settings), ""]))
    return path


class Role:
    """One process of `epd`, over all its lives, in a process group of its own with what it starts."""

    def __init__(
        self,
        role: str,
        name: str,
        address: str,
        directory: Path,
        settings: Mapping[str, Any],
        within: Sequence[str] = (),
    ) -> None:
        """within: a command that runs ours and keeps its process id, for example in another network namespace."""
        self.role, self.name, self.address, self._within = role, name, address, within
        self.settings = dict(settings)
        self.process: asyncio.subprocess.Process | None = None
        self.log = directory / f"{name}.log"
        self._config = directory / f"{name}.toml"
        self._groups: list[int] = []

    async def start(self) -> None:
        """Returns at once. Like before: same name, same port."""
        assert not self.alive
        write_toml(self._config, self.role, self.settings)
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(*self._within, sys.executable, "-m", "services.cli", self.role, "--config", str(self._config)),
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            )
        self._groups.append(self.process.pid)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        """To the service's process alone; what it started has to notice by itself."""
        assert self.process is not None
        self.process.send_signal(number)

    async def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        await self.ended()

    def hang(self) -> None:
        """SIGSTOP of the service and of what it started."""
        os.killpg(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    async def ended(self, timeout_seconds: float = END_SECONDS) -> int:
        """Waits for the end; the exit code."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), timeout_seconds)

    def left(self) -> list[psutil.Process]:
        """Living processes of all its lives."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) in self._groups and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return found

    def memory(self) -> int:
        """Proportional set size of its processes, in bytes."""
        return sum(process.memory_full_info().pss for process in self.left())

    def logged(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    async def destroy(self) -> None:
        """Whatever state it is in."""
        async with asyncio.timeout(END_SECONDS):
            while left := self.left():
                for process in left:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                await asyncio.sleep(0.01)
            if self.process is not None:
                await self.ended()


class ProcessMesh(MeshClient):
    """A gateway and a worker for each entry of `roles`; workers are named like "prefill-0", "decode-0"."""

    def __init__(
        self,
        etcd: EtcdForTests,
        checkpoint: Path,
        directory: Path,
        roles: Sequence[str] = ("prefill", "decode"),
        *,
        model: str = MODEL,
        worker: Mapping[str, Any] | None = None,
        by_role: Mapping[str, Mapping[str, Any]] | None = None,
        gateway: Mapping[str, Any] | None = None,
        encoder: Mapping[str, Any] | None = None,
        key: str = "",
        **engine: Any,
    ) -> None:
        """worker, gateway: further settings of all; by_role: of the workers of a role; engine, encoder: their
        settings; key: this client's."""
        self.metadata = (("authorization", f"Bearer {key}"),) if key else ()
        directory.mkdir(parents=True, exist_ok=True)
        self.etcd, self.model = etcd, model
        registry = {"endpoints": [etcd.endpoint], "prefix": f"/{directory.name}"}
        engine = {"dtype": "float32", "num_blocks": 256, **engine, "served_name": model, "model_dir": str(checkpoint)}
        self.workers: dict[str, Role] = {}
        for each in roles:
            kind = each.replace(",", "-")
            port = free_port()
            settings: dict[str, Any] = {
                "roles": each.split(","),
                "worker_id": f"{kind}-{sum(name.startswith(kind) for name in self.workers)}",
                "port": port,
                "etcd": registry,
                "lease_ttl_seconds": 3,
                "run_dir": str(directory / "run"),
                **(worker or {}),
                **(by_role or {}).get(kind, {}),
            }
            settings["engine"] = {**engine, **settings.get("engine", {})}
            settings["encoder"] = {**(encoder or {}), **settings.get("encoder", {})}
            role = Role("worker", settings["worker_id"], f"127.0.0.1:{port}", directory, settings)
            self.workers[role.name] = role
        address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.http = f"http://{http}"
        settings = {"models": {model: str(checkpoint)}, "grpc_bind": address, "http_bind": http, "etcd": registry}
        self.gateway = Role("gateway", "gateway", address, directory, {**settings, **(gateway or {})})

    async def __aenter__(self) -> "ProcessMesh":
        try:
            for role in self.roles:
                await role.start()
            await self.connect(self.gateway.address)
            await self.whole()
        except BaseException as error:
            await self._destroy()
            for role in self.roles:
                error.add_note(f"{role.name}: {role.logged()}")
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self._destroy()

    async def _destroy(self) -> None:
        await asyncio.gather(*(role.destroy() for role in self.roles))

    @property
    def roles(self) -> list[Role]:
        return [self.gateway, *self.workers.values()]

    def of(self, role: str) -> list[Role]:
        """Living workers that have this role."""
        return [worker for worker in self.workers.values() if worker.alive and role in worker.settings["roles"]]

    def add(self, name: str, like: Role) -> None:
        """One more worker, with another's settings; `whole` starts it."""
        port = free_port()
        settings = {**like.settings, "worker_id": name, "port": port}
        self.workers[name] = Role("worker", name, f"127.0.0.1:{port}", like.log.parent, settings)

    async def whole(self) -> None:
        """Starts what has ended and returns when all workers are routable."""
        for role in self.roles:
            if not role.alive:
                await role.start()
        wanted = len(self.of("prefill")), len(self.of("decode"))
        encoders = len(self.of("encode"))
        async with asyncio.timeout(START_SECONDS):
            while True:
                ended = [role for role in self.roles if not role.alive]
                assert not ended, f"{ended[0].name} has ended: {ended[0].logged()}"
                if await self.routable_workers() == wanted and await self.encode_workers() == encoders:
                    return
                await asyncio.sleep(0.05)

    async def status(self, worker: Role, *, timeout: float = 10.0) -> worker_pb2.GetStatusResponse:
        async with connect(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=timeout)

    async def leftovers(self) -> list[str]:
        left: list[str] = []
        for worker in self.workers.values():
            if worker.alive:
                status = await self.status(worker)
                left += left_in(worker.name, status) + [f"{worker.name}: open span"] * status.open_spans
        return left


@asynccontextmanager
async def process_mesh(checkpoint: Path, directory: Path, **options: Any) -> AsyncIterator[ProcessMesh]:
    """With an etcd of its own. Nothing of it is left afterwards, however the test ends."""
    async with etcd_server(directory / "etcd") as etcd:
        mesh = ProcessMesh(etcd, checkpoint, directory, **options)
        async with mesh:
            yield mesh
    left = [process for role in mesh.roles for process in role.left()]
    assert not left, left
