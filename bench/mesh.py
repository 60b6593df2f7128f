"""A mesh of real processes to measure: etcd, one gateway, workers, each started as `epd` would."""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import grpc
import psutil

from common.process import PARENT_VARIABLE
from common.registry.local_etcd import LocalEtcd, free_port
from common.rpc.channel import connect
from epd.v1 import generation_pb2, generation_pb2_grpc, worker_pb2, worker_pb2_grpc

READY_SECONDS = 120.0


class BenchMesh:
    """roles: one entry a worker. Keywords of `gateway` and `worker` are settings by dotted name."""

    def __init__(
        self,
        model: str,
        roles: Sequence[str],
        *,
        gateway: dict[str, Any] | None = None,
        worker: dict[str, Any] | None = None,
        threads: int = 1,
    ) -> None:
        self.model, self.roles, self.threads = model, roles, threads
        self._gateway, self._worker = gateway or {}, worker or {}
        self._exit = AsyncExitStack()
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.worker_ports: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def _start(self) -> None:
        directory = Path(self._exit.enter_context(TemporaryDirectory(prefix="epd-bench-")))
        etcd = LocalEtcd(directory / "etcd")
        await etcd.start()
        self._exit.push_async_callback(etcd.stop)
        self._exit.push_async_callback(self._end)
        self.address, self.http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        served = f"bench={self.model}"
        arguments = ["gateway", served, "--grpc", self.address, "--http", self.http, "--etcd", etcd.endpoint]
        await self._spawn("gateway", arguments, "EPD_GATEWAY", self._gateway, directory)
        for number, roles in enumerate(self.roles):
            name, port = f"{roles.replace(',', '-')}-{number}", free_port()
            arguments = ["worker", self.model, "--roles", roles, "--worker-id", name, "--served-name", "bench"]
            arguments += ["--port", str(port), "--etcd", etcd.endpoint, "--threads", str(self.threads)]
            arguments += ["--run-dir", str(directory / "run")]
            await self._spawn(name, arguments, "EPD_WORKER", self._worker, directory)
            self.worker_ports[name] = port
        self.channel = connect(self.address)
        self._exit.push_async_callback(self.channel.close)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        await self._routable()

    async def _spawn(
        self, name: str, arguments: list[str], section: str, settings: dict[str, Any], directory: Path
    ) -> None:
        environment = {
            f"{section}_{key.replace('.', '_').upper()}": value if isinstance(value, str) else json.dumps(value)
            for key, value in settings.items()
        }
        with (directory / f"{name}.log").open("wb") as log:
            self.processes[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.cli", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": str(self.threads),
                    "OMP_WAIT_POLICY": "passive",
                    PARENT_VARIABLE: str(os.getpid()),
                    **environment,
                },
            )
        self.directory = directory

    async def _routable(self) -> None:
        async with asyncio.timeout(READY_SECONDS):
            while True:
                for name, process in self.processes.items():
                    if process.returncode is not None:
                        raise SystemExit(f"{name} ended:\n{(self.directory / f'{name}.log').read_text()[-2000:]}")
                try:
                    listed = (await self.stub.ListModels(generation_pb2.ListModelsRequest(), timeout=2)).models
                except grpc.aio.AioRpcError:
                    listed = []
                there = [each.encode_workers + each.prefill_workers + each.decode_workers for each in listed]
                if sum(there) >= sum(len(roles.split(",")) for roles in self.roles):
                    return
                await asyncio.sleep(0.1)

    async def _end(self) -> None:
        for process in self.processes.values():
            if process.returncode is None:
                process.terminate()
        for process in self.processes.values():
            try:
                await asyncio.wait_for(process.wait(), 10)
            except TimeoutError:
                process.kill()

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    async def status(self, name: str) -> worker_pb2.GetStatusResponse:
        async with connect(f"127.0.0.1:{self.worker_ports[name]}") as channel:
            return await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest())

    def memory(self, name: str) -> int:
        """Bytes of a process and its children, shared pages counted once among them (PSS)."""
        parent = psutil.Process(self.processes[name].pid)
        return sum(each.memory_full_info().pss for each in (parent, *parent.children(recursive=True)))
