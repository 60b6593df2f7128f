"""The registered workers, from etcd."""

import msgspec

from common.registry.etcd import EtcdRegistry
from common.registry.record import WorkerRecord
from common.registry.settings import etcd_settings
from services.commands.client import etcd_address
from services.commands.trust import Trust


async def registered_workers(etcd: str, trust: Trust) -> list[WorkerRecord]:
    """One snapshot, by worker id. Raises Unavailable naming the endpoint."""
    address = etcd_address(etcd)
    settings = etcd_settings(address.split(","), trust.etcd(address))
    registry = EtcdRegistry(msgspec.structs.replace(settings, call_timeout_seconds=3.0))
    watch = await registry.watch(lambda _: None)
    try:
        return [record for _, record in sorted(watch.workers.items())]
    finally:
        await registry.close()
