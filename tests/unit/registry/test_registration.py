"""A worker's entry against a real etcd that fails in every way it can (cases B1, B2)."""

import asyncio
import os
import sys
import time

import msgspec
import pytest

from common import errors
from common.registry import adapter
from common.registry.etcd import EtcdRegistry
from common.registry.record import decode
from tests.etcd import EtcdForTests, etcd_server, eventually
from tests.unit.registry.helpers import TTL, record, registry

KEY = "/epd/workers/worker-1"


async def stored(etcd: EtcdForTests) -> str:
    return await etcd.ctl("get", "--print-value-only", KEY)


async def test_registers_updates_and_revokes(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        watch = await opened.watch(lambda workers: None)
        registration = await opened.register(record(), TTL)
        assert registration.alive
        assert decode((await stored(etcd)).strip().encode()) == record()
        draining = msgspec.structs.replace(record(), draining=True)
        await registration.update(draining)
        await eventually(lambda: watch.workers == {"worker-1": draining})
        await registration.revoke()
        assert not registration.alive
        await eventually(lambda: watch.workers == {})
        with pytest.raises(errors.InvalidArgument):
            await registration.update(record(incarnation="second"))


async def test_stays_beyond_the_ttl(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        told: list[bool] = []
        registration = await opened.register(record(), TTL, on_alive=told.append)
        lease = registration._lease_id
        renewed_to = registration._alive_until + 2 * TTL
        await eventually(lambda: registration._alive_until > renewed_to)
        assert registration.alive
        assert registration._lease_id == lease
        assert told == [True]


_OWNER = """
import asyncio, sys
from common.registry.etcd import EtcdRegistry
from common.registry.settings import EtcdSettings
from tests.unit.registry.helpers import TTL, record

async def main():
    registry = EtcdRegistry(EtcdSettings(endpoints=(sys.argv[1],)))
    await registry.start()
    await registry.register(record(), TTL)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_lease_of_a_killed_owner_expires(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        watch = await opened.watch(lambda workers: None)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", _OWNER, etcd.endpoint, env=environment)
        try:
            await eventually(lambda: "worker-1" in watch.workers)
        finally:
            owner.kill()
            await owner.wait()
        await eventually(lambda: watch.workers == {})


async def test_b2_revoked_lease_is_told_and_registered_again(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        told: list[bool] = []
        registration = await opened.register(record(), TTL, on_alive=told.append)
        lost = registration._lease_id
        await eventually(lambda: told == [True])
        await etcd.ctl("lease", "revoke", f"{lost:x}")
        await eventually(lambda: told == [True, False, True])
        assert registration._lease_id != lost
        assert decode((await stored(etcd)).strip().encode()) == record()


async def test_deleted_or_overwritten_entry_comes_back(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        watch = await opened.watch(lambda workers: None)
        await opened.register(record(), TTL)
        for spoil in (("del", KEY), ("put", KEY, "rubbish")):
            await eventually(lambda: "worker-1" in watch.workers)
            await etcd.ctl(*spoil)
            await eventually(lambda: watch.workers == {})
        await eventually(lambda: "worker-1" in watch.workers)


async def test_b1_etcd_paused_beyond_the_ttl(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        told: list[bool] = []
        snapshots: list[set[str]] = []
        watch = await opened.watch(lambda workers: snapshots.append(set(workers)))
        registration = await opened.register(record(), TTL, on_alive=told.append)
        await eventually(lambda: snapshots == [set(), {"worker-1"}] and told == [True])
        etcd.pause()
        try:
            await eventually(lambda: told == [True, False])  # readiness tells it
            paused_until = time.monotonic() + TTL
            await eventually(lambda: time.monotonic() > paused_until)
            assert set(watch.workers) == {"worker-1"}  # requests go on
        finally:
            etcd.resume()
        await eventually(lambda: told == [True, False, True])
        await eventually(lambda: set(watch.workers) == {"worker-1"})
        assert registration.alive
        # The watch goes on: a second worker is seen.
        await opened.register(record("worker-2"), TTL)
        await eventually(lambda: set(watch.workers) == {"worker-1", "worker-2"})


@pytest.mark.parametrize("wipe", [False, True], ids=["same data", "empty"])
async def test_etcd_killed_and_restarted(etcd: EtcdForTests, wipe: bool) -> None:
    async with registry(etcd.settings()) as opened:
        snapshots: list[set[str]] = []
        await opened.watch(lambda workers: snapshots.append(set(workers)))
        registration = await opened.register(record(), TTL)
        await eventually(lambda: snapshots == [set(), {"worker-1"}])
        await etcd.kill()
        await eventually(lambda: not registration.alive)
        with pytest.raises(errors.Unavailable, match="not taken"):
            await registration.update(msgspec.structs.replace(record(), draining=True), timeout_seconds=0.05)
        await etcd.start(wipe=wipe)
        await eventually(lambda: registration.alive)
        assert '"draining":true' in await stored(etcd)
        await opened.register(record("worker-2"), TTL)
        await eventually(lambda: snapshots[-1] == {"worker-1", "worker-2"})
        assert set() not in snapshots[1:]  # never empty in between


async def test_successor_is_not_overwritten(etcd: EtcdForTests) -> None:
    """A worker that hung, lost its lease and was restarted under its id must not push the new one out."""
    async with registry(etcd.settings()) as old, registry(etcd.settings()) as new:
        told: list[bool] = []
        first = await old.register(record(incarnation="first"), TTL, on_alive=told.append)
        second = await new.register(record(incarnation="second"), TTL)
        await eventually(lambda: told[-1:] == [False])
        assert not first.alive
        assert second.alive
        await second.revoke()
        await eventually(lambda: first.alive)  # the id is free again


async def test_registers_at_the_new_address_of_a_moved_etcd(
    etcd: EtcdForTests, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = [etcd.endpoint]

    async def resolve(endpoint: str) -> list[str]:
        return list(where) if endpoint == "etcd.test:2379" else [endpoint]

    monkeypatch.setattr(adapter, "_resolve", resolve)
    async with registry(etcd.settings(endpoints=("etcd.test:2379",))) as opened:
        watch = await opened.watch(lambda workers: None)
        await opened.register(record(), TTL)
        await etcd.kill()
        async with etcd_server(tmp_path_factory.mktemp("moved")) as moved:
            where[:] = [moved.endpoint]
            async with registry(moved.settings()) as other:
                elsewhere = await other.watch(lambda workers: None)
                await eventually(lambda: "worker-1" in elsewhere.workers)
                await other.register(record("worker-2"), TTL)
                await eventually(lambda: set(watch.workers) == {"worker-1", "worker-2"})


async def test_host_names_are_resolved(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings(endpoints=(f"localhost:{etcd.client_port}",))) as opened:
        assert (await opened.register(record(), TTL)).alive


async def test_unreachable_etcd_is_named(etcd: EtcdForTests) -> None:
    await etcd.kill()
    for endpoint in (etcd.endpoint, "no-such-host.invalid:2379"):
        with pytest.raises(errors.Unavailable, match=endpoint):
            await EtcdRegistry(etcd.settings(endpoints=(endpoint,), connect_timeout_seconds=0.5)).start()


async def test_a_start_waits_for_an_etcd_that_is_away(etcd: EtcdForTests) -> None:
    """A worker has its model loaded by then: it tells that it is not ready, and registers when etcd is back."""
    told: list[bool] = []
    async with registry(etcd.settings(call_timeout_seconds=0.3)) as opened:
        await etcd.kill()
        starting = asyncio.create_task(opened.register(record(), TTL, on_alive=told.append))
        await eventually(lambda: told == [False])
        await etcd.start()
        assert (await starting).alive
        await eventually(lambda: told == [False, True])


async def test_a_start_does_not_wait_for_ever(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings(call_timeout_seconds=0.2, connect_timeout_seconds=0.4)) as opened:
        await etcd.kill()
        with pytest.raises(errors.Unavailable, match=etcd.endpoint):
            await opened.register(record(), TTL)


@pytest.mark.parametrize("worker_id", ["", "a/b"])
async def test_worker_ids_that_are_no_keys_are_refused(etcd: EtcdForTests, worker_id: str) -> None:
    async with registry(etcd.settings()) as opened:
        with pytest.raises(errors.InvalidArgument):
            await opened.register(record(worker_id), TTL)


async def test_too_large_a_record_is_refused(etcd: EtcdForTests) -> None:
    async with registry(etcd.settings()) as opened:
        with pytest.raises(errors.InvalidArgument, match="65536"):
            await opened.register(record(model="m" * 70_000), TTL)


async def test_a_lease_that_ran_out_before_the_entry_was_written(etcd: EtcdForTests) -> None:
    """Found by chaos: told as what it is, so that the next round registers anew."""
    connection = adapter.EtcdConnection(etcd.settings())
    try:
        lease = await connection.grant(TTL)
        await connection.revoke(lease)
        with pytest.raises(errors.UnknownId):
            await connection.put_if_version(adapter.Entry("/epd/workers/gone", b"x", 0, lease))
    finally:
        await connection.close()
