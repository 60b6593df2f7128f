"""Embeddings on their way into a prompt worker's room: side by side, checked, and never left there."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.encoder.timed_executor import expected_rows
from common.errors import InvalidArgument, LayoutMismatch, NeverFits, NotReady, Overloaded, TransferFailed
from common.policies.handoff.terms import HandoffLimits
from common.transfer.embedding_room import EmbeddingRoom
from common.transfer.embeddings import media_from_proto, sources_from_proto
from epd.v1 import types_pb2
from tests.unit.encoder.harness import (
    PATIENCE_SECONDS,
    Call,
    EncodeWorker,
    PromptWorker,
    Shown,
    encode_worker,
    new_key,
    timed,
)

LIMITS = HandoffLimits(create_wait_seconds=0.2)


@contextlib.asynccontextmanager
async def two_encoders(run_dir: Path, **options: Any) -> AsyncIterator[list[EncodeWorker]]:
    async with encode_worker(run_dir, **options) as one, encode_worker(run_dir, name="encode-1", **options) as two:
        yield [one, two]


def shown(name: str, rows: int = 20) -> Shown:
    return Shown(name.encode(), rows)


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def test_parts_of_two_encoders_in_prompt_order(run_dir: Path, channel: str) -> None:
    """Images a and c of one, b of the other; each lands in blocks of its own."""
    async with two_encoders(run_dir) as workers:
        first, second = new_key(1), new_key(2)
        second = msgspec.structs.replace(first, part=2)
        a, b, c = shown("a"), shown("b", 16), shown("c", 33)
        calls = [workers[0].call([a, c], first), workers[1].call([b], second)]
        await asyncio.gather(*(call.finished() for call in calls))
        sources = [workers[0].source(a, 3), workers[1].source(b, 30, 2), workers[0].source(c, 50)]
        async with PromptWorker(workers[0].encoder.layout, run_dir, channel) as prompt:
            pull = prompt.open(msgspec.structs.replace(first, part=0), sources)
            media = await pull.pull()
            assert [(each.key, each.start, each.rows) for each in media] == [
                (a.key, 3, 20),
                (b.key, 30, 16),
                (c.key, 50, 33),
            ]
            for image, each in zip((a, b, c), media, strict=True):
                assert (prompt.rows(each) == expected_rows(image.data, image.rows, prompt.layout)).all()
            assert prompt.room.free == prompt.room.num_blocks - 6
            pull.hand_over("s")
            pull.close()
            await until(lambda: "s" in prompt.engine.reading)
            assert prompt.room.free == prompt.room.num_blocks - 6  # the engine reads them
            prompt.engine.reading["s"].set()
            await until(lambda: prompt.room.free == prompt.room.num_blocks)
        for call in calls:
            await call.ended()
        for worker in workers:
            await worker.idle()


async def test_case_d13_asked_for_before_it_is_ready(run_dir: Path) -> None:
    """Not published at all: retryable, after a bounded wait, and nobody else waits. Being encoded: waited for."""
    async with encode_worker(run_dir, limits=LIMITS, timed=timed(base_seconds=0.5)) as worker:
        image, slow = shown("a"), shown("slow")
        async with PromptWorker(worker.encoder.layout, run_dir) as prompt:
            unknown = prompt.open(new_key(0), [worker.source(image, 0)])
            waiting = asyncio.create_task(unknown.pull())
            key = new_key()
            call = worker.call([slow], key)
            other = prompt.open(key, [worker.source(slow, 0)])
            pulling = asyncio.create_task(other.pull())  # its wait for the encoder is longer than for what is unknown
            with pytest.raises(NotReady) as refused:
                await waiting
            assert refused.value.retryable
            unknown.close()
            (media,) = await pulling
            assert (prompt.rows(media) == expected_rows(b"slow", 20, prompt.layout)).all()
            other.close()
            await call.finished()
            assert prompt.room.free == prompt.room.num_blocks
        await worker.idle()


async def test_a_failed_part_takes_the_others_with_it(run_dir: Path) -> None:
    async with two_encoders(run_dir, limits=LIMITS) as workers:
        key = new_key()
        call = workers[0].call([shown("a")], key)
        await call.finished()
        async with PromptWorker(workers[0].encoder.layout, run_dir) as prompt:
            pull = prompt.open(key, [workers[0].source(shown("a"), 0), workers[1].source(shown("b"), 50, 2)])
            with pytest.raises(NotReady):
                await pull.pull()
            pull.close()
            pull.close()
            assert prompt.room.free == prompt.room.num_blocks
            assert prompt.embeddings.puller.open_pulls == 0
        await workers[0].idle()


async def test_other_content_is_refused(run_dir: Path) -> None:
    """Another image, another order, another count: what was published must be what the prompt names."""
    async with encode_worker(run_dir) as worker:
        a, b = shown("a"), shown("b")
        for images in ([a], [b, a], [a, shown("c")]):
            key = new_key()
            call = worker.call([a, b], key)
            await call.finished()
            async with PromptWorker(worker.encoder.layout, run_dir) as prompt:
                pull = prompt.open(key, [worker.source(image, 50 * n) for n, image in enumerate(images)])
                with pytest.raises(TransferFailed):
                    await pull.pull()
                pull.close()
                assert prompt.room.free == prompt.room.num_blocks
            await worker.idle()


async def test_other_layouts_are_named(run_dir: Path) -> None:
    async with encode_worker(run_dir) as worker:
        key = new_key()
        call = worker.call([shown("a")], key)
        await call.finished()
        other = msgspec.structs.replace(worker.encoder.layout, hidden_size=16)
        async with PromptWorker(other, run_dir) as prompt:
            with pytest.raises(LayoutMismatch) as refused:
                await prompt.open(key, [worker.source(shown("a"), 0)]).pull()
        assert str(other) in refused.value.message
        assert str(worker.encoder.layout) in refused.value.message
        call.close()
        await worker.idle()


async def test_room_is_taken_only_when_a_part_is_ready(run_dir: Path) -> None:
    async with encode_worker(run_dir, timed=timed(base_seconds=0.3)) as worker:
        key = new_key()
        call = worker.call([shown("a")], key)
        await call.accepted()
        async with PromptWorker(worker.encoder.layout, run_dir) as prompt:
            pull = prompt.open(key, [worker.source(shown("a"), 0)])
            pulling = asyncio.create_task(pull.pull())
            await until(lambda: worker.transfers.tables.embeddings.open_pulls == 1)
            assert prompt.room.free == prompt.room.num_blocks
            await pulling
            assert prompt.room.free == prompt.room.num_blocks - 2
            pull.close()


async def test_without_room_the_rows_stay_where_they_are(run_dir: Path) -> None:
    """The encoder holds them while the prompt worker waits; given up, everything is free again."""
    async with encode_worker(run_dir) as worker, PromptWorker(worker.encoder.layout, run_dir, rows=32) as prompt:
        taken = await prompt.room.take(1)
        calls: list[Call] = []  # one that nobody holds any more would end
        for end in ("room", "cancel"):
            key = new_key()
            call = worker.call([shown("a")], key)
            await call.finished()
            pull = prompt.open(key, [worker.source(shown("a"), 0)])
            pulling = asyncio.create_task(pull.pull())
            await until(lambda: prompt.room.waiting == 1)
            assert worker.encoder.load.held_rows == 32
            if end == "room":
                prompt.room.give(taken)
                await pulling
                pull.close()
                taken = await prompt.room.take(1)
            else:
                pulling.cancel()
                await asyncio.wait([pulling])
                pull.close()
            calls.append(call)
            await until(lambda: (prompt.room.waiting, prompt.room.free) == (0, 1))
        await worker.idle()


async def test_more_than_the_room_is_refused_at_once(run_dir: Path) -> None:
    async with encode_worker(run_dir) as worker, PromptWorker(worker.encoder.layout, run_dir, rows=32) as prompt:
        with pytest.raises(NeverFits, match="3 blocks"):
            prompt.open(new_key(), [worker.source(shown("a", 33), 0)])


async def test_two_tickets_for_one_part_are_refused(run_dir: Path) -> None:
    async with encode_worker(run_dir) as worker, PromptWorker(worker.encoder.layout, run_dir) as prompt:
        other = msgspec.structs.replace(worker.source(shown("b"), 50), ticket=b"x" * 16)
        with pytest.raises(InvalidArgument, match="one ticket"):
            prompt.open(new_key(), [worker.source(shown("a"), 0), other])


# --- the room -------------------------------------------------------------------------------------------------------


async def test_room_goes_to_who_asked_first() -> None:
    room = EmbeddingRoom(4)
    held = await room.take(3)
    large = asyncio.create_task(room.take(4))
    small = asyncio.create_task(room.take(1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert room.waiting == 2  # the small one would fit, and waits its turn
    room.give(held)
    blocks = await large
    assert not small.done()
    room.give(blocks)
    assert len(await small) == 1
    assert sorted(blocks) == [0, 1, 2, 3]


async def test_whoever_gives_up_lets_the_next_one_in() -> None:
    room = EmbeddingRoom(4)
    await room.take(3)
    large, small = asyncio.create_task(room.take(4)), asyncio.create_task(room.take(1))
    await asyncio.sleep(0)
    large.cancel()
    assert len(await small) == 1
    assert (room.free, room.waiting) == (0, 0)


async def test_waiting_for_room_ends() -> None:
    room = EmbeddingRoom(1, wait_seconds=0.01)
    await room.take(1)
    with pytest.raises(Overloaded) as refused:
        await room.take(1)
    assert refused.value.retry_after_seconds
    assert (room.free, room.waiting) == (0, 0)
    with pytest.raises(NeverFits):
        await room.take(2)


@pytest.mark.parametrize("steps", range(6))
async def test_cancelled_at_any_step_no_block_is_lost(steps: int) -> None:
    room = EmbeddingRoom(2)
    held = await room.take(2)
    task = asyncio.create_task(room.take(2))
    await asyncio.sleep(0)
    room.give(held)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        room.give(task.result())
    assert (room.free, room.waiting) == (2, 0)


# --- what the gateway says ------------------------------------------------------------------------------------------


def reference(**changes: Any) -> types_pb2.EmbeddingRef:
    fields = {
        "media_key": b"k" * 32,
        "position": 2,
        "length": 5,
        "rows": 4,
        "part": 1,
        "ticket": b"t" * 16,
        "grid": [1, 2, 2],
    }
    return types_pb2.EmbeddingRef(**{**fields, **changes})


def test_references_are_read() -> None:
    (source,) = sources_from_proto([reference()], 7)
    media = source.media
    assert (media.start, media.length, media.rows, media.grid, source.part) == (2, 5, 4, (1, 2, 2), 1)
    assert media_from_proto([reference(part=0, ticket=b"")], 7) == [media]  # for who pulls nothing


@pytest.mark.parametrize(
    "changes", [{"media_key": b"k"}, {"rows": 0}, {"rows": 6}, {"position": 3}, {"part": 0}, {"ticket": b"t"}]
)
def test_bad_references_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        sources_from_proto([reference(**changes)], 7)


def test_overlapping_images_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="apart"):
        media_from_proto([reference(), reference(position=6)], 100)
