"""Two gateways in one process over the real QuotaService keep a tenant's limits together."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.policies.limits import Amounts, TenantLimits
from common.registry.record import GatewayRecord
from common.rpc.channel import connect
from epd.v1 import quota_pb2, quota_pb2_grpc
from services.gateway.quota.members import Members
from services.gateway.quota.quota import Quota
from tests.etcd import eventually
from tests.fakes import FakeWorker, Network
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal

IN_FLIGHT, REQUESTS = "requests_in_flight", "requests_per_minute"


class Gateways:
    """Several gateways before the same workers. They know of each other what `tell` says, as from the registry."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.network = Network()
        self.prefill = FakeWorker(self.network, "p0", ["prefill"])
        self.decode = FakeWorker(self.network, "d0", ["decode"])
        self.meshes: dict[str, Mesh] = {}

    async def start(self, *names: str, **limits: Any) -> None:
        await self.prefill.start()
        await self.decode.start()
        self.limits = TenantLimits(**limits)
        for name in names:
            await self.add(name)
        await self.tell()

    async def add(self, name: str) -> None:
        mesh = self.meshes[name] = Mesh(self.model_dir)
        mesh.workers = {"p0": self.prefill, "d0": self.decode}
        await mesh.start(gateway_id=name, other_limits=self.limits)
        await mesh.publish()

    def quota(self, name: str) -> Quota:
        return self.meshes[name].gateway.sharing.quota

    async def tell(self, *, settled: bool = True) -> None:
        """Every gateway that runs hears of all that run."""
        records = {name: self.quota(name).members.mine for name in self.meshes}
        for name in self.meshes:
            self.quota(name).members.update(records)
        if settled:
            await eventually(self.settled)

    def settled(self) -> bool:
        return all(
            self.quota(one).shares_with(other) and self.quota(other).ledger.settled(one)
            for one in self.meshes
            for other in self.meshes
            if one != other
        )

    async def kill(self, name: str) -> None:
        """Nobody is told: as with kill -9, its entry in the registry lives until the lease ends."""
        await self.meshes.pop(name).gateway.stop()

    def tenant_of(self, owner: str) -> str:
        """Some tenant that this gateway owns."""
        members = next(iter(self.meshes.values())).gateway.sharing.members
        return next(name for name in map(str, range(1000)) if members.owner(name) == owner)

    async def ask(self, name: str, tenant: str, text: str = "hi") -> str:
        """How it went: OK, or the reason and the field of the refusal."""
        mesh = self.meshes[name]
        try:
            await generate(mesh, ask(text, max_tokens=1), metadata=(("x-epd-tenant", tenant),))
        except grpc.aio.AioRpcError as error:
            metadata = dict(error.trailing_metadata() or ())
            return f"{metadata.get('epd-reason')} {metadata.get('epd-field')}"
        return "OK"

    async def stop(self) -> None:
        for name in list(self.meshes):
            mesh = self.meshes.pop(name)
            await mesh.channel.close()
            await mesh.gateway.stop()
        await self.prefill.kill()
        await self.decode.kill()


@pytest.fixture
async def gateways(model_dir: Path) -> AsyncIterator[Gateways]:
    found = Gateways(model_dir)
    yield found
    await found.stop()


async def test_a_minutes_requests_are_counted_together(gateways: Gateways) -> None:
    await gateways.start("g1", "g2", requests_per_minute=7, prompt_tokens_per_minute=100)
    for owner in ("g1", "g2"):
        tenant = gateways.tenant_of(owner)
        answers = [await gateways.ask(f"g{1 + i % 2}", tenant) for i in range(7)]
        assert answers == ["OK"] * 7
        for name in ("g1", "g2"):
            code, metadata, _ = await refusal(
                gateways.meshes[name], ask(max_tokens=1), metadata=(("x-epd-tenant", tenant),)
            )
            assert (code, metadata["epd-field"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, REQUESTS)
            assert 0 < int(metadata["retry-after-ms"]) <= 61_000
        # Prompt tokens too, and what was refused for them gives its request back; more than ever fits says so.
        other = gateways.tenant_of(owner) + "x" * 40
        other = next(t for t in (f"{other}{i}" for i in range(100)) if gateways.quota("g1").members.owner(t) == owner)
        assert [await gateways.ask(name, other, "y" * 45) for name in ("g1", "g2")] == ["OK", "OK"]
        for name in ("g1", "g2"):
            assert await gateways.ask(name, other, "y" * 45) == "RATE_LIMITED prompt_tokens_per_minute"
            assert await gateways.ask(name, other, "y" * 101) == "NEVER_FITS prompt_tokens_per_minute"
        assert [await gateways.ask(name, other, "y") for name in ("g1", "g2")] == ["OK", "OK"]


async def test_requests_in_flight_are_counted_together_whoever_comes_first(gateways: Gateways) -> None:
    await gateways.start("g1", "g2", requests_in_flight=5)
    for tenant in (gateways.tenant_of("g1"), gateways.tenant_of("g2")):
        before = len(gateways.prefill.calls)
        gateways.prefill.prefill_gate.clear()
        tasks = [asyncio.create_task(gateways.ask(f"g{1 + i % 2}", tenant)) for i in range(20)]
        await gateways.prefill.until(lambda before=before: len(gateways.prefill.calls) == before + 5)
        await eventually(lambda tasks=tasks: sum(task.done() for task in tasks) == 15)
        gateways.prefill.prefill_gate.set()
        answers = sorted(await asyncio.gather(*tasks))
        assert answers == ["OK"] * 5 + [f"RATE_LIMITED {IN_FLIGHT}"] * 15
        assert await gateways.ask("g1", tenant) == await gateways.ask("g2", tenant) == "OK"


async def test_the_owner_is_killed(gateways: Gateways) -> None:
    """Until its lease ends each counts its own part; then another owns the tenant, and knows of all that runs."""
    await gateways.start("g1", "g2", "g3", requests_in_flight=6)
    tenant = gateways.tenant_of("g1")
    ranking = gateways.quota("g2").members.ranking(tenant)
    heir, other = ranking[1:]
    gateways.prefill.prefill_gate.clear()
    running = [asyncio.create_task(gateways.ask(name, tenant)) for name in (other, other, heir)]
    await gateways.prefill.until(lambda: len(gateways.prefill.calls) == 3)
    await gateways.kill("g1")
    await eventually(lambda: not gateways.quota("g2").shares_with("g1") and not gateways.quota("g3").shares_with("g1"))
    # Six by three: two each, of which `other` uses both and `heir` one.
    assert await gateways.ask(other, tenant) == f"RATE_LIMITED {IN_FLIGHT}"
    running.append(asyncio.create_task(gateways.ask(heir, tenant)))
    await gateways.prefill.until(lambda: len(gateways.prefill.calls) == 4)
    assert await gateways.ask(heir, tenant) == f"RATE_LIMITED {IN_FLIGHT}"
    await gateways.tell()
    assert gateways.quota(other).members.owner(tenant) == heir
    # Four run, two are left, wherever they come.
    running += [asyncio.create_task(gateways.ask(other, tenant)) for _ in range(2)]
    await gateways.prefill.until(lambda: len(gateways.prefill.calls) == 6)
    assert {await gateways.ask(name, tenant) for name in (heir, other)} == {f"RATE_LIMITED {IN_FLIGHT}"}
    gateways.prefill.prefill_gate.set()
    assert await asyncio.gather(*running) == ["OK"] * 6
    ledger = gateways.quota(heir).ledger
    await eventually(lambda: not ledger.account(tenant).others[other].in_flight)
    assert await gateways.ask(other, tenant) == "OK"


async def test_charges_move_with_the_tenant(gateways: Gateways) -> None:
    """A gateway joins, and owns it: what was charged within the minute counts on there."""
    await gateways.start("g1", "g2", requests_per_minute=8)
    members = Members(GatewayRecord(gateway_id="g3", incarnation="x", address=""))
    members.update({name: gateways.quota(name).members.mine for name in gateways.meshes})
    tenant = next(name for name in map(str, range(1000)) if members.owner(name) == "g3")
    assert [await gateways.ask(f"g{1 + i % 2}", tenant) for i in range(5)] == ["OK"] * 5
    await gateways.add("g3")
    await gateways.tell()
    assert [await gateways.ask(name, tenant) for name in ("g1", "g2", "g3")] == ["OK"] * 3
    for name in gateways.meshes:
        assert await gateways.ask(name, tenant) == f"RATE_LIMITED {REQUESTS}"


async def test_a_gateway_that_ends_gives_its_holds_back_and_no_charges(gateways: Gateways) -> None:
    await gateways.start("g1", "g2", requests_in_flight=2, requests_per_minute=5)
    tenant = gateways.tenant_of("g1")
    gateways.prefill.prefill_gate.clear()
    lost = [asyncio.create_task(gateways.ask("g2", tenant)) for _ in range(2)]
    await gateways.prefill.until(lambda: len(gateways.prefill.calls) == 2)
    assert await gateways.ask("g1", tenant) == f"RATE_LIMITED {IN_FLIGHT}"
    await gateways.kill("g2")
    await asyncio.gather(*lost)
    await gateways.tell()
    gateways.prefill.prefill_gate.set()
    answers = [await gateways.ask("g1", tenant) for _ in range(6)]
    assert answers[:3] == ["OK"] * 3
    assert answers[-1] == f"RATE_LIMITED {REQUESTS}"


async def test_a_gateway_alone_with_others_in_the_registry_keeps_to_its_part(gateways: Gateways) -> None:
    """Nobody listens at the other's address: no request waits for it, and no more than the part is used."""
    await gateways.start("g1", requests_per_minute=6)
    gone = GatewayRecord(gateway_id="gone", incarnation="1", address="127.0.0.1:9")
    gateways.quota("g1").members.update({"gone": gone})
    for owner in ("g1", "gone"):
        answers = [await gateways.ask("g1", gateways.tenant_of(owner)) for _ in range(4)]
        assert answers == ["OK"] * 3 + [f"RATE_LIMITED {REQUESTS}"]


async def test_an_owner_that_hangs_holds_nobody_up(gateways: Gateways) -> None:
    await gateways.start("g1", "g2", requests_per_minute=6)
    tenant = gateways.tenant_of("g1")
    quota = gateways.quota("g2")
    quota._links["g1"]._answer_seconds = 0.05

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    stream = quota._links["g1"]._stream
    assert stream is not None
    stream.put = lambda **_: None  # type: ignore[method-assign]
    assert await gateways.ask("g2", tenant) == "OK"
    await eventually(gateways.settled)  # the stream was given up and opened again, with what was taken meanwhile
    assert quota._links["g1"]._stream is not stream
    assert [await gateways.ask("g1", tenant) for _ in range(6)] == ["OK"] * 5 + [f"RATE_LIMITED {REQUESTS}"]


@pytest.mark.parametrize("late", [False, True])
async def test_an_acquire_that_is_cancelled_leaves_nothing(gateways: Gateways, late: bool) -> None:
    await gateways.start("g1", "g2", requests_in_flight=1)
    tenant = gateways.tenant_of("g1")
    quota, ledger = gateways.quota("g2"), gateways.quota("g1").ledger
    asking = asyncio.create_task(quota.take(tenant, Amounts(in_flight=1)))
    await asyncio.sleep(0)
    if late:  # cancelled in the same step in which its answer comes
        stream = quota._links["g1"]._stream
        assert stream is not None
        answered = stream.answered

        def and_cancelled(answer: quota_pb2.QuotaAnswer) -> None:
            answered(answer)
            asking.cancel()

        stream.answered = and_cancelled  # type: ignore[method-assign]
    else:
        asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await quota.take(tenant, Amounts()) == Amounts()
    await eventually(lambda: tenant in ledger.accounts and not ledger.account(tenant).others["g2"].in_flight)
    assert await gateways.ask("g1", tenant) == "OK"


async def test_rubbish_from_a_gateway_is_refused(gateways: Gateways) -> None:
    await gateways.start("g1", requests_in_flight=1)
    mine = gateways.quota("g1").members.mine
    hello = quota_pb2.QuotaHello(gateway_id="eve", incarnation="1", target_id="g1", target_incarnation=mine.incarnation)
    wrong = quota_pb2.QuotaHello(gateway_id="eve", incarnation="1", target_id="g1", target_incarnation="old")
    same = quota_pb2.QuotaHello(gateway_id="g1", target_id="g1", target_incarnation=mine.incarnation)
    state = quota_pb2.QuotaState(tenant="t", charges=[quota_pb2.QuotaBin(age_seconds=1)] * 62)
    nan = quota_pb2.QuotaRelease(tenant="t", age_seconds=float("nan"))
    async with connect(mine.address) as channel:
        for sent, status in (
            ([{"settled": quota_pb2.QuotaSettled()}], grpc.StatusCode.INVALID_ARGUMENT),
            ([{"hello": wrong}], grpc.StatusCode.UNAVAILABLE),
            ([{"hello": same}], grpc.StatusCode.INVALID_ARGUMENT),
            ([{"hello": hello}, {"hello": hello}], grpc.StatusCode.INVALID_ARGUMENT),
            ([{"hello": hello}, {"state": state}], grpc.StatusCode.INVALID_ARGUMENT),
            ([{"hello": hello}, {"release": nan}], grpc.StatusCode.INVALID_ARGUMENT),
        ):
            requests = iter([quota_pb2.ShareQuotaRequest(**kind) for kind in sent])
            call = quota_pb2_grpc.QuotaServiceStub(channel).ShareQuota(requests)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await until_its_end(call)
            assert caught.value.code() is status, sent
    assert not gateways.quota("g1").ledger.settled("eve")
    # The public port knows no such service.
    async with connect(gateways.meshes["g1"].gateway.grpc_address) as channel:
        call = quota_pb2_grpc.QuotaServiceStub(channel).ShareQuota(iter([]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def until_its_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def test_owners_move_only_with_their_gateway() -> None:
    records = {name: GatewayRecord(gateway_id=name, incarnation="1", address="") for name in ("a", "b", "c", "d")}
    members = Members(records["a"])
    members.update(records)
    tenants = [f"tenant-{number}" for number in range(400)]
    before = {tenant: members.owner(tenant) for tenant in tenants}
    assert all(60 < sum(owner == name for owner in before.values()) < 140 for name in records)
    members.update({name: record for name, record in records.items() if name != "c"})
    assert all(members.owner(tenant) == owner for tenant, owner in before.items() if owner != "c")
    assert "c" not in {members.owner(tenant) for tenant in tenants}
