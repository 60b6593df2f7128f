"""BlockPool against a model that knows only who owns what, over random histories."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.engine.block_pool import BlockPool, OutOfBlocks, Owner

BLOCKS = 12
OWNERS = st.sampled_from(list(Owner))


def key(number: int) -> bytes:
    return number.to_bytes(2, "little") * 16


class PoolMachine(RuleBasedStateMachine):
    """held: (owner, blocks) pairs nobody has released. content: what was indexed under which key, by generation."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.generations = np.zeros(BLOCKS, np.uint64)
        self.pool = BlockPool(BLOCKS, self.generations)
        self.owned: list[tuple[Owner, list[int]]] = []
        self.seen: set[bytes] = set()  # what a listener to the events believes to be indexed
        self.content: dict[bytes, tuple[int, int]] = {}

    @rule(target=held, count=st.integers(0, 6), owner=OWNERS)
    def allocate(self, count, owner):
        before = self.generations.copy()
        available = self.pool.available
        try:
            blocks = self.pool.allocate(count, owner)
        except OutOfBlocks:
            assert count > available
            assert (before == self.generations).all()
            return owner, []
        assert len(set(blocks)) == count <= available
        assert not set(blocks) & {block for _, mine in self.owned for block in mine}
        changed = set(np.flatnonzero(before != self.generations).tolist())
        assert changed == set(blocks)
        return self._own(owner, blocks)

    @rule(target=held, which=held, owner=OWNERS)
    def share(self, which, owner):
        if which not in self.owned:
            return owner, []
        self.pool.acquire(which[1], owner)
        return self._own(owner, list(which[1]))

    @rule(target=held, numbers=st.lists(st.integers(0, 15), max_size=4, unique=True), owner=OWNERS)
    def hit(self, numbers, owner):
        keys = [key(number) for number in numbers]
        blocks = self.pool.lookup(keys)
        assert len(set(blocks)) == len(blocks)
        for found, block in zip(keys, blocks, strict=False):
            # What a key finds is what was indexed under it: the block had no other owner since.
            assert self.content[found] == (block, int(self.generations[block]))
        unused, available = self.pool.unused(blocks), self.pool.available
        self.pool.acquire(blocks, owner)
        assert self.pool.available == available - unused
        return self._own(owner, blocks)

    @rule(which=held, number=st.integers(0, 15))
    def index(self, which, number):
        if which not in self.owned or not which[1]:
            return
        block = which[1][0]
        known = key(number) in self.pool.indexed_keys()
        already = block in [where for where, _ in self.content.values()] and block in self.pool._keys
        self.pool.index(key(number), block)
        if not known and not already:
            self.content[key(number)] = block, int(self.generations[block])

    @rule(which=held, new=OWNERS)
    def transfer(self, which, new):
        if which not in self.owned:
            return
        before = self.generations.copy()
        self.pool.transfer(which[1], which[0], new)
        assert (before == self.generations).all()
        self.owned.remove(which)
        self.owned.append((new, which[1]))

    @rule(which=held)
    def unindex(self, which):
        if which in self.owned:
            self.pool.unindex(which[1])

    @rule(which=consumes(held))
    def release(self, which):
        if which in self.owned:
            self.owned.remove(which)
            self.pool.release(which[1], which[0])

    @rule()
    def listen(self):
        stored, removed = map(set, self.pool.events())
        assert not stored & removed
        assert not stored & self.seen
        assert removed <= self.seen
        self.seen = (self.seen | stored) - removed
        assert self.seen == {each[:16] for each in self.pool.indexed_keys()}

    @invariant()
    def whole(self):
        by_owner = {owner: [blocks for mine, blocks in self.owned if mine is owner] for owner in Owner}
        assert self.pool.check_integrity(by_owner) == []
        active = {block for blocks in by_owner[Owner.SEQUENCE] for block in blocks}
        others = {block for _, blocks in self.owned for block in blocks} - active
        assert (self.pool.active, self.pool.held) == (len(active), len(others))
        assert self.pool.published == len({block for blocks in by_owner[Owner.PUBLICATION] for block in blocks})

    def _own(self, owner, blocks):
        self.owned.append((owner, blocks))
        return owner, blocks


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.fixture
def pool():
    return BlockPool(4, np.zeros(4, np.uint64))


def test_least_recently_used_goes_first(pool):
    blocks = [pool.allocate(1, Owner.SEQUENCE)[0] for _ in range(4)]
    for number, block in enumerate(blocks):
        pool.index(key(number), block)
    for block in blocks:
        pool.release([block], Owner.SEQUENCE)
    pool.acquire(pool.lookup([key(0)]), Owner.SEQUENCE)  # used again: now the youngest
    pool.release([blocks[0]], Owner.SEQUENCE)
    assert pool.allocate(3, Owner.SEQUENCE) == blocks[1:]
    assert pool.lookup([key(0)]) == [blocks[0]]


def test_a_prefix_outlives_what_builds_on_it(pool):
    blocks = pool.allocate(4, Owner.SEQUENCE)
    for number, block in enumerate(blocks):
        pool.index(key(number), block)
    pool.release(blocks, Owner.SEQUENCE)
    pool.allocate(2, Owner.SEQUENCE)
    assert pool.lookup([key(0), key(1), key(2)]) == blocks[:2]


def test_a_second_copy_stays_private(pool):
    first, second = pool.allocate(2, Owner.SEQUENCE)
    pool.index(key(1), first)
    pool.index(key(1), second)
    assert pool.lookup([key(1)]) == [first]
    pool.release([first, second], Owner.SEQUENCE)
    assert (pool.cached, pool.free) == (1, 3)


def test_releasing_twice_is_refused(pool):
    blocks = pool.allocate(1, Owner.SEQUENCE)
    pool.release(blocks, Owner.SEQUENCE)
    with pytest.raises(ValueError, match="no SEQUENCE to release"):
        pool.release(blocks, Owner.SEQUENCE)
    with pytest.raises(KeyError):
        pool.acquire(blocks, Owner.SEQUENCE)


def test_integrity_tells_what_is_wrong(pool):
    blocks = pool.allocate(2, Owner.SEQUENCE)
    assert pool.check_integrity({Owner.SEQUENCE: [blocks]}) == []
    assert "SEQUENCE counts of 1 blocks" in pool.check_integrity({Owner.SEQUENCE: [blocks[:1]]})[0]
    pool.active -= 1
    errors = pool.check_integrity({Owner.SEQUENCE: [blocks]})
    assert errors[0] == "free 2 + cached 0 + active 1 + held 0 = 3, not 4"
    assert Counter(errors)["active 1, published 0; counted 2, 0"] == 1
