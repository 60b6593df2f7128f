"""Which blocks a sequence holds: hits, allocation, growth, fork, publication, hand-over of a reservation."""

from common.cache.keys import hit_limit
from common.engine.block_pool import BlockPool, OutOfBlocks, Owner
from common.engine.executor import Executor
from common.engine.sequence import Choice, Limits, Sequence, State


class KvManager:
    """Keeps the block lists of sequences, the pool's counts and the content of the blocks in step."""

    def __init__(self, limits: Limits, pool: BlockPool, executor: Executor, *, prefix_cache: bool) -> None:
        self._limits = limits
        self._size = limits.block_size
        self._pool = pool
        self._executor = executor
        self._prefix_cache = prefix_cache

    # --- what a choice needs ----------------------------------------------------------------------------------------

    def hits(self, choice: Choice) -> list[int]:
        """Cached blocks that the choice's tokens may start from."""
        if not self._prefix_cache or choice.sequence.scores_prompt:
            return []
        keys = choice.extend_keys(self._size, choice.length)
        return self._pool.lookup(keys[: hit_limit(choice.length, self._size)])

    def uncached_tokens(self, choice: Choice) -> int:
        return choice.length - len(self.hits(choice)) * self._size

    def spares(self, choice: Choice) -> int:
        """Blocks kept for the fork: one a choice, so that it never fails."""
        sequence = choice.sequence
        return sequence.rows if sequence.decode and not sequence.forked else 0

    def cost(self, choice: Choice) -> int:
        """Blocks that its admission takes from what the pool has available."""
        hits = self.hits(choice)
        return self._limits.blocks(choice.length) - len(hits) + self.spares(choice) + self._pool.unused(hits)

    # --- blocks to compute in or to pull into -----------------------------------------------------------------------

    def admit(self, choice: Choice) -> bool:
        """Gives a choice the blocks of all its tokens; False, and nothing changed, when they are not there."""
        taken = self._take(choice, Owner.SEQUENCE)
        if taken is None:
            return False
        hits, fresh, spare = taken
        choice.blocks = hits + fresh
        choice.sequence.spare += spare
        choice.computed = len(hits) * self._size
        choice.indexed = len(hits)
        choice.prefilling = True
        # A block that is read before it is full must hold finite numbers: the last one, if partial, and the spares.
        self._executor.zero([*(fresh[-1:] if choice.length % self._size else []), *spare])
        return True

    def reserve(self, sequence: Sequence) -> bool:
        """Gives a sequence blocks to pull its prompt into; False, and nothing changed, when they are not there."""
        taken = self._take(sequence.leader, Owner.RESERVATION)
        if taken is None:
            return False
        hits, fresh, sequence.spare = taken
        sequence.reserved = hits + fresh
        sequence.hit_blocks, sequence.cached_tokens = len(hits), len(hits) * self._size
        return True

    def _take(self, choice: Choice, owner: Owner) -> tuple[list[int], list[int], list[int]] | None:
        """(hit, fresh, spare) blocks for all of a choice's tokens, or None."""
        hits, spares = self.hits(choice), self.spares(choice)
        fresh = self._limits.blocks(choice.length) - len(hits)
        self._pool.acquire(hits, owner)
        try:
            blocks = self._allocate(choice.sequence, fresh + spares, owner)
        except OutOfBlocks:
            self._pool.release(hits, owner)
            return None
        return hits, blocks[:fresh], blocks[fresh:]

    def _allocate(self, sequence: Sequence, count: int, owner: Owner) -> list[int]:
        return self._pool.allocate(count, owner, sequence.salt, sequence.cache_blocks)

    def full(self, choice: Choice) -> bool:
        """The next token's KV needs one more block."""
        return len(choice.blocks) * self._size < choice.length

    def grow(self, choice: Choice) -> None:
        """One more block. Raises OutOfBlocks."""
        blocks = self._allocate(choice.sequence, 1, Owner.SEQUENCE)
        self._executor.zero(blocks)
        choice.blocks += blocks

    # --- blocks with content ----------------------------------------------------------------------------------------

    def index(self, choice: Choice) -> None:
        """Offers the blocks completed so far to the prefix index."""
        complete = choice.computed // self._size
        if not self._prefix_cache or complete <= choice.indexed:
            return
        keys = choice.extend_keys(self._size, choice.computed)
        for position in range(choice.indexed, complete):
            self._pool.index(keys[position], choice.blocks[position])
        choice.indexed = complete

    def commit(self, sequence: Sequence) -> None:
        """A reservation was filled: its blocks become the leader's, complete ones are shared from now on."""
        leader, partial = sequence.leader, sequence.total % self._size
        self._pool.transfer(sequence.reserved + sequence.spare, Owner.RESERVATION, Owner.SEQUENCE)
        leader.blocks, sequence.reserved = sequence.reserved, []
        self._executor.import_blocks(leader.blocks[sequence.hit_blocks :])
        if partial:
            self._executor.zero(leader.blocks[-1:], partial)
        self._executor.zero(sequence.spare)
        leader.computed, leader.indexed, leader.prefilling = sequence.total, sequence.hit_blocks, False
        self.index(leader)

    def fork(self, sequence: Sequence) -> None:
        """Blocks for every open choice: complete ones are shared, the partial last one is copied."""
        leader, complete = sequence.leader, sequence.total // self._size
        shared, partial = leader.blocks[:complete], leader.blocks[complete:]
        for choice in sequence.open_choices():
            mine = sequence.spare.pop()
            if choice is leader:
                leader.blocks.append(mine)
                continue
            if partial:
                self._executor.copy(partial[0], mine)
            self._pool.acquire(shared, Owner.SEQUENCE)
            choice.blocks = [*shared, mine]
            choice.keys = leader.keys[:complete]
            choice.computed, choice.indexed, choice.prefilling = sequence.total, complete, False
        self._free_spare(sequence)
        sequence.forked = True

    def publish(self, sequence: Sequence) -> None:
        """Keeps the prompt's blocks for a puller until the release."""
        sequence.published = sequence.leader.blocks[: self._limits.blocks(sequence.total)]
        self._pool.acquire(sequence.published, Owner.PUBLICATION)

    def export_hits(self, sequence: Sequence) -> None:
        """Blocks that this sequence did not compute are about to be pulled."""
        self._executor.export_blocks(sequence.leader.blocks[: sequence.hit_blocks])

    # --- ends -------------------------------------------------------------------------------------------------------

    def free(self, choice: Choice) -> None:
        """Indexed blocks stay cached, the others are free at once."""
        self._pool.release(choice.blocks, Owner.SEQUENCE)
        choice.blocks = []
        if not choice.sequence.forked and choice is choice.sequence.leader:
            self._free_spare(choice.sequence)

    def unpublish(self, sequence: Sequence) -> None:
        self._pool.release(sequence.published, Owner.PUBLICATION)
        sequence.published = []

    def drop(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Frees everything a sequence holds, in any state. poisoned: what it computed must never be shared."""
        if poisoned:
            for choice in sequence.choices:
                self._pool.unindex(choice.blocks[sequence.hit_blocks :])
        if sequence.state is State.RESERVED:
            self._pool.release(sequence.reserved + sequence.spare, Owner.RESERVATION)
            sequence.reserved, sequence.spare = [], []
        for choice in sequence.choices:
            self.free(choice)
        self.unpublish(sequence)

    def _free_spare(self, sequence: Sequence) -> None:
        self._pool.release(sequence.spare, Owner.SEQUENCE)
        sequence.spare = []
