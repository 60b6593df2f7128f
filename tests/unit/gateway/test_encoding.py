"""The encode stage against fake encode workers: parts, refusals, another encoder for a dead or a slow one."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import InvalidArgument, NoWorkers, Overloaded, WorkerLost
from epd.v1 import types_pb2
from services.gateway.accounting import AttemptRecord
from services.gateway.call import CallFailed
from services.gateway.encoding import Encoding
from services.gateway.media import MediaItem
from tests.fakes import MODEL, FakeWorker
from tests.unit.gateway.conftest import Mesh


def media(*names: str) -> tuple[MediaItem, ...]:
    return tuple(
        MediaItem(
            index=i,
            key=name.encode() * 32,
            data=name.encode() * 100,
            start=10 * i,
            length=8,
            rows=8,
            grid=(1, 2, 4),
            field=f"messages[{i}].content[2]",
        )
        for i, name in enumerate(names)
    )


def stage(
    mesh: Mesh, items: Sequence[MediaItem], exclude: frozenset[str] = frozenset()
) -> tuple[Encoding, AttemptRecord]:
    request: Any = SimpleNamespace(media=tuple(items), model=MODEL, tenant="t", priority=0, cache_bytes=0)
    record = AttemptRecord(attempt=1, started=0.0)
    key = types_pb2.RequestKey(request_id=b"r" * 16, leg=0, attempt=1)
    puller = mesh.gateway.fleet.get("p0")
    assert puller is not None
    return Encoding(request, key, record, mesh.gateway.generator.orchestrator, puller, exclude), record


async def encoders(mesh: Mesh, count: int) -> list[FakeWorker]:
    await mesh.add("p0", ["prefill"])
    return [await mesh.add(f"e{i}", ["encode"]) for i in range(count)]


def asked(worker: FakeWorker) -> list[list[int]]:
    return [[image.index for image in request.images] for method, request in worker.calls if method == "encode"]


async def test_parts_go_to_several_encoders_and_come_back_in_prompt_order(mesh: Mesh) -> None:
    workers = await encoders(mesh, 2)
    encoding, record = stage(mesh, media("a", "b", "c", "d"))
    async with encoding.embeddings() as found:
        assert [each.position for each in found] == [0, 10, 20, 30]
        assert [each.media_key[:1] for each in found] == [b"a", b"b", b"c", b"d"]
        assert all((each.length, each.rows, tuple(each.grid)) == (8, 8, (1, 2, 4)) for each in found)
        assert sorted(len(images) for worker in workers for images in asked(worker)) == [2, 2]
        assert len({(each.part, each.ticket) for each in found}) == 2
        assert all(worker.running == 1 for worker in workers)  # the calls keep the embeddings for the puller
    for worker in workers:
        await worker.until(lambda worker=worker: worker.running == 0)
    assert record.encode_workers == ["e0", "e1"]
    assert record.cached_images == 0


async def test_a_known_picture_is_asked_for_without_its_file(mesh: Mesh) -> None:
    (worker,) = await encoders(mesh, 1)
    items = media("a", "b")
    worker.encoded.add(items[0].key)
    fleet_worker = mesh.gateway.fleet.get("e0")
    assert fleet_worker is not None
    fleet_worker.index.keys.add(items[0].key[:16])
    encoding, record = stage(mesh, items)
    async with encoding.embeddings():
        pass
    assert [bool(image.data) for image in worker.calls[0][1].images] == [False, True]
    assert record.cached_images == 1


async def test_an_evicted_picture_is_sent_again(mesh: Mesh) -> None:
    (worker,) = await encoders(mesh, 1)
    items = media("a", "b")
    fleet_worker = mesh.gateway.fleet.get("e0")
    assert fleet_worker is not None
    fleet_worker.index.keys.add(items[0].key[:16])
    encoding, record = stage(mesh, items)
    async with encoding.embeddings() as found:
        assert len(found) == 2
    sent = [[bool(image.data) for image in request.images] for _, request in worker.calls]
    assert sent == [[False, True], [True, True]]
    assert record.cached_images == 0


async def test_case_d11_another_encoder_takes_the_images_of_a_dead_one(mesh: Mesh) -> None:
    workers = await encoders(mesh, 2)
    for worker in workers:
        worker.encode_gate.clear()
    encoding, _ = stage(mesh, media("a", "b"))

    async def kill_one() -> None:
        await asyncio.gather(*(worker.until(lambda worker=worker: worker.running == 1) for worker in workers))
        await workers[0].kill()
        workers[1].encode_gate.set()

    killing = asyncio.create_task(kill_one())
    async with asyncio.timeout(20), encoding.embeddings() as found:
        assert {each.owner.worker_id for each in found} == {"e1"}
        assert [each.position for each in found] == [0, 10]
    await killing
    assert sorted(image for images in asked(workers[1]) for image in images) == [0, 1]


async def test_a_slow_encoder_is_overtaken(mesh: Mesh, model_dir: Any) -> None:
    await mesh.stop()
    await mesh.start(encode_hedge_seconds=0.05)
    mesh.workers.clear()
    workers = await encoders(mesh, 2)
    encoding, record = stage(mesh, media("a"))
    slow = workers[0]
    slow.encode_gate.clear()
    workers[1].encode_gate.clear()

    async def let_the_other_go() -> None:
        await asyncio.gather(*(worker.until(lambda worker=worker: worker.running == 1) for worker in workers))
        workers[1].encode_gate.set()

    letting = asyncio.create_task(let_the_other_go())
    async with asyncio.timeout(20), encoding.embeddings():
        assert record.encode_workers == ["e1"]
        await slow.until(lambda: slow.running == 0)
    await letting


async def test_a_bad_image_is_final(mesh: Mesh) -> None:
    (worker,) = await encoders(mesh, 1)
    worker.encode_errors = [InvalidArgument("image 1: the file is truncated", field="images[1]")]
    encoding, _ = stage(mesh, media("a", "b"))
    with pytest.raises(CallFailed) as caught:
        async with encoding.embeddings():
            pass
    assert isinstance(caught.value.error, InvalidArgument)
    assert not caught.value.error.retryable
    assert caught.value.error.field == "messages[1].content[2]"  # where the client has put it
    assert caught.value.error.message == "messages[1].content[2]: the file is truncated"
    assert len(worker.calls) == 1


async def test_room_on_all_encoders_or_on_none(mesh: Mesh) -> None:
    """One encoder is full: the other's room is given back before both are asked again."""
    workers = await encoders(mesh, 2)
    workers[0].encode_errors = [Overloaded("full", retry_after_seconds=0.01)]
    encoding, _ = stage(mesh, media("a", "b"))
    async with asyncio.timeout(20), encoding.embeddings() as found:
        assert len(found) == 2
        assert all(worker.running == 1 for worker in workers)
    assert len(workers[0].calls) == 2
    assert len(workers[1].calls) == 2


async def test_no_room_for_long_is_refused_with_a_hint(mesh: Mesh) -> None:
    await mesh.stop()
    await mesh.start(hold_seconds=0.1)
    mesh.workers.clear()
    (worker,) = await encoders(mesh, 1)
    worker.encode_errors = [Overloaded("full", retry_after_seconds=0.01)] * 1000
    encoding, _ = stage(mesh, media("a"))
    with pytest.raises(Overloaded) as caught:
        async with encoding.embeddings():
            pass
    assert caught.value.retry_after_seconds
    assert worker.running == 0


async def test_without_encoders_the_request_is_refused(mesh: Mesh) -> None:
    await encoders(mesh, 0)
    encoding, _ = stage(mesh, media("a"))
    with pytest.raises(NoWorkers):
        async with encoding.embeddings():
            pass


async def test_tries_are_bounded(mesh: Mesh) -> None:
    (worker,) = await encoders(mesh, 1)
    worker.encode_errors = [WorkerLost("broken")] * 1000
    encoding, _ = stage(mesh, media("a"))
    with pytest.raises(CallFailed):
        async with encoding.embeddings():
            pass
    assert len(worker.calls) < 10


async def test_text_needs_no_encoder(mesh: Mesh) -> None:
    await encoders(mesh, 0)
    encoding, record = stage(mesh, ())
    async with encoding.embeddings() as found:
        assert found == []
    assert record.encoding == 0.0
