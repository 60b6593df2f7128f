"""After a few requests real processes expose what the dashboards ask for."""

import pytest

from tests.dashboards import metrics_in, queries, samples
from tests.e2e.conftest import Meshes
from tests.fuzz.world import picture
from tests.mesh import collect, request

session = pytest.mark.asyncio(loop_scope="session")
LOOK = "<|vision_start|><|image_pad|><|vision_end|>what is it?"
# Of what did not happen here: refusals, misses, failures, silence.
RARE = {
    "epd_slo_missed_total",
    "epd_refusals_total",
    "epd_gateway_queue_refusals_total",
    "epd_gateway_queued_requests",
    "epd_gateway_queued_tokens",
    "epd_retries_total",
    "epd_retries_refused_total",
    "epd_hedges_total",
    "epd_cancellations_total",
    "epd_workers_away",
    "epd_transfer_failures_total",
    "epd_call_errors_total",
}


@session
async def test_what_dashboards_ask_for_is_exposed(meshes: Meshes) -> None:
    mesh = await meshes.get("vlm-qwen2_vl", roles=("encode", "prefill", "decode"))
    asked = request(LOOK, max_tokens=6, ignore_eos=True)
    asked.images.add().data = picture()
    await collect(mesh.stub.Generate(asked, timeout=60))
    await mesh.settled()
    exposed = samples(mesh.gateway.telemetry.metrics.exposition())
    for worker in mesh.workers:
        for name, labels in samples(worker.telemetry.metrics.exposition()).items():
            exposed.setdefault(name, set()).update(labels)
    wanted = {name for _, query in queries() for name in metrics_in(query)}
    assert wanted - exposed.keys() - RARE == set()
    assert wanted >= RARE


@session
async def test_a_workers_pools_are_as_its_status_says(meshes: Meshes) -> None:
    mesh = await meshes.get("vlm-qwen2_vl", roles=("encode", "prefill", "decode"))
    await mesh.settled()
    for worker in mesh.workers:
        load = (await mesh.status(worker)).load
        registry = worker.telemetry.metrics.registry
        for state in ("free", "cached", "active", "held"):
            shown = registry.get_sample_value("epd_kv_blocks", {"state": state})
            assert (shown or 0) == getattr(load, f"{state}_blocks")
        if load.total_rows:
            rows = [registry.get_sample_value("epd_embedding_rows", {"state": s}) for s in ("free", "cached", "held")]
            assert rows == [load.free_rows, load.cached_rows, load.held_rows]
            assert sum(rows) == load.total_rows
        else:
            assert (registry.get_sample_value("epd_engine_steps_total") or 0) > 0
