"""Records to register, and a registry that is closed at the end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.cache.keys import KvLayout
from common.metrics import Metrics
from common.registry.etcd import EtcdRegistry
from common.registry.record import WorkerRecord
from common.registry.settings import EtcdSettings

TTL = 2  # seconds; etcd grants no less
LAYOUT = KvLayout(model="tiny", revision="1", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)


def record(worker_id: str = "worker-1", incarnation: str = "first", **changes: object) -> WorkerRecord:
    fields: dict[str, object] = {
        "worker_id": worker_id,
        "incarnation": incarnation,
        "roles": ("prefill", "decode"),
        "address": "127.0.0.1:7001",
        "model": "tiny",
        "layout": LAYOUT,
        "max_context": 128,
        "vocab_size": 256,
        "num_blocks": 64,
        "executor": "timed",
    }
    return WorkerRecord(**{**fields, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def registry(settings: EtcdSettings, metrics: Metrics | None = None) -> AsyncIterator[EtcdRegistry]:
    opened = EtcdRegistry(settings, metrics)
    await opened.start()
    try:
        yield opened
    finally:
        await opened.close()
