"""How many KV blocks a tenant keeps: its own go first, nobody else's do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.block_pool import BlockPool, OutOfBlocks, Owner
from tests.unit.engine.harness import Harness

A, B = b"a" * 32, b"b" * 32


def pool(blocks: int) -> BlockPool:
    return BlockPool(blocks, np.zeros(blocks, np.uint64))


def run(pool: BlockPool, tenant: bytes, number: int, count: int, most: int | None = None) -> list[bytes]:
    """A sequence of `count` blocks that are all indexed, from its beginning to its end. Returns their keys."""
    blocks = pool.allocate(count, Owner.SEQUENCE, tenant, most)
    keys = [tenant + number.to_bytes(4) + i.to_bytes(4) for i in range(count)]
    for key, block in zip(keys, blocks, strict=True):
        pool.index(key, block)
    assert pool.check_integrity({Owner.SEQUENCE: [blocks]}) == []
    pool.release(blocks, Owner.SEQUENCE)
    assert pool.check_integrity({}) == []
    return keys


def test_a_flood_pushes_out_its_own_blocks_alone() -> None:
    blocks = pool(20)
    others = run(blocks, B, 0, 10)
    flood = [run(blocks, A, number, 4, most=8) for number in range(50)]
    assert len(blocks.lookup(others)) == 10
    assert [len(blocks.lookup(keys)) for keys in flood[-3:]] == [0, 4, 4]  # the least recent went first
    assert blocks.cached == 18


def test_without_a_limit_the_least_recent_go_whoever_has_them() -> None:
    blocks = pool(20)
    others = run(blocks, B, 0, 10)
    for number in range(5):
        run(blocks, A, number, 4)
    assert blocks.lookup(others) == []


def test_a_prefix_goes_after_what_builds_on_it() -> None:
    blocks = pool(20)
    keys = run(blocks, A, 0, 6, most=4)
    assert len(blocks.lookup(keys)) == 4


def test_what_runs_is_never_refused_for_its_tenants_limit() -> None:
    blocks = pool(10)
    held = blocks.allocate(9, Owner.SEQUENCE, A, 2)
    assert blocks.active == 9
    with pytest.raises(OutOfBlocks):
        blocks.allocate(2, Owner.SEQUENCE, A, 2)
    blocks.release(held, Owner.SEQUENCE)
    assert blocks.free == 10
    assert run(blocks, A, 1, 3, most=0)
    assert blocks.cached == 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), st.integers(0, 30), st.integers(1, 6), st.sampled_from([None, 0, 3, 9])),
        max_size=60,
    )
)
def test_no_tenant_keeps_more_than_its_last_limit(steps: list[tuple[bytes, int, int, int | None]]) -> None:
    blocks = pool(16)
    kept: dict[bytes, int] = {}
    for number, (tenant, _, count, most) in enumerate(steps):
        run(blocks, tenant, number, count, most)
        for each in (A, B):
            now = sum(key.startswith(each) for key in blocks.indexed_keys())
            if each == tenant and most is not None:
                assert now <= most
            elif each != tenant and most is not None:
                # Only what the pool had no room for otherwise: never more than this sequence needs.
                assert now >= kept.get(each, 0) - count
            kept[each] = now


def prompt(length: int, number: int) -> list[int]:
    return [3 + (number * 7919 + i) % 500 for i in range(length)]


@pytest.mark.parametrize(("cache_blocks", "others"), [(5, 12), (None, 0)])
def test_the_engine_keeps_a_tenants_limit(cache_blocks: int | None, others: int) -> None:
    engine = Harness(num_blocks=32, block_size=16)
    for number in range(6):
        engine.submit(f"b{number}", prompt(33, number), salt=B, max_tokens=1)
        engine.run()
    keys = set(engine.core.pool.indexed_keys())
    assert len(keys) == 12
    for number in range(20):
        engine.submit(f"a{number}", prompt(65, 100 + number), salt=A, cache_blocks=cache_blocks, max_tokens=1)
        engine.run()
    left = set(engine.core.pool.indexed_keys())
    assert len(left & keys) == others
    if cache_blocks is not None:
        assert len(left - keys) == 4  # of five blocks: the last is partial, and never kept
    engine.clean()


def test_case_e1_tenants_with_limits_share_no_block_and_find_their_own() -> None:
    engine = Harness(num_blocks=32, block_size=16)
    for seq, salt in (("a1", A), ("b1", B), ("a2", A), ("b2", B)):
        engine.submit(seq, prompt(40, 1), salt=salt, cache_blocks=8, max_tokens=1)
        engine.run()
    assert {seq: done.cached_tokens for seq, done in engine.done.items()} == {"a1": 0, "b1": 0, "a2": 32, "b2": 32}
    engine.clean()
