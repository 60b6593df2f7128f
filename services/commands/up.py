"""`epd up`: every process of a mesh on this machine, a first question, and then until Ctrl-C."""

import asyncio
import contextlib
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.errors import DeadlineExceeded, InvalidArgument, Unauthenticated, Unavailable
from common.models.catalog import models_dir
from common.models.config import read_config
from common.models.info import read_info
from common.process import available_cores
from common.rpc.certificates import CA_CERT
from common.rpc.channel import connect
from common.rpc.tls import TlsOptions
from epd.v1 import generation_pb2, generation_pb2_grpc
from services.commands import models
from services.commands.checks import NO_KEY, check_config, check_ports
from services.commands.client import credentials
from services.commands.first import first_questions
from services.commands.mesh import (
    MeshOptions,
    Pool,
    free_port,
    make_certificates,
    process_specs,
    threads_per_worker,
)
from services.commands.render import make_console
from services.commands.run_dir import MeshState, RunDir, default_run_dir
from services.supervisor import Supervisor

ROUTABLE_SECONDS = 300.0
ETCD_SECONDS = 15.0
PATIENCE = 4  # lives of a process that never comes up
_COLORS = {"waiting": "dim", "running": "green", "restarting": "yellow", "ended": "dim"}


def up(options: MeshOptions, *, ready_fd: int = -1) -> None:
    """Run a mesh until SIGINT or SIGTERM. ready_fd: where to write one line once the mesh can be used."""
    options.validate()
    run = RunDir(default_run_dir())
    run.acquire()
    try:
        # From now on the other commands know of it, also while models are fetched.
        run.write_state(
            MeshState(
                pid=os.getpid(),
                model=options.model,
                grpc=options.grpc,
                http=options.http,
                etcd=options.etcd,
                models_dir=str(models_dir()),
            )
        )
        check_config(options)
        check_ports(options)
        found = pools(options, [models.get(model) for model in options.models])
        if options.tls:
            make_certificates(options, run.certs)
        asyncio.run(_Mesh(options, found, run, ready_fd).run())
    finally:
        run.release()


def pools(options: MeshOptions, directories: Sequence[Path]) -> list[Pool]:
    """The workers of each model: encode workers where it takes images; they answer for its text model, too, where that
    has no workers of its own. Raises InvalidArgument when two models have one name."""
    names = [options.served_name or directories[0].name, *(directory.name for directory in directories[1:])]
    if len(set(names)) < len(names):
        raise InvalidArgument(f"two models have the same name: {', '.join(names)}", field="model")
    found = []
    taken = set(names)
    for number, (name, directory) in enumerate(zip(names, directories, strict=True)):
        text = read_info(directory).text_model
        alias = {text: models.get(text)} if text and text not in taken else {}
        taken |= alias.keys()
        workers = options.workers_of(number, images=read_config(directory).vision)
        found.append(Pool(served=name, directory=directory, workers=workers, aliases=alias))
    return found


class _Mesh:
    def __init__(self, options: MeshOptions, pools: Sequence[Pool], run: RunDir, ready_fd: int) -> None:
        self.options = options
        self.pools = pools
        self.run_dir = run
        self.etcd = options.etcd or f"127.0.0.1:{free_port()}"
        self.served, self.aliases = pools[0].served, pools[0].aliases
        self.console = make_console()
        self.ready_fd = ready_fd
        self.started = time.monotonic()
        self.routable = ""  # what is still missing, for the display
        self.stop = asyncio.Event()
        self._away: set[str] = set()  # processes that have ended and are started again
        self._ended = asyncio.Event()  # one more has
        certs = str(run.certs) if options.tls else ""
        self.tls = TlsOptions(ca_file=str(run.certs / CA_CERT)) if options.tls else None  # towards the gateway
        specs = process_specs(options, pools, run.path, run.sockets, self.etcd, certs)
        self.supervisor = Supervisor(specs, run.logs, self._report, self._changed)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
        stopping = loop.create_task(self.stop.wait())
        serving = loop.create_task(self._serve())
        try:
            await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            for task in (stopping, serving):
                task.cancel()
            await asyncio.gather(stopping, serving, return_exceptions=True)
            await self._end()

    async def _serve(self) -> None:
        options, supervisor = self.options, self.supervisor
        workers = [name for pool in self.pools for name in pool.workers]
        threads = options.threads or threads_per_worker(len(workers), available_cores())
        told = [f"{pool.served}: workers {', '.join(pool.workers)}" for pool in self.pools]
        self.console.print(
            f"{'; '.join(told)} on {available_cores()} cores, threads of each: {threads}; logs in {self.run_dir.logs}",
            highlight=False,
        )
        with self._display():
            if not options.etcd:
                supervisor.start("etcd")
                await self._or_failure(_reachable(self.etcd, ETCD_SECONDS))
            supervisor.patience = PATIENCE
            supervisor.start("gateway", *workers)
            await self._or_failure(self._wait_routable(ROUTABLE_SECONDS))
        supervisor.patience = None
        self._away.clear()
        self._ended.clear()
        took = time.monotonic() - self.started
        self.console.print(f"[green]ready[/green] after {took:.1f} s", highlight=False)
        await self._or_failure(
            first_questions(options.grpc, self.served, self.aliases, self.run_dir.path, self.console, tls=self.tls)
        )
        self._announce()
        if self.ready_fd >= 0:
            os.write(self.ready_fd, b"ready\n")
            os.close(self.ready_fd)
            self.ready_fd = -1
        await self._or_failure(self._tell_of_returns())

    async def _tell_of_returns(self) -> None:
        """Says so each time that all is well again after processes had ended. Never returns."""
        while True:
            await self._ended.wait()
            self._ended.clear()
            await self._wait_routable(math.inf)
            if not self._ended.is_set():
                self._report(f"back: {', '.join(sorted(self._away))}; requests reach every worker", color="green")
                self._away.clear()

    async def _or_failure(self, work) -> None:  # type: ignore[no-untyped-def]
        """Do the work unless a process refuses to start meanwhile."""
        tasks = [asyncio.create_task(work), asyncio.create_task(self.supervisor.failed())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_routable(self, seconds: float) -> None:
        """Until every process runs and the gateway knows every worker. Raises DeadlineExceeded."""
        options = self.options
        roles = ("encode", "prefill", "decode")
        want = {
            pool.served: [sum(role in has.split(",") for has in pool.workers.values()) for role in roles]
            for pool in self.pools
        }
        end = time.monotonic() + seconds
        async with connect(options.grpc, tls=self.tls, metadata=credentials()) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            while time.monotonic() < end:
                have = {name: [0, 0, 0] for name in want}
                try:
                    answer = await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=2)
                    for model in answer.models:
                        have[model.id] = [model.encode_workers, model.prefill_workers, model.decode_workers]
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                        raise Unauthenticated(NO_KEY) from None
                running = all(child.state == "running" for child in self.supervisor.children.values())
                counts = [
                    (name, role, there, wanted)
                    for name in want
                    for role, there, wanted in zip(roles, have[name], want[name], strict=True)
                ]
                if running and all(there >= wanted for _, _, there, wanted in counts):
                    return
                self.routable = ", ".join(
                    f"{there} of {wanted} {role}{f' of {name}' if len(want) > 1 else ''}"
                    for name, role, there, wanted in counts
                    if wanted
                )
                self.routable += " routable"
                await asyncio.sleep(0.1)
        raise DeadlineExceeded(f"not routable after {seconds:.0f} s ({self.routable}); see {self.run_dir.logs}")

    def _announce(self) -> None:
        http = f"{'https' if self.tls else 'http'}://{self.options.http}"
        self.console.print(f"gRPC on [bold]{self.options.grpc}[/bold], HTTP on [bold]{http}[/bold]")
        if self.tls:
            self.console.print(f"Everything by TLS; clients trust [bold]{self.tls.ca_file}[/bold]", highlight=False)
        epd = "epd" if shutil.which("epd") else os.path.relpath(Path(sys.executable).parent / "epd")
        commands = f'{epd} chat, or generate "…", status, trace ID'
        if self.ready_fd >= 0:  # in the background
            self.console.print(f"[dim]Ask it with: {commands}.[/dim]", highlight=False)
        else:
            self.console.print(f"[dim]In another terminal: {commands}. Ctrl-C ends.[/dim]", highlight=False)

    def _display(self) -> contextlib.AbstractContextManager[object]:
        if not self.console.is_terminal:
            return contextlib.nullcontext()
        return Live(console=self.console, refresh_per_second=8, transient=True, get_renderable=self._table)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, child in self.supervisor.children.items():
            pid = f"pid {child.pid}" if child.pid else ""
            table.add_row(name, Text(child.state, style=_COLORS[child.state]), Text(pid, style="dim"))
        table.add_row("", Text(f"{self.routable} {time.monotonic() - self.started:.0f} s", style="dim"))
        return table

    def _report(self, message: str, *, color: str = "yellow") -> None:
        self.console.print(f"[{color}]{message}[/{color}]", highlight=False)

    def _changed(self) -> None:
        if away := {name for name, child in self.supervisor.children.items() if child.state == "restarting"}:
            self._away |= away
            self._ended.set()
        processes = {name: child.pid for name, child in self.supervisor.children.items() if child.pid}
        self.run_dir.write_state(
            MeshState(
                pid=os.getpid(),
                model=self.served,
                grpc=self.options.grpc,
                http=self.options.http,
                etcd=self.etcd,
                processes=processes,
                socket_dir=str(self.run_dir.sockets),
                models_dir=str(models_dir()),
                certs=str(self.run_dir.certs) if self.tls else "",
            )
        )

    def _on_signal(self) -> None:
        if self.stop.is_set():  # the second time: at once
            self.supervisor.kill()
            self.run_dir.release()
            os._exit(130)
        self.stop.set()

    async def _end(self) -> None:
        """Gateway first, so that running requests can finish on workers that are still there; etcd last."""
        grace = self.options.drain_seconds + 5
        self.console.print(f"[dim]ending, at most {grace:.0f} s; Ctrl-C again: at once[/dim]", highlight=False)
        children = [name for name in self.supervisor.children if name not in ("gateway", "etcd")]
        for names in (("gateway",), children, ("etcd",)):
            await self.supervisor.stop(*(name for name in names if name in self.supervisor.children), grace=grace)


async def _reachable(address: str, seconds: float) -> None:
    """Until a TCP connection is accepted. Raises Unavailable."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            if time.monotonic() > end:
                raise Unavailable(f"etcd does not listen on {address} after {seconds:.0f} s; see its log") from None
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
