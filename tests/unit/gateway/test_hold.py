"""Requests are held at the gateway while no decode worker has room (design §2)."""

import asyncio

import grpc

from epd.v1 import worker_pb2
from tests.fakes import MODEL, FakeWorker
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal


async def fill(mesh: Mesh, decode: FakeWorker) -> None:
    """The gateway knows that the worker is full when this returns."""
    decode.load = worker_pb2.Load(total_blocks=1024, free_blocks=0, active_blocks=1024)
    await decode.note()
    known = mesh.gateway.fleet.get("d0")
    assert known is not None
    async with asyncio.timeout(10):
        while known.load.free_blocks:
            await mesh.gateway.fleet.load_changed()


async def test_requests_are_held_while_every_decode_worker_is_full(mesh: Mesh) -> None:
    """They hold nothing meanwhile: no worker is called before there is room, and then in the order of arrival."""
    prefill, decode = await mesh.pair()
    await fill(mesh, decode)
    held = [asyncio.create_task(generate(mesh, ask("hello", max_tokens=3)))]
    planner = mesh.gateway.generator.orchestrator.planner
    async with asyncio.timeout(10):
        while not planner.held(MODEL):
            await asyncio.sleep(0)
    assert prefill.calls == decode.calls == []
    decode.load = worker_pb2.Load(total_blocks=1024, free_blocks=1024)
    await decode.note()
    assert (await held[0]).token_ids[0] == [ord("a"), ord("b"), ord("c")]
    assert not planner.held(MODEL)


async def test_held_for_too_long_is_refused_with_a_hint(mesh: Mesh) -> None:
    await mesh.stop()
    await mesh.start(hold_seconds=0.1)
    mesh.workers.clear()
    _, decode = await mesh.pair()
    await fill(mesh, decode)
    status, trailers, _ = await refusal(mesh, ask("hello", max_tokens=3))
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(trailers["retry-after-ms"]) > 0
