"""One worker with two pools: which one a transfer reads is said by its part, on every way to the bytes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from common.cache.keys import EmbeddingLayout, embedding_hash
from common.engine.messages import Reserved
from common.errors import LayoutMismatch, NotReady, TransferFailed
from common.policies.handoff.terms import HandoffLimits
from common.rpc import wire
from common.transfer.key import TransferKey
from common.transfer.layout import show_layout, shown_layout
from common.transfer.pool_memory import PoolMemory
from common.transfer.puller import Puller, PullTarget
from common.transfer.tables import PublicationTables
from epd.v1 import transfer_pb2 as pb
from epd.v1 import types_pb2
from tests.unit.transfer.mesh import (
    LAYOUT,
    POOL_BLOCKS,
    PULLER,
    TENANT,
    TICKET,
    FakeEngine,
    Mesh,
    OwnerSide,
    Table,
    new_key,
    plain_channel,
)

EMBEDDINGS = EmbeddingLayout(model="m", revision="r", dtype="float32", levels=2, hidden_size=24)
MEDIA = [(b"a" * 32, 20), (b"b" * 32, 16)]
BLOCKS = [7, 2, 30]


class BothSides:
    """An owner of both pools, and a puller of embeddings beside the mesh's of KV."""

    def __init__(self, owner: OwnerSide, limits: HandoffLimits) -> None:
        self.owner = owner
        self.engine = FakeEngine(EMBEDDINGS)  # type: ignore[arg-type]
        self.table = Table(owner.identity, self.engine, limits=limits)
        tables = PublicationTables(owner.table, self.table)
        # As a worker with both roles has them from the start.
        owner.service._publications = tables
        assert owner.shm is not None
        owner.shm._publications = tables

    def publish(self, key: TransferKey) -> None:
        publication = self.table.publish(
            key, TICKET, puller=PULLER, tenant=TENANT, deadline_seconds=60.0, on_release=lambda: None
        )
        self.engine.fill(BLOCKS, seed=5)
        publication.started(BLOCKS, [int(self.engine.pool.generations[block]) for block in BLOCKS], 36)
        publication.finished((), 36, embedding_hash(MEDIA))


def target(owner: OwnerSide, key: TransferKey) -> PullTarget:
    return PullTarget(
        key=key,
        ticket=TICKET,
        owner=owner.identity,
        address=owner.address,
        tenant=TENANT,
        token_count=36,
        content_hash=embedding_hash(MEDIA),
        num_blocks=3,
        deadline_seconds=60.0,
    )


class EmbeddingPuller:
    def __init__(self, mesh: Mesh, channel: str, layout: EmbeddingLayout = EMBEDDINGS) -> None:
        self.pool = PoolMemory.create(layout.levels, POOL_BLOCKS, layout.unit_bytes)
        channels = ("shm", "grpc") if channel == "shm" else (channel,)
        self.puller = Puller(PULLER, self.pool, layout, plain_channel, channels=channels, run_dir=str(mesh.run_dir))

    async def reserve(self, _: int) -> Reserved:
        return Reserved(seq="", blocks=[0, 1, 2], generations=[], hit_blocks=0, wait_seconds=0.0)


@pytest.fixture
async def both(mesh: Mesh) -> AsyncIterator[BothSides]:
    limits = HandoffLimits(create_wait_seconds=0.3)
    sides = BothSides(await mesh.owner(limits=limits), limits)
    yield sides
    sides.table.shut_down()


async def test_kv_and_embeddings_of_one_request_at_once(mesh: Mesh, both: BothSides, channel: str) -> None:
    key = new_key()
    part = msgspec.structs.replace(key, part=1)
    both.owner.compute_all(both.owner.publish(key))
    both.publish(part)
    kv, embeddings = mesh.puller(channel), EmbeddingPuller(mesh, channel)
    first, second = await asyncio.gather(
        kv.pull(both.owner, key), embeddings.puller.pull(target(both.owner, part), embeddings.reserve)
    )
    assert first.channel == second.channel == channel
    assert kv.has(both.owner)
    assert np.array_equal(embeddings.pool.data[:, :3], both.engine.pool.data[:, BLOCKS])
    assert second.first == []
    assert second.bytes_read == 3 * EMBEDDINGS.levels * EMBEDDINGS.unit_bytes
    await both.table.until(lambda: both.table.open_publications == 0)
    await embeddings.puller.close()


async def test_case_d13_embeddings_that_are_not_published(mesh: Mesh, both: BothSides) -> None:
    """Retryable, unlike KV that nobody published: its prompt must be computed again."""
    embeddings = EmbeddingPuller(mesh, "shm")
    with pytest.raises(NotReady):
        await embeddings.puller.pull(target(both.owner, new_key(part=1)), embeddings.reserve)
    with pytest.raises(TransferFailed):
        await mesh.puller().pull(both.owner, new_key())
    assert both.table.open_pulls == both.owner.table.open_pulls == 0
    await embeddings.puller.close()


async def test_layouts_of_the_two_pools_are_not_mixed(mesh: Mesh, both: BothSides) -> None:
    key = new_key(part=1)
    both.publish(key)
    with pytest.raises(LayoutMismatch) as refused:
        await mesh.puller().pull(both.owner, key)  # with the KV pool's layout
    assert str(LAYOUT) in refused.value.message
    assert str(EMBEDDINGS) in refused.value.message


async def test_a_pool_that_the_worker_has_not(mesh: Mesh) -> None:
    owner, embeddings = await mesh.owner(), EmbeddingPuller(mesh, "shm")
    with pytest.raises(TransferFailed, match="no embeddings"):
        await embeddings.puller.pull(target(owner, new_key(part=1)), embeddings.reserve)
    await embeddings.puller.close()


async def test_attempts_of_parts_are_apart(both: BothSides) -> None:
    """A newer attempt of one part ends the older one of that part alone."""
    key = new_key()
    for part in (1, 2):
        both.publish(msgspec.structs.replace(key, part=part))
    both.publish(msgspec.structs.replace(key, part=2, attempt=2))
    assert both.table.state(msgspec.structs.replace(key, part=1)).live
    assert both.table.state(msgspec.structs.replace(key, part=2)) is None


@pytest.mark.parametrize("layout", [LAYOUT, EMBEDDINGS], ids=["kv", "embeddings"])
def test_layouts_round_trip(layout: Any) -> None:
    opening = pb.PullOpen()
    show_layout(opening, layout)
    assert shown_layout(opening) == layout
    assert opening.compat_id == layout.compat_id


def test_media_round_trip() -> None:
    message = types_pb2.EmbeddingRef(media_key=b"k" * 32, position=3, length=9, rows=8, grid=[1, 2, 4])
    media = wire.media_from_proto(message)
    assert (media.key, media.start, media.length, media.rows, media.grid) == (b"k" * 32, 3, 9, 8, (1, 2, 4))
    assert media.blocks == ()
