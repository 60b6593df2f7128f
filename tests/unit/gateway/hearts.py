"""Fake workers with a heart: they beat, and can fall silent as a stopped process does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from common.policies.silence import SilencePolicy
from epd.v1 import worker_pb2
from tests.fakes import FakeWorker
from tests.unit.gateway.conftest import Mesh

FAST = SilencePolicy(suspect_seconds=0.4, stuck_seconds=1.0)
PATIENT = SilencePolicy(suspect_seconds=0.4, stuck_seconds=600.0)
_BEAT_SECONDS = 0.05


class HeartWorker(FakeWorker):
    """Silent while `heart` is cleared. Its calls are not held up by that: tests have the gates for it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.heart = asyncio.Event()
        self.heart.set()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        for blocks in self.blocks:
            yield worker_pb2.WatchResponse(blocks=blocks)
        yield worker_pb2.WatchResponse(load=self.load)
        while True:
            yield worker_pb2.WatchResponse(beat=worker_pb2.Beat())
            await asyncio.sleep(_BEAT_SECONDS)
            await self.heart.wait()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def add(mesh: Mesh, worker_id: str, roles: Sequence[str]) -> HeartWorker:
    worker = HeartWorker(mesh.network, worker_id, roles)
    mesh.workers[worker_id] = worker
    await worker.start()
    await mesh.publish()
    await until(lambda: mesh.gateway.fleet.get(worker_id).beats)
    return worker


@asynccontextmanager
async def hearts(
    model_dir: Path, names: str, silence: SilencePolicy = FAST, **settings: Any
) -> AsyncIterator[tuple[Mesh, list[HeartWorker]]]:
    """names: like "p0 p1 d0 b0", whose letters are roles; b has prefill and decode."""
    mesh = Mesh(model_dir)
    patient = dict.fromkeys(("first_byte_seconds", "stall_seconds", "route_wait_seconds", "recovery_seconds"), 600.0)
    await mesh.start(silence=silence, **patient, **settings)
    roles = {"e": ["encode"], "p": ["prefill"], "d": ["decode"], "b": ["prefill", "decode"]}
    try:
        yield mesh, [await add(mesh, name, roles[name[0]]) for name in names.split()]
    finally:
        await mesh.stop()


async def chosen(workers: Sequence[HeartWorker], count: int = 1) -> list[HeartWorker]:
    """Those that run a call, once there are so many; the others after them."""
    await until(lambda: sum(worker.running > 0 for worker in workers) >= count)
    return sorted(workers, key=lambda worker: not worker.running)
