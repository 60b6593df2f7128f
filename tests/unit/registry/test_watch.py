"""What a gateway sees of the registry, against a real etcd."""

import asyncio

import msgspec
import pytest

from common.metrics import Metrics
from common.registry.adapter import EtcdConnection, WatchBroken
from common.registry.record import encode
from tests.etcd import EtcdForTests, eventually
from tests.unit.registry.helpers import TTL, record, registry

PREFIX = "/epd/workers/"


async def put(etcd: EtcdForTests, worker_id: str, value: bytes) -> None:
    await etcd.ctl("put", PREFIX + worker_id, stdin=value)


async def test_snapshot_first_then_changes_for_two_watchers(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened, registry(etcd.settings()) as other:
        first = await opened.register(record("worker-1"), TTL)
        early: list[set[str]] = []
        late: list[set[str]] = []
        await opened.watch(lambda workers: early.append(set(workers)))
        assert early == [{"worker-1"}]
        await opened.register(record("worker-2"), TTL)
        await eventually(lambda: early[-1] == {"worker-1", "worker-2"})
        await other.watch(lambda workers: late.append(set(workers)))
        assert late == [{"worker-1", "worker-2"}]
        await first.revoke()
        await eventually(lambda: early[-1] == {"worker-2"} and late[-1] == {"worker-2"})


async def test_prefixes_keep_meshes_apart(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings(prefix="/a")) as first, registry(etcd.settings(prefix="/a2")) as second:
        await first.register(record("worker-1"), TTL)
        await second.register(record("worker-2"), TTL)
        assert set((await first.watch(lambda workers: None)).workers) == {"worker-1"}
        assert set((await second.watch(lambda workers: None)).workers) == {"worker-2"}


GOOD = encode(record("worker-1"))
FIELDS = msgspec.json.decode(GOOD)
BAD = {
    "size": msgspec.json.encode({**FIELDS, "model": "m" * 70_000}),
    "version": msgspec.json.encode({**FIELDS, "protocol_version": 2, "new_field": 1}),
    "schema": msgspec.json.encode({**FIELDS, "unknown": 1}),
    "key": encode(record("worker-2")),
}


@pytest.mark.parametrize("cause", BAD)
async def test_bad_values_are_skipped_and_counted(etcd: EtcdForTests, cause: str) -> None:
    metrics = Metrics()
    async with registry(etcd.settings(), metrics) as opened:
        await opened.register(record("good"), TTL)
        await put(etcd, "worker-1", BAD[cause])
        listed = await opened.watch(lambda workers: None)
        assert set(listed.workers) == {"good"}
        assert listed.bad_values == 1
        # And in the stream: from good to bad and back.
        await put(etcd, "worker-1", GOOD)
        await eventually(lambda: set(listed.workers) == {"good", "worker-1"})
        await put(etcd, "worker-1", BAD[cause])
        await eventually(lambda: set(listed.workers) == {"good"})
        assert listed.bad_values == 2
        assert f'epd_registry_bad_values_total{{cause="{cause}"}} 2.0' in metrics.exposition().decode()


@pytest.mark.parametrize("value", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"protocol_version": "1"}'])
async def test_rubbish_is_skipped(etcd: EtcdForTests, value: bytes) -> None:
    async with registry(etcd.settings()) as opened:
        watch = await opened.watch(lambda workers: None)
        await put(etcd, "worker-1", value or b"\n")
        await eventually(lambda: watch.bad_values == 1)
        assert watch.workers == {}


async def test_many_large_bad_values_do_not_break_the_listing(etcd: EtcdForTests) -> None:
    for number in range(6):
        await put(etcd, f"big-{number}", b"x" * 1_000_000)
    async with registry(etcd.settings()) as opened:
        await opened.register(record("good"), TTL)
        watch = await opened.watch(lambda workers: None)
        assert set(watch.workers) == {"good"}
        assert watch.bad_values == 6


async def test_changes_and_compaction_while_the_watch_is_broken(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        watch = await opened.watch(lambda workers: None, grace_seconds=0.2)
        await put(etcd, "worker-1", GOOD)
        await eventually(lambda: set(watch.workers) == {"worker-1"})
        await etcd.restart(wipe=False)
        # Before the watch is back: a change, and everything before it forgotten.
        await etcd.ctl("del", PREFIX + "worker-1")
        await put(etcd, "worker-2", encode(record("worker-2")))
        status = msgspec.json.decode(await etcd.ctl("get", "none", "--write-out", "json"))
        await etcd.ctl("compaction", str(status["header"]["revision"]))
        await eventually(lambda: set(watch.workers) == {"worker-2"})
        await put(etcd, "worker-1", GOOD)
        await eventually(lambda: set(watch.workers) == {"worker-1", "worker-2"})


async def test_watch_of_a_compacted_revision_ends(etcd: EtcdForTests) -> None:
    for _ in range(3):
        await put(etcd, "worker-1", GOOD)
    await etcd.ctl("compaction", "3")
    connection = EtcdConnection(etcd.settings())
    async with asyncio.timeout(10):
        with pytest.raises(WatchBroken):
            async for _ in connection.watch(PREFIX, 1):
                pass
    await connection.close()


async def test_graceful_restart(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        watch = await opened.watch(lambda workers: None)
        await etcd.stop()
        await etcd.start(wipe=False)
        await opened.register(record(), TTL)
        await eventually(lambda: set(watch.workers) == {"worker-1"})


async def test_workers_gone_from_an_empty_etcd_leave_after_the_grace_time(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        snapshots: list[set[str]] = []
        watch = await opened.watch(lambda workers: snapshots.append(set(workers)), grace_seconds=0.5)
        await put(etcd, "worker-1", GOOD)  # by nobody who would register again
        await eventually(lambda: snapshots == [set(), {"worker-1"}] and watch.following)
        await etcd.restart(wipe=True)
        await eventually(lambda: snapshots == [set(), {"worker-1"}, set()])
