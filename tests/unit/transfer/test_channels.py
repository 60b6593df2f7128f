"""Pieces of the channels by themselves."""

import asyncio
import mmap
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from common.errors import TransferFailed, Unavailable
from common.policies.handoff.terms import Span, Watermark, inside, spans_between
from common.transfer.channel import RateLimit, check_generations, pieces, runs, settled, split
from common.transfer.channel_shm import ShmClient, ShmServer, private_dir, socket_path
from common.transfer.key import Identity
from common.transfer.pool_memory import PoolMemory
from common.transfer.tables import PublicationTables
from tests.unit.transfer.mesh import BLOCKS, TICKET, Mesh, new_key


def units(spans: list[Span]) -> list[tuple[int, int]]:
    return [
        (layer, block)
        for span in spans
        for layer in range(span.first_layer, span.first_layer + span.layer_count)
        for block in range(span.first_block, span.first_block + span.block_count)
    ]


def region(mark: Watermark, blocks: int, layers: int) -> set[tuple[int, int]]:
    return {(l, b) for l in range(layers) for b in range(blocks) if b < mark.blocks or l < mark.layers}  # noqa: E741


def test_spans_between_are_exactly_what_is_new() -> None:
    """All pairs of watermarks of a small transfer, hits of the puller beyond the owner's included."""
    blocks, layers = 3, 2
    marks = [Watermark(b, l) for b in range(blocks + 1) for l in range(layers + 1)]  # noqa: E741
    for taken in marks:
        for ready in marks:
            if ready.layers < taken.layers:
                continue
            found = units(list(spans_between(taken, ready, blocks, layers)))
            assert len(found) == len(set(found))
            assert set(found) == region(ready.join(taken), blocks, layers) - region(taken, blocks, layers)
            assert all(inside(span, ready.join(taken), blocks, layers) for span in spans_between(taken, ready, 3, 2))


@pytest.mark.parametrize("span", [Span(0, 0, 0, 1), Span(0, 1, 0, 0), Span(-1, 1, 0, 1), Span(0, 1, -1, 1)])
def test_senseless_spans_are_never_readable(span: Span) -> None:
    assert not inside(span, Watermark(3, 2), 3, 2)


def test_runs() -> None:
    assert list(runs([3, 4, 9, 1, 2])) == [(0, 3, 2), (2, 9, 1), (3, 1, 2)]
    assert list(runs([])) == []


@pytest.mark.parametrize("limit", [1, 8, 16, 20, 1000])
def test_split_keeps_every_unit_once_and_the_limit(limit: int) -> None:
    span = Span(1, 3, 2, 5)
    parts = list(split(span, 8, limit))
    assert sorted(units(parts)) == sorted(units([span]))
    assert all(part.units * 8 <= max(limit, 8) for part in parts)


@pytest.mark.parametrize("limit", [5, 16, 1 << 20])
def test_pieces_join_to_the_spans_bytes(limit: int) -> None:
    pool = PoolMemory.create(2, 6, 16)
    pool.data[:] = np.random.default_rng(0).integers(0, 256, pool.data.shape, np.uint8)
    blocks = [4, 5, 1]
    found = [b"".join(part.tobytes() for part in piece) for piece in pieces(pool, blocks, Span(0, 2, 0, 3), limit)]
    assert b"".join(found) == pool.data[:, blocks].tobytes()
    assert all(len(piece) <= limit for piece in found)


def test_generations_are_compared_for_the_span_only() -> None:
    pool = PoolMemory.create(1, 4, 16)
    pool.generations[:] = [5, 6, 7, 8]
    check_generations(pool, Span(0, 1, 1, 1), [0, 2], [99, 7])
    with pytest.raises(TransferFailed):
        check_generations(pool, Span(0, 1, 0, 2), [0, 2], [99, 7])


async def test_rate_limit_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pulls over one link of 100 bytes/s: the second waits for the first."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 10.0)
    limit = RateLimit(100)
    await limit.take(50)
    await limit.take(100)
    assert slept == pytest.approx([0.5, 1.5])


async def test_settled_outlasts_cancellation() -> None:
    release = threading.Event()
    task = asyncio.create_task(settled(asyncio.to_thread(release.wait)))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    release.set()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_settled_passes_results_and_errors() -> None:
    assert await settled(asyncio.to_thread(lambda: 3)) == 3
    with pytest.raises(ValueError, match="no"):
        await settled(asyncio.to_thread(lambda: (_ for _ in ()).throw(ValueError("no"))))


async def test_socket_gives_a_read_only_pool_under_the_lease_only(mesh: Mesh) -> None:
    owner, side, key = await mesh.owner(), mesh.puller("grpc"), new_key()
    owner.publish(key)

    async def attach(ticket: bytes) -> PoolMemory:
        client = await ShmClient.connect(mesh.run_dir, owner.identity)
        assert client is not None
        try:
            return await client.attach(key, ticket)
        finally:
            client.close()

    with pytest.raises(Unavailable):
        await attach(TICKET)  # no pull stream is open
    pulling = side.pull(owner, key)
    await owner.table.until(lambda: owner.table.state(key).streaming)
    with pytest.raises(Unavailable):
        await attach(b"x" * 16)
    pool = await attach(TICKET)
    owner.engine.fill(BLOCKS)
    assert np.array_equal(pool.data, owner.engine.pool.data)
    with pytest.raises(ValueError, match="read-only"):
        pool.data[0, 0, 0] = 1
    with pytest.raises(PermissionError):
        mmap.mmap(pool.fd, 0, access=mmap.ACCESS_WRITE)
    owner.table.cancel(key)
    await asyncio.wait([pulling])


async def test_no_socket_no_shm(mesh: Mesh) -> None:
    assert await ShmClient.connect(mesh.run_dir, Identity("nobody", "here")) is None


async def test_dead_socket_is_no_socket(mesh: Mesh) -> None:
    path = socket_path(mesh.run_dir, Identity("dead", "d"))
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert path.exists()
    assert await ShmClient.connect(mesh.run_dir, Identity("dead", "d")) is None


async def test_run_directory_must_be_private(mesh: Mesh, tmp_path: Path) -> None:
    assert private_dir(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    os.chmod(tmp_path, 0o755)
    owner = await mesh.owner(shm=False)
    with pytest.raises(PermissionError):
        ShmServer(tmp_path, PublicationTables(kv=owner.table))
