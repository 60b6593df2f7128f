"""The encode service over its encoder: what is made, shared, refused, given up, and never left behind."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from common import telemetry
from common.encoder.timed_executor import expected_rows
from common.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EmbeddingMissing,
    EngineFailed,
    InvalidArgument,
    ModelNotFound,
    NeverFits,
    Overloaded,
    TransferFailed,
    WrongIncarnation,
)
from common.media.limits import MediaLimits
from common.transfer.key import TransferKey
from tests.unit.encoder.harness import (
    PATIENCE_SECONDS,
    EncodeWorker,
    PromptWorker,
    Shown,
    encode_worker,
    new_key,
    timed,
)

SLOW = timed(base_seconds=0.2)


def shown(name: str, rows: int = 20, index: int = 0) -> Shown:
    return Shown(name.encode(), rows, index)


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def pulled(worker: EncodeWorker, run_dir: Path, key: TransferKey, images: list[Shown], channel: str = "shm"):
    async with PromptWorker(worker.encoder.layout, run_dir, channel) as prompt:
        sources = [worker.source(image, 100 * number, key.part) for number, image in enumerate(images)]
        pull = prompt.open(key, sources)
        media = await pull.pull()
        found = [prompt.rows(each).copy() for each in media]
        pull.close()
        assert prompt.room.free == prompt.room.num_blocks
        return found


async def test_rows_arrive_in_order(run_dir: Path, channel: str) -> None:
    async with encode_worker(run_dir) as worker:
        images, key = [shown("a", 20, 0), shown("b", 16, 1), shown("a", 20, 2)], new_key()
        call = worker.call(images, key)
        finished = await call.finished()
        assert finished.cached_images == 0
        assert [hop.name for hop in finished.hops] == [
            telemetry.ENCODE_QUEUE,
            telemetry.ENCODE_PREPROCESS,
            telemetry.ENCODE_FORWARD,
        ]
        for image, rows in zip(images, await pulled(worker, run_dir, key, images, channel), strict=True):
            assert (rows == expected_rows(image.data, image.rows, worker.encoder.layout)).all()
        await call.ended()  # the puller has them
        await worker.idle()
        assert (worker.encoder.images, worker.encoder.load.cached_rows) == (2, 48)


async def test_what_is_cached_needs_no_file(run_dir: Path) -> None:
    async with encode_worker(run_dir) as worker:
        first = worker.call([shown("a")])
        await first.finished()
        first.close()
        key = new_key()
        again = worker.call([shown("a")], key, send=False)
        assert (await again.finished()).cached_images == 1
        (rows,) = await pulled(worker, run_dir, key, [shown("a")])
        assert (rows == expected_rows(b"a", 20, worker.encoder.layout)).all()
        assert worker.encoder.images == 1
        with pytest.raises(EmbeddingMissing):
            await worker.call([shown("b")], send=False).finished()
        await worker.idle()


async def test_one_image_is_encoded_once_for_all_who_wait(run_dir: Path) -> None:
    async with encode_worker(run_dir, timed=SLOW) as worker:
        calls = [worker.call([shown("a")]) for _ in range(3)]
        await asyncio.gather(*(call.accepted() for call in calls))
        await asyncio.gather(*(call.outcome() for call in calls))
        assert worker.encoder.images == 1
        for call in calls:
            call.close()
        await worker.idle()


async def test_the_second_gets_it_when_the_first_gives_up(run_dir: Path) -> None:
    """Whether its drop reaches the encoder in time or not."""
    async with encode_worker(run_dir, timed=SLOW, batch_images=1) as worker:
        ahead = worker.call([shown("ahead")])  # so that the next one is still queued when it is dropped
        await ahead.accepted()
        for name in ("queued", "under way"):
            first = worker.call([shown(name)])
            await first.accepted()
            if name == "under way":
                await ahead.outcome()
            first.close()
            second = worker.call([shown(name)])
            await second.finished()
            second.close()
        ahead.close()
        await worker.idle()
        assert worker.encoder.load.cached_rows == 3 * 32


@pytest.mark.parametrize("stage", ["accepted", "under way", "finished"])
async def test_cancelled_at_any_time_nothing_stays_pinned(run_dir: Path, stage: str) -> None:
    async with encode_worker(run_dir, timed=SLOW) as worker:
        call = worker.call([shown("a"), shown("b")])
        await call.accepted()
        if stage == "under way":
            await until(lambda: worker.encoder.load.pending_images)
        if stage == "finished":
            await call.outcome()
            assert worker.encoder.load.held_rows == 64
        call.close()
        await worker.idle()
        if stage == "finished":
            assert worker.encoder.load.cached_rows == 64


async def test_dropped_work_is_not_done(run_dir: Path) -> None:
    async with encode_worker(run_dir, timed=SLOW, batch_images=1, preprocess_threads=1) as worker:
        ahead = worker.call([shown("ahead")])
        await ahead.accepted()
        many = worker.call([shown(f"{number}") for number in range(6)])
        await many.accepted()
        many.close()
        await ahead.outcome()
        ahead.close()
        await worker.idle()
        assert worker.encoder.images <= 2  # one may have been next
        assert worker.encoder.load.cached_rows == 32 * worker.encoder.images


async def test_higher_priority_goes_first(run_dir: Path) -> None:
    async with encode_worker(run_dir, timed=SLOW, batch_images=1, preprocess_threads=1) as worker:
        ahead = worker.call([shown("ahead")])
        await ahead.accepted()
        order: list[str] = []

        async def run(name: str, priority: int) -> None:
            call = worker.call([shown(name)], priority=priority)
            await call.accepted()
            if name == "last low":
                queued.set()
            await call.outcome()
            order.append(name)
            call.close()

        queued = asyncio.Event()
        names = [f"low {number}" for number in range(3)] + ["last low"]
        low = [asyncio.create_task(run(name, 0)) for name in names]
        await queued.wait()
        await asyncio.gather(run("high", 1), *low)
        assert order.index("high") < order.index("last low")
        ahead.close()


async def test_case_d9_images_larger_than_the_pool(run_dir: Path) -> None:
    async with encode_worker(run_dir, rows=64) as worker:
        with pytest.raises(NeverFits, match="80 rows"):
            await worker.call([shown("a", 40), shown("b", 40)]).finished()
        for name in "ab":  # one after the other
            call = worker.call([shown(name, 64)])
            await call.finished()
            call.close()
            await worker.idle()


async def test_no_room_is_refused_with_a_hint(run_dir: Path) -> None:
    async with encode_worker(run_dir, rows=64) as worker:
        held = worker.call([shown("a", 40)])
        await held.finished()
        with pytest.raises(Overloaded) as refused:
            await worker.call([shown("b", 40)]).finished()
        assert refused.value.retry_after_seconds
        held.close()
        await worker.idle()
        await worker.call([shown("b", 40)]).finished()


async def test_bounds_of_waiting_files(run_dir: Path) -> None:
    async with encode_worker(run_dir, timed=SLOW, max_pending_bytes=10) as worker:
        held = worker.call([shown("0123456789ab")])  # alone it may be larger
        await held.accepted()
        with pytest.raises(Overloaded):
            await worker.call([shown("c")]).finished()
        await held.outcome()
        await worker.call([shown("c")]).finished()


@pytest.mark.parametrize(
    ("images", "changes", "kind"),
    [
        ([], {}, InvalidArgument),
        ([shown("a", 0)], {}, InvalidArgument),
        ([shown("a")] * 4, {}, InvalidArgument),
        ([shown("x" * 101)], {}, InvalidArgument),
        ([shown("x" * 80), shown("y" * 80)], {}, InvalidArgument),
        ([shown("a")], {"model": "another"}, ModelNotFound),
        ([shown("a")], {"ticket": b"short"}, InvalidArgument),
        ([shown("a")], {"target": None}, WrongIncarnation),
    ],
)
async def test_bad_calls_are_refused(run_dir: Path, images: list[Shown], changes: dict, kind: type) -> None:
    media = MediaLimits(max_images=3, max_file_bytes=100, max_request_bytes=150)
    async with encode_worker(run_dir, media=media) as worker:
        with pytest.raises(kind):
            await worker.call(images, **changes).finished()
        with pytest.raises(InvalidArgument, match="part"):
            await worker.call([shown("a")], new_key(part=0)).finished()
        await worker.idle()
        assert worker.encoder.images == 0


async def test_a_drained_worker_takes_nothing(run_dir: Path) -> None:
    async with encode_worker(run_dir) as worker:
        worker.context.draining = True
        with pytest.raises(Exception, match="draining"):
            await worker.call([shown("a")]).finished()


async def test_attempts(run_dir: Path) -> None:
    """A repeated call is refused and hurts nobody; a newer attempt ends the older one."""
    async with encode_worker(run_dir, timed=SLOW) as worker:
        key = new_key()
        first = worker.call([shown("a")], key)
        await first.accepted()
        with pytest.raises(DuplicateRequest):
            await worker.call([shown("b")], key).finished()
        newer = worker.call([shown("a")], key.of_attempt(2))
        await newer.accepted()
        with pytest.raises(TransferFailed):
            await first.outcome()
        await newer.outcome()
        newer.close()
        await worker.idle()
        assert worker.encoder.images == 1


async def test_the_deadline_frees_the_rows(run_dir: Path) -> None:
    async with encode_worker(run_dir) as worker:
        call = worker.call([shown("a")], timeout=3.0)
        await call.finished()
        with contextlib.suppress(DeadlineExceeded):  # whoever notices first
            await call.ended()
        await worker.idle()


async def test_a_killed_encoder_fails_its_calls(run_dir: Path) -> None:
    async with encode_worker(run_dir, in_thread=False, timed=timed(base_seconds=30.0)) as worker:
        call = worker.call([shown("a")])
        await call.accepted()
        assert worker.encoder.pid is not None
        os.kill(worker.encoder.pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="code -9"):
            await call.outcome()
        assert "code -9" in await worker.encoder.closed()
        await worker.idle()
        with pytest.raises(EngineFailed):
            await worker.call([shown("b")]).finished()


async def test_block_events_and_load(run_dir: Path) -> None:
    async with encode_worker(run_dir, rows=64) as worker:
        stored: list[bytes] = []
        removed: list[bytes] = []

        def seen(event) -> None:
            stored.extend(event.stored)
            removed.extend(event.removed)

        loads = []
        worker.encoder.on_blocks(seen)
        worker.encoder.on_load(loads.append)
        for name in "abc":
            call = worker.call([shown(name)])
            await call.finished()
            call.close()
            await worker.idle()
        assert stored == [shown(name).key[:16] for name in "abc"]
        assert removed == [shown("a").key[:16]]
        assert loads[-1] == worker.encoder.load
        assert (loads[-1].cached_rows, loads[-1].total_rows) == (64, 64)
