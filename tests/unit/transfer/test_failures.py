"""Whatever breaks: an error, never a success with wrong bytes; nothing stays pinned; nothing is written afterwards."""

import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from common import telemetry
from common.errors import EngineFailed, Overloaded, TransferFailed
from common.policies.handoff.terms import HandoffLimits
from common.rpc import wire
from common.transfer import channel_grpc
from common.transfer.channel_shm import ShmChannel
from common.transfer.pull import Pull
from common.transfer.puller import PullTarget
from epd.v1 import transfer_pb2 as pb
from epd.v1 import transfer_pb2_grpc
from tests.unit.transfer import owner_process
from tests.unit.transfer.mesh import (
    BLOCKS,
    LAYOUT,
    PATIENCE_SECONDS,
    PULLER,
    TENANT,
    TICKET,
    TOKENS,
    Mesh,
    OwnerSide,
    PullerSide,
    new_key,
    prompt,
)


class Gate:
    """Holds up a function that runs in a worker thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holder: object, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.entered = asyncio.Event()
        self.opened = threading.Event()
        real = getattr(holder, name)

        def held(*args: Any) -> Any:
            self._loop.call_soon_threadsafe(self.entered.set)
            assert self.opened.wait(PATIENCE_SECONDS)
            return real(*args)

        monkeypatch.setattr(holder, name, held)


async def fails(pulling: "asyncio.Task[Any]", owner: OwnerSide, side: PullerSide) -> BaseException:
    await asyncio.wait([pulling])
    error = pulling.exception()
    assert isinstance(error, TransferFailed), error
    await owner.table.until(lambda: owner.table.open_pulls == 0)
    assert owner.table.open_publications == side.puller.open_pulls == 0
    return error


async def test_prefill_failure_is_told_at_once(mesh: Mesh) -> None:
    """Case A15. The error's text names the reason only."""
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    publication = owner.publish(key)
    pulling = side.pull(owner, key)
    await owner.table.until(lambda: owner.table.state(key).streaming)
    publication.fail(EngineFailed("details of the engine"))
    publication.fail(EngineFailed("again"))
    failures = telemetry.current().metrics.transfer_failures.labels(reason="TRANSFER_FAILED")
    before = failures._value.get()
    error = await fails(pulling, owner, side)
    assert "ENGINE_FAILED" in str(error)
    assert failures._value.get() == before + 1
    assert "details" not in str(error)
    assert owner.releases == 1


async def test_blocks_given_away_before_the_copy_are_refused(mesh: Mesh, channel: str) -> None:
    """Case A1: the announced generation is gone."""
    owner, side, key = await mesh.owner(), mesh.puller(channel), new_key()
    publication = owner.publish(key)
    owner.start_computing(publication)
    owner.engine.pool.generations[BLOCKS[1]] += 1
    owner.engine.fill(BLOCKS)
    publication.chunk(1, 0, 64, last=False)
    await owner.engine.reach(1)
    await fails(side.pull(owner, key), owner, side)


async def test_blocks_given_away_during_the_copy_are_refused(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A1: equal before, another one after."""
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    real = ShmChannel.__init__

    class Racing:
        """The owner's pool, whose block changes hands while it is being read."""

        def __init__(self, pool: Any) -> None:
            self.generations, self._pool = pool.generations, pool

        @property
        def data(self) -> np.ndarray:
            owner.engine.pool.generations[BLOCKS[0]] += 1
            return self._pool.data

    monkeypatch.setattr(ShmChannel, "__init__", lambda self, source, *rest: real(self, Racing(source), *rest))
    owner.compute_all(owner.publish(key))
    error = await fails(side.pull(owner, key), owner, side)
    assert "another sequence" in str(error)


@pytest.mark.parametrize("damage", ["corrupt", "short", "long"])
async def test_damaged_pieces_are_refused(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """Case A3, on the channel that leaves the host."""
    owner, side, key = await mesh.owner(), mesh.puller("grpc"), new_key()
    real = owner.service._copy

    def damaged(*args: Any) -> list[bytes]:
        pieces = real(*args)
        return {"corrupt": pieces, "short": pieces[:-1], "long": [*pieces, b"more"]}[damage]

    monkeypatch.setattr(owner.service, "_copy", damaged)
    if damage == "corrupt":
        checksum = channel_grpc.checksum
        monkeypatch.setattr(channel_grpc, "checksum", lambda data: checksum(data) ^ 1)
    owner.compute_all(owner.publish(key))
    await fails(side.pull(owner, key), owner, side)


async def test_other_tokens_are_refused(mesh: Mesh) -> None:
    """Invariant 4: both workers must have the same prompt; a hash that differs is never committed."""
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    owner.compute_all(owner.publish(key))
    error = await fails(side.pull(owner, key, token_ids=[*TOKENS[:-1], 0]), owner, side)
    assert "other tokens" in str(error)


async def test_other_token_count_is_refused_before_room_is_taken(mesh: Mesh) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    owner.compute_all(owner.publish(key))
    await fails(side.pull(owner, key, token_ids=TOKENS[:-1]), owner, side)
    assert not side.reserved_for


async def test_refused_room_ends_the_lease(mesh: Mesh) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    publication = owner.publish(key)
    owner.compute_all(publication)

    async def full(token_count: int) -> Any:
        raise Overloaded("no room")

    with pytest.raises(Overloaded):
        await side.puller.pull(side.target(owner, key), full)
    await owner.table.until(publication.released.is_set)


async def test_cancelled_pull_waits_for_its_copy(mesh: Mesh, channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A4, the puller's side: its blocks are not given back under a thread that writes to them."""
    owner, side, key = await mesh.owner(), mesh.puller(channel), new_key()
    publication = owner.publish(key)
    owner.compute_all(publication)
    gate = Gate(monkeypatch, *((ShmChannel, "_copy") if channel == "shm" else (channel_grpc._Cursor, "write")))
    pulling = side.pull(owner, key)
    await gate.entered.wait()
    for _ in range(3):  # however often
        pulling.cancel()
        await owner.table.until(publication.released.is_set)  # the owner hears of it at once
        assert not pulling.done()
    gate.opened.set()
    await asyncio.wait([pulling])
    assert pulling.cancelled()
    before = side.pool.data.copy()
    await owner.table.until(lambda: owner.table.open_pulls == 0)
    assert np.array_equal(before, side.pool.data)


async def test_cancelled_publication_waits_for_reads_under_way(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A4, the owner's side: blocks are given back only after the copy out of them."""
    owner, side, key = await mesh.owner(), mesh.puller("grpc"), new_key()
    publication = owner.publish(key)
    owner.compute_all(publication)
    gate = Gate(monkeypatch, owner.service, "_copy")
    pulling = side.pull(owner, key)
    await gate.entered.wait()
    publication.cancel()
    publication.cancel()
    await asyncio.wait([pulling])  # the puller knows already
    assert isinstance(pulling.exception(), TransferFailed)
    assert not publication.released.is_set()
    gate.opened.set()
    await owner.table.until(publication.released.is_set)
    assert owner.releases == 1


async def test_stalled_puller_is_ended(mesh: Mesh) -> None:
    """A peer whose stream is open but who reads nothing; its keep-alives would go on for ever."""
    owner, key = await mesh.owner(limits=HandoffLimits(stall_seconds=0.2)), new_key()
    publication = owner.publish(key)
    owner.compute_all(publication)
    async with grpc.aio.insecure_channel(owner.address) as channel:
        call = transfer_pb2_grpc.TransferServiceStub(channel).Pull()
        await call.write(
            pb.PullRequest(
                open=pb.PullOpen(
                    key=wire.key_to_proto(key),
                    ticket=TICKET,
                    owner=wire.identity_to_proto(owner.identity),
                    puller=wire.identity_to_proto(PULLER),
                    compat_id=LAYOUT.compat_id,
                    layout=wire.layout_to_proto(LAYOUT),
                    channels=["grpc"],
                    tenant=TENANT,
                )
            )
        )

        async def listen() -> None:
            while await call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError, match="no progress"):
            await listen()
    assert publication.released.is_set()


async def test_unpulled_publication_is_released(mesh: Mesh) -> None:
    owner, key = await mesh.owner(limits=HandoffLimits(unpulled_seconds=0.1)), new_key()
    publication = owner.publish(key)
    owner.compute_all(publication)
    await owner.table.until(publication.released.is_set)
    assert owner.releases == 1


async def test_blocks_that_come_after_the_end_are_given_back(mesh: Mesh) -> None:
    """The engine's Started may be on its way when the publication is cancelled."""
    owner, key = await mesh.owner(), new_key()
    publication = owner.publish(key)
    publication.cancel()
    assert owner.releases == 1
    owner.compute_all(publication)
    assert owner.releases == 3  # told at Started and at Finished again: on_release is idempotent


async def test_silent_owner_is_given_up(mesh: Mesh) -> None:
    """A5: an address that accepts connections and never answers."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    owner = await mesh.owner()
    side = mesh.puller(limits=HandoffLimits(create_wait_seconds=0.1, stall_seconds=0.1))
    with pytest.raises(TransferFailed):
        await side.pull(owner, new_key(), address=address)
    server.close()


@pytest.mark.parametrize("steps", range(0, 24, 2))
async def test_cancelled_anywhere(mesh: Mesh, channel: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled at its n-th step: the lease ends, no copy runs on, and the next attempt works."""
    owner, side, key = await mesh.owner(), mesh.puller(channel), new_key()
    publication = owner.publish(key)
    pulling: asyncio.Task[Any]
    count = 0
    real = Pull._step

    def counted(self: Pull, event: Any) -> None:
        nonlocal count
        if count == steps:
            pulling.cancel()
        count += 1
        real(self, event)

    monkeypatch.setattr(Pull, "_step", counted)
    pulling = side.pull(owner, key)
    await asyncio.sleep(0)
    if steps == 0:
        pulling.cancel()
    owner.compute_all(publication)
    await asyncio.wait([pulling])
    assert pulling.cancelled() or count <= steps
    if steps == 0:
        publication.cancel()  # nobody had opened it
    before = side.pool.data.copy()
    await owner.table.until(lambda: publication.released.is_set() and owner.table.open_pulls == 0)
    assert np.array_equal(before, side.pool.data)
    assert side.puller.open_pulls == 0
    monkeypatch.undo()
    key = new_key()
    owner.compute_all(owner.publish(key))
    assert (await side.pull(owner, key)).moved
    assert side.has(owner)


async def test_killed_owner_fails_the_pull(mesh: Mesh, channel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case A5: SIGKILL while prefill computes, some blocks read already."""
    first_copy = asyncio.Event()
    real = Pull._copy_ended

    def noticed(self: Pull, task: Any) -> None:
        real(self, task)
        first_copy.set()

    monkeypatch.setattr(Pull, "_copy_ended", noticed)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.unit.transfer.owner_process",
        str(mesh.run_dir),
        cwd=Path(__file__).parents[3],
        stdin=asyncio.subprocess.PIPE,  # its end ends the process, should this test die first
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            address = (await process.stdout.readline()).decode().strip()
            side = mesh.puller(channel)
            target = PullTarget(
                key=owner_process.KEY,
                ticket=TICKET,
                owner=owner_process.IDENTITY,
                address=address,
                tenant=TENANT,
                deadline_seconds=60.0,
                **prompt(TOKENS),
            )
            pulling = asyncio.create_task(side.puller.pull(target, side.reserve))
            await first_copy.wait()
            process.send_signal(signal.SIGKILL)
            with pytest.raises(TransferFailed):
                await pulling
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    assert side.pool.data[:, side.blocks[:2]].all()
    assert side.puller.open_pulls == 0
