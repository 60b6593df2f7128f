"""One run, from an empty machine to an empty machine."""

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx

from common.rpc.channel import connect
from epd.v1 import generation_pb2_grpc
from tests import oracle
from tests.chaos.faults import Faults
from tests.chaos.mesh import FIRST_START_SECONDS, ChaosMesh, Process, chaos_mesh
from tests.chaos.namespaces import CannotMake, Namespaces
from tests.chaos.pool import COUNTS, Ask, Known, make_pool
from tests.chaos.report import Account, Left
from tests.chaos.traffic import DEADLINE_SECONDS, PATIENCE_SECONDS, Traffic
from tests.checkpoints import vlm_checkpoint
from tests.mesh import Answer, collect, left_in

COUNTS_OF_PROCESSES = {"encode": 2, "prefill": 2, "decode": 2, "gateway": 2}
QUIET_SECONDS = 30.0  # within which nothing of any request may be left
QUIET_ANSWER_SECONDS = 300.0  # a bound for broken code
Progress = Callable[[str, float], None]  # what is being done, and how much of it: 0 to 1


async def run(
    minutes: float,
    *,
    seed: int = 0,
    interval: float = 2.6,
    clients: int = 12,
    pool_size: int = 2,
    processes: dict[str, int] | None = None,
    use_namespaces: bool = True,
    directory: Path | None = None,
    progress: Progress = lambda _, __: None,
) -> Account:
    """minutes: of faults. interval: mean seconds between two. directory: for logs; by default a temporary one."""
    with tempfile.TemporaryDirectory(prefix="epd-chaos-") as temporary:
        checkpoint = vlm_checkpoint("llava", Path(temporary) / "checkpoint")
        # Before there are proxies in this process's loop: loading takes it for seconds.
        await asyncio.to_thread(oracle.reference_vlm, checkpoint)
        counts = processes or COUNTS_OF_PROCESSES
        network, namespaces = "no namespaces", None
        if use_namespaces:
            try:
                namespaces = await asyncio.to_thread(Namespaces, sum(count - 1 for count in counts.values()))
                network = f"{len(namespaces.each)} namespaces"
            except CannotMake as error:
                network = f"no namespaces: {error}"
        try:
            async with chaos_mesh(checkpoint, directory or Path(temporary) / "mesh", counts, namespaces) as mesh:
                return await _disturbed(
                    mesh, checkpoint, minutes, seed, interval, clients, pool_size, network, progress
                )
        finally:
            if namespaces is not None:
                await asyncio.to_thread(namespaces.remove)


async def _disturbed(
    mesh: ChaosMesh,
    checkpoint: Path,
    minutes: float,
    seed: int,
    interval: float,
    clients: int,
    pool_size: int,
    network: str,
    progress: Progress,
) -> Account:
    pool = await _pool(mesh, checkpoint, seed, pool_size, progress)
    traffic, faults = Traffic(mesh, pool, seed, clients), Faults(mesh, seed, interval)
    asking = asyncio.create_task(traffic.run())
    breaking = asyncio.create_task(faults.run(minutes * 60))
    started = time.monotonic()
    try:
        while not breaking.done():
            if asking.done():
                asking.result()  # clients end only by a fault of ours
            words = f"{faults.total} faults, {len(traffic.seen)} requests"
            progress(words, min(1.0, (time.monotonic() - started) / (minutes * 60)))
            await asyncio.wait((breaking, asking), timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        breaking.result()
        traffic.stop()
        progress("quiet", 1.0)
        async with asyncio.timeout(DEADLINE_SECONDS + PATIENCE_SECONDS * 2):
            await asking
    finally:
        for task in (breaking, asking):
            task.cancel()
        await asyncio.gather(breaking, asking, return_exceptions=True)
    await mesh.all_up(FIRST_START_SECONDS)
    left = await _left(mesh)
    left.processes += [f"orphan {process.pid} of an ended life" for process in mesh.orphans()]
    unasked = [*mesh.unexpected, *faults.late_ends]
    left.processes += await mesh.stop()
    return Account(
        seed=seed,
        minutes=minutes,
        namespaces=network,
        faults=faults.done,
        kills=faults.kills,
        seen=traffic.seen,
        left=left,
        ends=unasked,
        late_starts=mesh.late_starts,
        tracebacks=mesh.tracebacks(),
        log=faults.log,
    )


async def _pool(mesh: ChaosMesh, checkpoint: Path, seed: int, size: int, progress: Progress) -> list[Known]:
    made, wanted = 0, size * sum(COUNTS.values())

    def report() -> None:
        nonlocal made
        made += 1
        progress(f"answers known: {made}", made / wanted)

    gateways = mesh.of("gateway")
    await _routable(mesh)
    channels = [connect(gateway.role.address) for gateway in gateways]

    def asker(channel: grpc.aio.Channel) -> Ask:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)

        async def ask(known: Known) -> Answer:
            return await collect(stub.Generate(known.message(), timeout=QUIET_ANSWER_SECONDS))

        return ask

    try:
        return await make_pool(checkpoint, seed, size, [asker(channel) for channel in channels], report)
    finally:
        for channel in channels:
            await channel.close()


async def _routable(mesh: ChaosMesh) -> None:
    async with asyncio.timeout(FIRST_START_SECONDS), httpx.AsyncClient() as client:
        for gateway in mesh.of("gateway"):
            while (await client.get(f"{mesh.http(gateway)}/ready")).status_code != 200:
                await asyncio.sleep(0.1)


async def _left(mesh: ChaosMesh) -> Left:
    """Looks until nothing is left, for a bounded time; then what is."""
    until = time.monotonic() + QUIET_SECONDS
    while True:
        left = Left()
        async with httpx.AsyncClient() as client:
            for process in mesh.processes.values():
                if process.kind == "gateway":
                    left.spans += await _open_in_gateway(mesh, process, client)
                else:
                    status = await mesh.status(process)
                    left.blocks += left_in(process.name, status)
                    left.spans += [f"{process.name}: open span"] * status.open_spans
        if not (left.blocks or left.spans) or time.monotonic() > until:
            return left
        await asyncio.sleep(0.5)


async def _open_in_gateway(mesh: ChaosMesh, gateway: Process, client: httpx.AsyncClient) -> list[str]:
    """Spans, and requests that it believes to be under way."""
    text = (await client.get(f"{mesh.http(gateway)}/metrics")).text
    values = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    found: list[str] = []
    for name, value in values:
        if name.startswith(("epd_open_spans", "epd_requests_in_flight")):
            found += [f"{gateway.name}: {name}"] * round(float(value))
    return found
