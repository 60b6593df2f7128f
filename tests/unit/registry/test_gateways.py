"""Gateways find each other in a real etcd, and keep limits together from then on."""

from common.policies.limits import Amounts, TenantLimits
from common.span_store import SpanStore
from common.telemetry import Telemetry, TracerProvider
from services.gateway.quota.settings import QuotaSettings
from services.gateway.quota.sharing import Sharing
from tests.etcd import EtcdForTests, eventually

LIMITS = TenantLimits(requests_per_minute=4)


async def joined(etcd: EtcdForTests, name: str) -> Sharing:
    tel = Telemetry("test", TracerProvider(shutdown_on_exit=False), SpanStore())
    sharing = Sharing(name, QuotaSettings(lease_ttl_seconds=2), lambda tenant: LIMITS, tel, None)
    await sharing.start()
    await sharing.join(etcd.settings(), tel.metrics)
    return sharing


def together(one: Sharing, other: Sharing) -> bool:
    ids = {one.members.mine.gateway_id, other.members.mine.gateway_id}
    pairs = ((one, other), (other, one))
    return all(set(a.members.records) == ids and a.quota.ledger.settled(b.members.mine.gateway_id) for a, b in pairs)


async def test_gateways_register_share_and_leave(etcd: EtcdForTests) -> None:
    one, other = await joined(etcd, "g1"), await joined(etcd, "g2")
    try:
        await eventually(lambda: together(one, other))
        tenants = [next(t for t in map(str, range(100)) if one.members.owner(t) == name) for name in ("g1", "g2")]
        for tenant in tenants:
            for sharing in (one, other, one, other):
                await sharing.quota.take(tenant, Amounts(requests=1))
            assert one.quota.ledger.account(tenant).mine.used("requests", one.quota.ledger.clock()) == 2
        await etcd.restart(wipe=True)  # streams stay; both register again, and are never parted
        await other.quota.take("another", Amounts(requests=1))
        await eventually(lambda: together(one, other))
    finally:
        await other.stop()
        await eventually(lambda: set(one.members.records) == {"g1"})
        await one.stop()
