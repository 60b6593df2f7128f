"""Sizes, limits and block pools of the simulated mesh."""

from typing import Any

from common.policies.handoff.terms import HandoffLimits

LAYERS, BLOCKS, TOKENS = 2, 3, 40  # of one transfer: three blocks of 16, the last one partial
POOL_BLOCKS = 2 * BLOCKS
LIMITS = HandoffLimits(max_waiters=2, max_tombstones=4)
REQUEST_SECONDS = 20.0
END = object()  # a stream's end, seen from the other side


class InvariantBroken(AssertionError):
    pass


def require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantBroken(what)


class Pool:
    """Blocks with generations and contents; contents survive a block's owner, as in memory."""

    def __init__(self) -> None:
        self.free = list(range(POOL_BLOCKS))
        self.generations = [0] * POOL_BLOCKS
        self.data: list[list[Any]] = [[None] * LAYERS for _ in range(POOL_BLOCKS)]
        self.users: dict[int, int] = {}  # block -> copies under way that read or write it

    def take(self) -> tuple[int, ...]:
        blocks, self.free = tuple(self.free[:BLOCKS]), self.free[BLOCKS:]
        for block in blocks:
            self.generations[block] += 1
        return blocks

    def give(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            require(block not in self.free, "a block was freed twice")
            require(not self.users.get(block), "a block was freed under a reader or writer")
            self.free.insert(0, block)  # reused first: the worst case for a late reader
            self.generations[block] += 1

    def use(self, blocks: tuple[int, ...], change: int) -> None:
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + change
