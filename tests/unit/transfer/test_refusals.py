"""Who must not get blocks does not, and is told why; the rightful pull goes on undisturbed."""

import asyncio

import grpc
import msgspec
import pytest

from common.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    LayoutMismatch,
    TransferFailed,
    TransferRefused,
    WrongIncarnation,
)
from common.policies.handoff.terms import HandoffLimits, Span
from common.rpc import wire
from common.rpc.errors import from_rpc
from common.transfer.channel_grpc import span_to_proto
from common.transfer.key import Identity, TransferKey
from epd.v1 import transfer_pb2 as pb
from epd.v1 import transfer_pb2_grpc
from tests.unit.transfer.mesh import BLOCKS, LAYOUT, TICKET, Mesh, OwnerSide, PullerSide, new_key


async def refused(side: PullerSide, owner: OwnerSide, key: TransferKey, **changes: object) -> BaseException:
    """The error of a pull that must fail, and proof that it held nothing."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        await side.pull(owner, key, **changes)
    assert not side.reserved_for
    assert not side.pool.data.any()
    return caught.value


async def test_forged_ticket_wrong_tenant_and_foreign_puller_are_refused(mesh: Mesh) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    publication = owner.publish(key)
    owner.compute_all(publication)
    assert isinstance(await refused(mesh.puller(), owner, key, ticket=b"x" * 16), TransferRefused)
    assert isinstance(await refused(mesh.puller(), owner, key, tenant="other"), TransferRefused)
    stranger = mesh.puller()
    stranger.puller.identity = Identity("decode-0", "another life")
    assert isinstance(await refused(stranger, owner, key), TransferRefused)
    assert (await side.pull(owner, key)).moved


async def test_replayed_reference_is_refused(mesh: Mesh) -> None:
    """Case A2: used once, a ticket is worth nothing, during the transfer and after it."""
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    publication = owner.publish(key)
    first = side.pull(owner, key)
    await owner.table.until(lambda: owner.table.state(key).streaming)
    assert isinstance(await refused(mesh.puller(), owner, key), TransferRefused)
    owner.compute_all(publication)
    assert (await first).moved
    await owner.table.until(publication.released.is_set)
    assert isinstance(await refused(mesh.puller(), owner, key), TransferFailed)
    with pytest.raises(TransferFailed):
        await side.pull(owner, key)  # the puller's own table refuses the attempt, too


async def test_reads_need_the_lease_and_stay_inside(mesh: Mesh) -> None:
    """Case A2: out-of-range blocks, blocks that are not computed yet, another ticket, no open pull stream."""
    owner, side, key = await mesh.owner(), mesh.puller("grpc"), new_key()
    publication = owner.publish(key)
    async with grpc.aio.insecure_channel(owner.address) as channel:
        stub = transfer_pb2_grpc.TransferServiceStub(channel)

        async def read(span: Span, ticket: bytes = TICKET) -> BaseException | None:
            request = pb.ReadRequest(key=wire.key_to_proto(key), ticket=ticket, spans=[span_to_proto(span)])
            try:
                async for _ in stub.Read(request):
                    pass
            except grpc.aio.AioRpcError as error:
                return from_rpc(error)
            return None

        owner.engine.fill(BLOCKS)
        owner.start_computing(publication)
        publication.chunk(1, 0, 32, last=False)
        await owner.engine.reach(1)
        assert isinstance(await read(Span(0, 1, 0, 1)), TransferFailed)  # no pull stream yet
        side.room.clear()
        pulling = side.pull(owner, key)
        await owner.table.until(lambda: owner.table.state(key).streaming)
        assert await read(Span(0, 4, 0, 2)) is None
        assert isinstance(await read(Span(0, 1, 0, 1), ticket=b"x" * 16), TransferFailed)
        assert isinstance(await read(Span(0, 1, 2, 1)), TransferRefused)  # not computed
        assert isinstance(await read(Span(0, 1, 5, 1)), TransferRefused)  # beyond the transfer
        assert isinstance(await read(Span(4, 1, 0, 1)), TransferRefused)  # beyond the layers
        publication.cancel()
        assert isinstance(await read(Span(0, 1, 0, 1)), TransferFailed)
        with pytest.raises(TransferFailed):
            await pulling


async def test_different_layouts_are_named(mesh: Mesh) -> None:
    """Case A17: refused at the handshake, before the ticket is used."""
    other = msgspec.structs.replace(LAYOUT, dtype="bfloat16", block_size=32)
    owner, key = await mesh.owner(layout=other), new_key()
    owner.publish(key)
    error = await refused(mesh.puller(), owner, key)
    assert isinstance(error, LayoutMismatch)
    assert str(LAYOUT) in error.message
    assert str(other) in error.message
    assert owner.table.state(key).stream is None


@pytest.mark.parametrize(
    "field", ["model", "revision", "dtype", "num_layers", "num_kv_heads", "head_dim", "block_size"]
)
def test_every_field_of_a_layout_counts(field: str) -> None:
    value = getattr(LAYOUT, field)
    other = msgspec.structs.replace(LAYOUT, **{field: "bfloat16" if field == "dtype" else value + type(value)(1)})
    assert other.compat_id != LAYOUT.compat_id


async def test_restart_on_the_same_port_is_another_worker(mesh: Mesh) -> None:
    """Case A18: nothing meant for the dead life reaches the new one, which gets a handshake of its own."""
    old, side = await mesh.owner(life="p1"), mesh.puller()
    key = new_key()
    old.compute_all(old.publish(key))
    assert (await side.pull(old, key)).channel == "shm"  # the old pool is mapped now
    port = int(old.address.rpartition(":")[2])
    await old.stop()
    new = await mesh.owner(life="p2", port=port)
    assert isinstance(await refused(mesh.puller(), old, new_key()), WrongIncarnation)
    key = new_key()
    publication = new.publish(key)
    new.compute_all(publication)
    new.engine.fill(BLOCKS, seed=2)
    assert (await side.pull(new, key)).channel == "shm"
    assert side.has(new)


async def test_unknown_transfer_is_waited_for_within_bounds(mesh: Mesh) -> None:
    owner = await mesh.owner(limits=HandoffLimits(create_wait_seconds=0.1))
    assert isinstance(await refused(mesh.puller(), owner, new_key()), TransferFailed)
    assert owner.table.open_pulls == 0


async def test_deadline_is_a_hard_end(mesh: Mesh) -> None:
    owner, key = await mesh.owner(), new_key()
    publication = owner.publish(key, deadline_seconds=0.2)
    error = await refused(mesh.puller(), owner, key)
    assert isinstance(error, DeadlineExceeded)
    assert publication.released.is_set()


async def test_cancel_before_create_leaves_a_tombstone(mesh: Mesh) -> None:
    """Invariant 7, both sides."""
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    owner.table.cancel(key)
    owner.table.cancel(key)
    with pytest.raises(TransferFailed):
        owner.publish(key)
    side.puller.cancel(key)
    with pytest.raises(TransferFailed):
        await side.pull(owner, key)


async def test_newer_attempt_ends_the_older_on_both_sides(mesh: Mesh) -> None:
    """Invariant 3."""
    owner, side, old = await mesh.owner(), mesh.puller(), new_key()
    publication = owner.publish(old)
    owner.start_computing(publication)
    stale = side.pull(owner, old)
    await owner.table.until(lambda: owner.table.state(old).streaming)
    new = TransferKey(old.request_id, old.leg, 2)
    newer = owner.publish(new, ticket=b"u" * 16)
    assert publication.released.is_set()
    pulling = side.pull(owner, new, ticket=b"u" * 16)
    await asyncio.wait([stale])
    assert stale.cancelled() or isinstance(stale.exception(), TransferFailed)
    with pytest.raises(TransferRefused):
        owner.publish(old)
    with pytest.raises(DuplicateRequest):
        owner.publish(new)
    owner.compute_all(newer)
    assert (await pulling).moved
    assert side.has(owner)


async def test_first_message_must_open(mesh: Mesh) -> None:
    owner = await mesh.owner()
    async with grpc.aio.insecure_channel(owner.address) as channel:
        call = transfer_pb2_grpc.TransferServiceStub(channel).Pull(iter([pb.PullRequest(done=pb.PullDone())]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_owner_of_another_host_is_read_by_grpc(mesh: Mesh) -> None:
    owner, key = await mesh.owner(shm=False), new_key()
    owner.compute_all(owner.publish(key))
    side = mesh.puller("shm")
    assert (await side.pull(owner, key)).channel == "grpc"
    assert side.has(owner)


async def test_wrong_nonce_is_no_proof(mesh: Mesh) -> None:
    owner, key = await mesh.owner(), new_key()
    owner.compute_all(owner.publish(key))
    owner.service._nonce = b"n" * 16  # as if the socket that answered were another owner's
    side = mesh.puller("shm")
    assert (await side.pull(owner, key)).channel == "grpc"
    assert side.has(owner)
