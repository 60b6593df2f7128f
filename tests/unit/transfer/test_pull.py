"""Whole transfers: the right bytes, early, on both channels."""

import asyncio

import pytest

from common.cache.keys import token_hash
from common.policies.handoff.terms import HandoffLimits, Watermark
from common.transfer import pull
from tests.unit.transfer.mesh import BLOCK_SIZE, BLOCKS, LAYERS, LAYOUT, TOKENS, Mesh, first_token, new_key

ALL_BYTES = len(BLOCKS) * LAYOUT.block_bytes


async def test_bytes_arrive(mesh: Mesh, channel: str) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(channel), new_key()
    publication = owner.publish(key)
    owner.compute_all(publication)
    result = await side.pull(owner, key)
    assert side.has(owner)
    assert (result.moved, result.bytes_read, result.channel) == (True, ALL_BYTES, channel)
    assert result.first == first_token()
    assert result.reserved is not None
    assert 0 <= result.exposed_seconds <= result.total_seconds
    await owner.table.until(publication.released.is_set)
    assert owner.releases == 1
    assert owner.table.open_publications == side.puller.open_pulls == 0


async def test_hit_blocks_are_not_read(mesh: Mesh, channel: str) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(channel), new_key()
    side.hit_blocks = 2
    side.pool.data[:, side.blocks[:2]] = 255
    owner.compute_all(owner.publish(key))
    result = await side.pull(owner, key)
    assert result.bytes_read == 3 * LAYOUT.block_bytes
    assert (side.pool.data[:, side.blocks[:2]] == 255).all()
    assert side.has(owner, slice(2, None))


async def test_chunks_then_layers_are_read_while_prefill_computes(mesh: Mesh, channel: str) -> None:
    """Each piece is here before the next one is computed: nothing waits for the end of prefill."""
    owner, side, key = await mesh.owner(), mesh.puller(channel), new_key()
    publication = owner.publish(key)
    pulling = side.pull(owner, key)
    owner.engine.fill(BLOCKS)
    owner.start_computing(publication)

    publication.chunk(1, 0, 40, last=False)
    await owner.engine.reach(1)
    await owner.table.until(lambda: owner.table.state(key).taken.blocks == 40 // BLOCK_SIZE)
    assert side.has(owner, slice(0, 2))
    assert not side.pool.data[:, side.blocks[2:]].any()

    publication.chunk(2, 40, 70, last=True)
    for layer in range(LAYERS - 1):
        await owner.engine.reach(2, layer + 1)
        await owner.table.until(lambda done=layer + 1: owner.table.state(key).taken.layers == done)
        assert side.has(owner, layers=slice(0, layer + 1))
        assert not side.pool.data[layer + 1 :, side.blocks[2:]].any()
        assert not pulling.done()
    await owner.engine.reach(2)
    publication.finished(first_token(), len(TOKENS), token_hash(TOKENS))
    result = await pulling
    assert side.has(owner)
    assert result.bytes_read == ALL_BYTES


async def test_prefix_cached_at_the_owner_is_readable_at_once(mesh: Mesh) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    publication = owner.publish(key)
    pulling = side.pull(owner, key)
    owner.engine.fill(BLOCKS)
    owner.start_computing(publication)
    publication.chunk(1, 48, 70, last=True)  # 48 tokens came from the owner's prefix cache; the step has not run
    await owner.table.until(lambda: owner.table.state(key).taken.blocks == 3)
    assert side.has(owner, slice(0, 3))
    publication.cancel()
    await asyncio.wait([pulling])


async def test_pull_before_publication_waits_for_it(mesh: Mesh) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    pulling = side.pull(owner, key)
    await owner.table.until(lambda: owner.table.open_pulls == 1)
    assert not side.reserved_for  # it holds nothing while it waits
    owner.compute_all(owner.publish(key))
    await pulling
    assert side.has(owner)


async def test_no_room_holds_the_lease(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for room, the puller says so, and the owner keeps the blocks beyond the stall limit."""
    monkeypatch.setattr(pull, "WAITING_ACK_SECONDS", 0.1)
    limits = HandoffLimits(stall_seconds=1.5)
    owner = await mesh.owner(limits=limits)
    side, key = mesh.puller(), new_key()
    side.room.clear()
    owner.compute_all(owner.publish(key))
    pulling = side.pull(owner, key)

    def renewed() -> bool:
        """Without the signs of life, the limit would be over long ago."""
        state = owner.table.state(key)
        return state.waiting_since is not None and state.progress_at > state.waiting_since + limits.stall_seconds

    await owner.table.until(renewed)
    side.room.set()
    assert (await pulling).moved


async def test_all_choices_ended_moves_nothing(mesh: Mesh) -> None:
    """Case A6: the first token is a stop token."""
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    side.room.clear()  # not even room is waited for
    publication = owner.publish(key)
    owner.compute_all(publication, finish_reason="stop")
    result = await side.pull(owner, key)
    assert (result.moved, result.bytes_read, result.reserved) == (False, 0, None)
    assert result.first == first_token("stop")
    await owner.table.until(publication.released.is_set)


async def test_the_map_is_kept_for_the_owners_life(mesh: Mesh) -> None:
    owner, side = await mesh.owner(), mesh.puller()
    for seed in range(2):
        key = new_key()
        publication = owner.publish(key)
        owner.compute_all(publication)
        owner.engine.fill(BLOCKS, seed)
        assert (await side.pull(owner, key)).channel == "shm"
        assert side.has(owner)
        assert owner.shm is not None
        await owner.shm.stop()  # the second pull has nobody to ask


async def test_throttled_pull_is_paced(mesh: Mesh, channel: str) -> None:
    owner, side, key = await mesh.owner(), mesh.puller(channel, bytes_per_second=ALL_BYTES / 0.2), new_key()
    owner.compute_all(owner.publish(key))
    result = await side.pull(owner, key)
    assert side.has(owner)
    assert result.total_seconds >= 0.2  # a floor, not a speed: the link cannot be faster


async def test_without_overlap_nothing_is_read_before_the_end(mesh: Mesh) -> None:
    """The serial baseline of the overlap bench; waiting for prefill is no stall."""
    owner, side, key = await mesh.owner(), mesh.puller(), new_key()
    owner.table.overlap = False
    publication = owner.publish(key)
    pulling = side.pull(owner, key)
    await owner.table.until(lambda: owner.table.state(key).streaming)
    owner.engine.fill(BLOCKS)
    owner.start_computing(publication)
    publication.chunk(1, 0, 70, last=True)
    await owner.engine.reach(1)
    assert owner.table.state(key).ready == Watermark()
    publication.finished(first_token(), len(TOKENS), token_hash(TOKENS))
    assert (await pulling).bytes_read == ALL_BYTES
    assert side.has(owner)


async def test_prompt_shorter_than_a_block(mesh: Mesh, channel: str) -> None:
    """Case A9: one block, partly filled, computed in one chunk and read layer by layer."""
    owner, side, key = await mesh.owner(), mesh.puller(channel), new_key()
    tokens = TOKENS[:5]
    publication = owner.publish(key)
    pulling = side.pull(owner, key, token_ids=tokens)
    owner.engine.fill(BLOCKS[:1])
    publication.started(BLOCKS[:1], [int(owner.engine.pool.generations[BLOCKS[0]])], len(tokens))
    publication.chunk(1, 0, len(tokens), last=True)
    await owner.engine.reach(1, 1)
    await owner.table.until(lambda: owner.table.state(key).taken.layers == 1)
    await owner.engine.reach(1)
    publication.finished(first_token(), len(tokens), token_hash(tokens))
    result = await pulling
    assert (result.moved, result.bytes_read) == (True, LAYOUT.block_bytes)
    assert side.has(owner, slice(0, 1))
