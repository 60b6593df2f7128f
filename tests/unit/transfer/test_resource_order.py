"""The order encoder room < embedding room < prefill blocks (design §2): tiny rooms, many requests, no lock-up.

The real embedding cache and the real embedding room, two of each, with requests that take every step in a random order.
Nothing sleeps: a request that cannot go on gives way, so a lock-up shows as rounds in which nobody gets any further.
"""

import asyncio
import random
from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.keys import EmbeddingLayout
from common.encoder.cache import EmbeddingCache, Image, Reservation
from common.errors import Overloaded
from common.policies.encoding import EncoderView, assign
from common.policies.encoding import Image as Wanted
from common.transfer.embedding_room import EmbeddingRoom

BLOCK_ROWS = 4
ENCODER_BLOCKS = 6
ROOM_BLOCKS = 5
KV_BLOCKS = 4
STUCK = 400  # rounds without progress
LAYOUT = EmbeddingLayout(model="m", revision="r", dtype="float32", levels=1, hidden_size=4, block_rows=BLOCK_ROWS)


class KvBlocks:
    """A prefill pool, as far as the order is concerned: first come, first served."""

    def __init__(self) -> None:
        self.free = KV_BLOCKS
        self.line: deque[object] = deque()


def give_up(cache: EmbeddingCache, reservation: Reservation) -> None:
    """As the encoder does: what nobody wants any more is dropped."""
    for entry in cache.release(reservation):
        cache.fail(entry)


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.encoders = [
            EmbeddingCache(ENCODER_BLOCKS, BLOCK_ROWS, np.zeros(ENCODER_BLOCKS, np.uint64)) for _ in range(2)
        ]
        self.rooms = [EmbeddingRoom(ROOM_BLOCKS, wait_seconds=3600.0) for _ in range(2)]
        self.kv = [KvBlocks() for _ in range(2)]
        self.progress = 0
        self.cancelled = 0

    async def some_rounds(self) -> None:
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    def reserve(self, images: list[Image]) -> list[tuple[EmbeddingCache, Reservation]] | None:
        """Room on all encoders at once, or none of it: what the gateway does with refused calls."""
        views = [EncoderView(worker_id=str(i), total_rows=ENCODER_BLOCKS * BLOCK_ROWS) for i in range(2)]
        parts = assign([Wanted(i, key, rows) for i, (key, rows) in enumerate(images)], views)
        assert parts is not None
        taken: list[tuple[EmbeddingCache, Reservation]] = []
        for part in parts:
            cache = self.encoders[int(part.worker_id)]
            try:
                taken.append((cache, cache.reserve([(image.key, image.rows) for image in part.images])))
            except Overloaded:
                for other, reservation in taken:
                    give_up(other, reservation)
                return None
        return taken

    async def request(self, images: list[Image], prefill: int, leaves: bool) -> None:
        while (taken := self.reserve(images)) is None:
            await asyncio.sleep(0)
        self.progress += 1
        room, kv = self.rooms[prefill], self.kv[prefill]
        blocks: list[int] = []
        try:
            await self.some_rounds()
            for cache, reservation in taken:
                for entry in reservation.new:
                    cache.finish(entry)
            if leaves:
                self.cancelled += 1
                return
            blocks = await room.take(sum(LAYOUT.blocks(rows) for _, rows in images))
            self.progress += 1
            await self.some_rounds()
        finally:
            for cache, reservation in taken:
                give_up(cache, reservation)
        me = object()
        kv.line.append(me)
        while kv.line[0] is not me or kv.free < 2:
            await asyncio.sleep(0)
        kv.line.popleft()
        kv.free -= 2
        await self.some_rounds()
        room.give(blocks)
        await self.some_rounds()
        kv.free += 2
        self.progress += 1


@st.composite
def images(draw: st.DrawFn) -> list[Image]:
    """Of a request that fits every pool alone: at most 4 blocks, some images known to other requests."""
    found: list[Image] = []
    while sum(LAYOUT.blocks(rows) for _, rows in found) < 4 and len(found) < draw(st.integers(1, 4)):
        number = draw(st.integers(0, 7))
        rows = 1 + number % (2 * BLOCK_ROWS)
        if sum(LAYOUT.blocks(each) for _, each in found) + LAYOUT.blocks(rows) <= 4:
            found.append((bytes([number]) * 32, rows))
    return found or [(bytes(32), 1)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(images(), st.integers(0, 1), st.booleans()), min_size=1, max_size=24), st.integers(0, 2**32))
def test_two_encoders_two_prefills_tiny_rooms(asked: list[tuple[list[Image], int, bool]], seed: int) -> None:
    async def run() -> None:
        world = World(random.Random(seed))
        tasks = [asyncio.create_task(world.request(each, prefill, leaves)) for each, prefill, leaves in asked]
        seen, rounds = world.progress, 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            rounds = 0 if world.progress != seen else rounds + 1
            seen = world.progress
            assert rounds < STUCK, "nobody gets any further"
        for task in tasks:
            task.result()
        assert world.cancelled == sum(leaves for _, _, leaves in asked)
        for cache in world.encoders:
            assert cache.held == 0
            assert cache.check_integrity() == []
        assert all(room.free == ROOM_BLOCKS and not room.waiting for room in world.rooms)
        assert all(kv.free == KV_BLOCKS for kv in world.kv)

    asyncio.run(run())


def test_a_lock_up_would_be_seen() -> None:
    """The same with the order turned round for half of them: embedding room first, then encoder room."""

    class Wrong(World):
        async def request(self, images: list[Image], prefill: int, leaves: bool) -> None:
            blocks = await self.rooms[prefill].take(ROOM_BLOCKS)
            await asyncio.sleep(0)
            while (taken := self.reserve(images)) is None:
                await asyncio.sleep(0)
            for cache, reservation in taken:
                give_up(cache, reservation)
            self.rooms[prefill].give(blocks)
            self.progress += 1

    async def run() -> bool:
        world = Wrong(random.Random(1))
        full = [(bytes([number]) * 32, ENCODER_BLOCKS * BLOCK_ROWS) for number in (1, 2)]
        held = [cache.reserve([image]) for cache, image in zip(world.encoders, full, strict=True)]
        holder = asyncio.create_task(world.rooms[0].take(ROOM_BLOCKS))  # holds encoder room, waits for embedding room
        await asyncio.sleep(0)
        mine = await holder
        world.rooms[0].give(mine)
        wrong = asyncio.create_task(world.request([(bytes(32), 1)], 0, False))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(world.rooms[0].take(ROOM_BLOCKS))
        for _ in range(STUCK):
            await asyncio.sleep(0)
        stuck = not wrong.done() and not waiting.done() and len(held) == 2
        for task in (wrong, waiting):
            task.cancel()
        await asyncio.gather(wrong, waiting, return_exceptions=True)
        return stuck

    assert asyncio.run(run())
