"""What the gateway knows of its workers; cases B5 and B6."""

import asyncio
from collections.abc import Callable

import grpc
import msgspec
import pytest

from common.cache.keys import INDEX_KEY_BYTES, block_keys, root_key
from epd.v1 import generation_pb2, trace_pb2, trace_pb2_grpc, worker_pb2
from tests.fakes import LAYOUT, MODEL, FakeWorker
from tests.unit.gateway.conftest import Mesh, ask, generate


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) * INDEX_KEY_BYTES for number in numbers]


async def events(worker: FakeWorker, *blocks: worker_pb2.BlockEvents) -> None:
    worker.blocks += blocks
    await worker.note()


async def models(mesh: Mesh) -> list[generation_pb2.Model]:
    return list((await mesh.stub.ListModels(generation_pb2.ListModelsRequest())).models)


async def test_b5_listed_only_when_routable(mesh: Mesh) -> None:
    assert await models(mesh) == []
    await mesh.add("p0", ["prefill"])
    assert await models(mesh) == []
    d = await mesh.add("d0", ["decode"])
    (model,) = await models(mesh)
    assert (model.id, model.max_context_tokens, model.dtype) == (MODEL, 4096, "float32")
    assert (model.prefill_workers, model.decode_workers) == (1, 1)
    assert (await generate(mesh, ask(max_tokens=2))).texts == {0: "ab"}  # at once
    d.load.draining = True
    await d.note()
    await until(lambda: not mesh.gateway.fleet.get("d0").routable)
    assert await models(mesh) == []


async def test_b5_workers_that_cannot_exchange_blocks_make_no_model(mesh: Mesh) -> None:
    await mesh.add("p0", ["prefill"])
    await mesh.add("d0", ["decode"], layout=msgspec.structs.replace(LAYOUT, block_size=32))
    assert await models(mesh) == []


async def test_models_without_a_tokenizer_are_not_listed(mesh: Mesh) -> None:
    await mesh.add("b0", ["prefill", "decode"], layout=msgspec.structs.replace(LAYOUT, model="unknown"))
    assert await models(mesh) == []


async def test_b6_block_events_and_gaps(mesh: Mesh) -> None:
    p = await mesh.add("p0", ["prefill"])
    worker = mesh.gateway.fleet.get("p0")
    await events(p, worker_pb2.BlockEvents(sequence=1, stored=keys(1, 2)))
    await events(p, worker_pb2.BlockEvents(sequence=2, stored=keys(3), removed=keys(1)))
    await until(lambda: worker.index.sequence == 2)
    assert worker.index.keys == set(keys(2, 3))
    # A gap: the gateway watches again from 0 and takes the snapshot.
    p.next_blocks = [
        worker_pb2.BlockEvents(sequence=9, snapshot_start=True, stored=keys(7)),
        worker_pb2.BlockEvents(sequence=9, snapshot_end=True, stored=keys(8)),
        worker_pb2.BlockEvents(sequence=9, removed=keys(8)),  # older than the snapshot, so known already
    ]
    watches = len(p.watches)
    await events(p, worker_pb2.BlockEvents(sequence=4, stored=keys(4)))
    await until(lambda: len(p.watches) > watches)
    assert p.watches[-1].from_sequence == 0
    await until(lambda: worker.index.sequence == 9)
    assert worker.index.keys == set(keys(7, 8))


async def test_b6_a_snapshot_broken_off_starts_over(mesh: Mesh) -> None:
    p = await mesh.add("p0", ["prefill"])
    worker = mesh.gateway.fleet.get("p0")
    half = worker_pb2.BlockEvents(sequence=9, snapshot_start=True, stored=keys(7))
    await events(p, half)
    await until(lambda: worker.index.keys == set(keys(7)))
    p.next_blocks = [half, worker_pb2.BlockEvents(sequence=9, snapshot_end=True, stored=keys(8))]
    worker.mark_down("test")
    await until(lambda: worker.index.sequence == 9)
    assert p.watches[-1].from_sequence == 0
    assert worker.index.keys == set(keys(7, 8))


async def test_b6_a_new_gateway_rebuilds_the_index(mesh: Mesh, model_dir) -> None:
    prompt = list(b"x" * 64)
    stored = [key[:16] for key in block_keys(root_key(MODEL, "r1"), prompt, 16)]
    workers = [await mesh.add(name, ["prefill"]) for name in ("p0", "p1")]
    await mesh.add("d0", ["decode"])
    workers[1].blocks = [worker_pb2.BlockEvents(sequence=5, snapshot_start=True, snapshot_end=True, stored=stored)]
    other = Mesh(model_dir)
    await other.start()
    try:
        other.network, other.workers = mesh.network, mesh.workers
        await other.publish()
        for i in range(8):  # whatever the session: the hit decides
            request = ask(max_tokens=2, session_id=f"s{i}")
            request.token_ids.ids.extend(prompt)
            await generate(other, request)
        assert (len(workers[0].calls), len(workers[1].calls)) == (0, 8)
    finally:
        other.workers = {}
        await other.stop()


async def test_load_counts_what_was_sent_and_is_not_reported_yet(mesh: Mesh) -> None:
    p, d = await mesh.pair()
    p.prefill_gate.clear()
    fleet = mesh.gateway.fleet
    task = asyncio.create_task(generate(mesh, ask("x" * 100, max_tokens=2, n=2)))
    await d.until(lambda: bool(d.calls))
    assert fleet.get("p0").view().pending_prefill_tokens == 100
    assert fleet.get("d0").view().active_blocks == 7 + 2
    # The second report after it surely includes it.
    for waiting in (1, 2):
        p.load.waiting = waiting
        p.load.pending_prefill_tokens = 100
        await p.note()
        await until(lambda waiting=waiting: fleet.get("p0").load.waiting == waiting)
        assert fleet.get("p0").view().pending_prefill_tokens == (200 if waiting == 1 else 100)
    p.prefill_gate.set()
    await task
    assert fleet.get("d0").view().active_blocks == 0


async def test_two_requests_at_once_go_to_two_workers(mesh: Mesh) -> None:
    workers = [await mesh.add(name, ["prefill"]) for name in ("p0", "p1")]
    await mesh.add("d0", ["decode"])
    for worker in workers:
        worker.prefill_gate.clear()
    tasks = [asyncio.create_task(generate(mesh, ask("x" * 200, max_tokens=2))) for _ in range(2)]
    for worker in workers:
        await worker.until(lambda worker=worker: len(worker.calls) == 1)
        worker.prefill_gate.set()
    await asyncio.gather(*tasks)


async def test_a_worker_of_another_protocol_is_left_out(mesh: Mesh) -> None:
    p = await mesh.add("p0", ["prefill"])
    mesh.gateway.fleet.update({"p0": msgspec.structs.replace(p.record, protocol_version=99)})
    assert mesh.gateway.fleet.all() == []


async def test_trace_of_the_whole_mesh(mesh: Mesh) -> None:
    await mesh.pair()
    result = await generate(mesh, ask(max_tokens=3, request_id="mine"))
    traces = trace_pb2_grpc.TraceServiceStub(mesh.channel)
    async with asyncio.timeout(10):
        while True:
            found = await traces.GetTrace(trace_pb2.GetTraceRequest(request_id="mine"))
            names = {span.name for span in found.spans}
            if {"prefill.run", "decode.run", "gateway.generate"} <= names:
                break
    assert {span.trace_id for span in found.spans} == {result.accounting.trace_id}
    ids = {span.span_id for span in found.spans}
    assert [span.name for span in found.spans if span.parent_span_id not in ids] == ["gateway.generate"]
    by_id = {span.span_id: span for span in found.spans}
    prefill = next(span for span in found.spans if span.name == "prefill.run")
    assert by_id[prefill.parent_span_id].name == "epd.v1.PrefillService/Prefill"
    assert by_id[by_id[prefill.parent_span_id].parent_span_id].name == "gateway.generate"


@pytest.mark.parametrize("wanted", [{"trace_id": "0" * 32}, {"request_id": "nobody"}])
async def test_unknown_trace(mesh: Mesh, wanted: dict[str, str]) -> None:
    traces = trace_pb2_grpc.TraceServiceStub(mesh.channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await traces.GetTrace(trace_pb2.GetTraceRequest(**wanted))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
