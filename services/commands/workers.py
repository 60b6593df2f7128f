"""The registered workers, from etcd."""

from common.registry.etcd import EtcdRegistry
from common.registry.record import WorkerRecord
from common.registry.settings import EtcdSettings
from services.commands.client import etcd_address


async def registered_workers(etcd: str) -> list[WorkerRecord]:
    """One snapshot, by worker id. Raises Unavailable naming the endpoint."""
    registry = EtcdRegistry(EtcdSettings(endpoints=tuple(etcd_address(etcd).split(",")), call_timeout_seconds=3.0))
    watch = await registry.watch(lambda _: None)
    try:
        return [record for _, record in sorted(watch.workers.items())]
    finally:
        await registry.close()
