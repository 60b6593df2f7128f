"""Who owns which block of the KV pool, and which blocks hold what prefix."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import numpy as np

from common.cache.keys import INDEX_KEY_BYTES
from common.cache.shares import Shares


class Owner(IntEnum):
    """Why a block is kept. A block with any SEQUENCE is active; with only others it is held."""

    SEQUENCE = 0
    PUBLICATION = 1
    RESERVATION = 2


class OutOfBlocks(Exception):
    """Neither free nor evictable blocks are left for an allocation."""


class BlockPool:
    """Reference-counted blocks [0, num_blocks), an index from prefix key to block, and an LRU of unused indexed blocks.

    Every block is in exactly one state: free (nobody's, unindexed), cached (nobody's, indexed), active, or held.
    generations: uint64 [num_blocks], shared with readers; changes whenever a block gets a new owner, before it is
    written. A block that is not free belongs to the tenant it was allocated for, who may be bounded: see `allocate`.
    """

    def __init__(self, num_blocks: int, generations: np.ndarray) -> None:
        self.num_blocks = num_blocks
        self._generations = generations
        self._free = list(range(num_blocks - 1, -1, -1))
        self._counts = [[0] * num_blocks for _ in Owner]
        self._index: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}  # block → its key, the index turned round
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._shares: Shares[int] = Shares()
        self.active = 0
        self.held = 0
        self.published = 0  # blocks with a PUBLICATION, active ones too
        self._changes: dict[bytes, bool] = {}  # key → stored or removed since the last events()

    # --- sizes ------------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._lru)

    @property
    def available(self) -> int:
        """Blocks an allocation can take: free and evictable ones."""
        return len(self._free) + len(self._lru)

    def generation(self, block: int) -> int:
        return int(self._generations[block])

    # --- owners -----------------------------------------------------------------------------------------------------

    def allocate(self, count: int, owner: Owner, tenant: bytes = b"", most: int | None = None) -> list[int]:
        """`count` blocks of unknown content, evicting the least recently used cached ones. All or OutOfBlocks.

        most: blocks that the tenant may keep from now on, those in use included; to stay within them its own cached
        blocks go first, so that it does not push out others'. None: no bound.
        """
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks wanted, {self.available} available")
        if most is not None:
            self._trim(tenant, most - count)
        blocks = []
        for _ in range(count):
            if not self._free:
                self._evict(next(iter(self._lru)))
            block = self._free.pop()
            self._generations[block] += 1
            self._shares.add(block, tenant, most=most)
            self._add(block, owner)
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int], owner: Owner) -> None:
        """One more owner for blocks that are cached or owned already."""
        for block in blocks:
            if not self._owners(block):
                del self._lru[block]  # KeyError: a free block has no content to share
                self._shares.unpark(block)
            self._add(block, owner)

    def release(self, blocks: Sequence[int], owner: Owner) -> None:
        """One owner less; blocks without any become cached when indexed, else free.

        The tail goes first, so that a prefix is evicted after what builds on it.
        """
        for block in reversed(blocks):
            self._remove(block, owner)
            if not self._owners(block):
                if block in self._keys:
                    self._lru[block] = None
                    self._shares.park(block)
                    tenant = self._shares.tenant(block)
                    self._trim(tenant, self._shares.limits.get(tenant))
                else:
                    self._give(block)

    def transfer(self, blocks: Sequence[int], old: Owner, new: Owner) -> None:
        """Another reason to keep the same blocks: the owner is no new one, generations stay."""
        self.acquire(blocks, new)
        self.release(blocks, old)

    def unused(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody owns, so that acquiring them takes from `available`."""
        return sum(not self._owners(block) for block in blocks)

    # --- prefix index -----------------------------------------------------------------------------------------------

    def lookup(self, keys: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of indexed keys from the first on."""
        blocks: list[int] = []
        for key in keys:
            block = self._index.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def index(self, key: bytes, block: int) -> None:
        """Offer an owned, completely computed block for sharing. The first with a key wins; a copy stays private."""
        if key in self._index or block in self._keys:
            return
        self._index[key] = block
        self._keys[block] = key
        self._change(key, stored=True)

    def unindex(self, blocks: Iterable[int]) -> None:
        """Never share these owned blocks again: their content proved bad."""
        for block in blocks:
            if block in self._keys:
                self._forget(block)

    def indexed_keys(self) -> list[bytes]:
        return list(self._index)

    def events(self) -> tuple[list[bytes], list[bytes]]:
        """(stored, removed) keys since the last call, cut to 16 bytes; a key is in at most one of them."""
        stored = [key[:INDEX_KEY_BYTES] for key, present in self._changes.items() if present]
        removed = [key[:INDEX_KEY_BYTES] for key, present in self._changes.items() if not present]
        self._changes.clear()
        return stored, removed

    # --- integrity --------------------------------------------------------------------------------------------------

    def check_integrity(self, owned: Mapping[Owner, Iterable[Sequence[int]]]) -> list[str]:
        """What is wrong, against the block lists that sequences, publications and reservations say they own."""
        errors: list[str] = []
        total = self.free + self.cached + self.active + self.held
        if total != self.num_blocks:
            errors.append(
                f"free {self.free} + cached {self.cached} + active {self.active} + held {self.held} = {total}, "
                f"not {self.num_blocks}"
            )
        for owner in Owner:
            expected = Counter(block for blocks in owned.get(owner, ()) for block in blocks)
            wrong = [block for block, count in enumerate(self._counts[owner]) if count != expected.get(block, 0)]
            if wrong:
                errors.append(
                    f"{owner.name} counts of {len(wrong)} blocks disagree with their owners, first {wrong[0]}"
                )
        free = set(self._free)
        if len(free) != len(self._free):
            errors.append("a block is free twice")
        for block in range(self.num_blocks):
            states = (block in free) + (block in self._lru) + (self._owners(block) > 0)
            if states != 1:
                errors.append(f"block {block} is in {states} states")
                break
        if free & self._keys.keys():
            errors.append("a free block is indexed")
        if not self._lru.keys() <= self._keys.keys():
            errors.append("a cached block is not indexed")
        if {block: key for key, block in self._index.items()} != self._keys:
            errors.append("the index and its reverse disagree")
        errors += self._shares.check_integrity(set(self._lru))
        if set(range(self.num_blocks)) - free != self._shares.entries:
            errors.append("a block that is not free has no tenant, or a free one has")
        active = sum(count > 0 for count in self._counts[Owner.SEQUENCE])
        published = sum(count > 0 for count in self._counts[Owner.PUBLICATION])
        if (active, published) != (self.active, self.published):
            errors.append(f"active {self.active}, published {self.published}; counted {active}, {published}")
        return errors

    # --- inside -----------------------------------------------------------------------------------------------------

    def _owners(self, block: int) -> int:
        return sum(counts[block] for counts in self._counts)

    def _add(self, block: int, owner: Owner) -> None:
        before = self._state(block)
        self._counts[owner][block] += 1
        if owner is Owner.PUBLICATION and self._counts[owner][block] == 1:
            self.published += 1
        self._account(before, self._state(block))

    def _remove(self, block: int, owner: Owner) -> None:
        if self._counts[owner][block] <= 0:
            raise ValueError(f"block {block} has no {owner.name} to release")
        before = self._state(block)
        self._counts[owner][block] -= 1
        if owner is Owner.PUBLICATION and not self._counts[owner][block]:
            self.published -= 1
        self._account(before, self._state(block))

    def _state(self, block: int) -> str:
        if self._counts[Owner.SEQUENCE][block]:
            return "active"
        return "held" if self._owners(block) else ""

    def _account(self, before: str, after: str) -> None:
        if before != after:
            self.active += (after == "active") - (before == "active")
            self.held += (after == "held") - (before == "held")

    def _trim(self, tenant: bytes, most: int | None) -> None:
        while (block := self._shares.excess(tenant, most)) is not None:
            self._evict(block)

    def _evict(self, block: int) -> None:
        del self._lru[block]
        self._forget(block)
        self._give(block)

    def _give(self, block: int) -> None:
        self._shares.remove(block)
        self._free.append(block)

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        del self._index[key]
        self._change(key, stored=False)

    def _change(self, key: bytes, *, stored: bool) -> None:
        # Stored and removed between two events cancel out: the outside never saw the first of them.
        if self._changes.pop(key, stored) == stored:
            self._changes[key] = stored
