"""Circuits of workers and pairs, and the budget of retries, as requests notice them."""

import asyncio
from pathlib import Path

import grpc
import pytest

from common.errors import EngineFailed, Overloaded, TransferFailed
from common.policies.circuit import CircuitPolicy
from common.policies.retry_budget import RetryPolicy
from epd.v1 import generation_pb2
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal
from tests.unit.gateway.hearts import until

SLOW = CircuitPolicy(failures=3, open_seconds=600.0, longest_seconds=600.0)
QUICK = CircuitPolicy(failures=3, open_seconds=0.2, longest_seconds=0.2)


async def meshed(model_dir: Path, names: str, **settings: object) -> Mesh:
    mesh = Mesh(model_dir)
    patient = {"first_byte_seconds": 600.0, "route_wait_seconds": 600.0, "recovery_seconds": 600.0}
    await mesh.start(**patient, **settings)
    for name in names.split():
        await mesh.add(name, {"p": ["prefill"], "d": ["decode"]}[name[0]])
    return mesh


async def test_a_worker_whose_calls_fail_is_left_alone(model_dir: Path) -> None:
    mesh = await meshed(model_dir, "p0 d0 d1", circuit=SLOW)
    try:
        bad, good = mesh.workers["d0"], mesh.workers["d1"]
        bad.decode_errors = [(0, EngineFailed("broke")) for _ in range(50)]
        for i in range(40):
            assert (await generate(mesh, ask(max_tokens=3, session_id=f"s{i}"))).texts == {0: "abc"}
        assert len(bad.calls) == 3
        assert len(good.calls) == 40
        assert mesh.gateway.fleet.get("d0").away == "circuit open"
        listed = await mesh.stub.ListModels(generation_pb2.ListModelsRequest())
        assert [(each.worker_id, each.why) for each in listed.away] == [("d0", "circuit open")]
        metrics = mesh.gateway.telemetry.metrics.exposition().decode()
        assert 'epd_workers_away{model="fake",why="circuit open"} 1.0' in metrics
        mesh.gateway.fleet.update({})  # gone: told as none, for a series that ends stands still in dashboards
        metrics = mesh.gateway.telemetry.metrics.exposition().decode()
        assert 'epd_workers_away{model="fake",why="circuit open"} 0.0' in metrics
        assert 'epd_workers{model="fake",role="decode"} 0.0' in metrics
    finally:
        await mesh.stop()


async def test_the_only_worker_is_tried_again(model_dir: Path) -> None:
    """Never for good: the request waits until a probe is let through, and that closes the circuit."""
    mesh = await meshed(model_dir, "p0 d0", circuit=QUICK)
    try:
        d0 = mesh.workers["d0"]
        d0.decode_errors = [(0, EngineFailed("broke")) for _ in range(3)]
        result = await generate(mesh, ask(max_tokens=9))
        assert result.texts == {0: "abcdefghi"}
        assert result.accounting.attempts == 4
        assert mesh.gateway.fleet.get("d0").routable
    finally:
        await mesh.stop()


async def test_half_open_one_probe_at_a_time(model_dir: Path) -> None:
    mesh = await meshed(model_dir, "p0 d0", circuit=QUICK, max_attempts=1)
    try:
        d0, worker = mesh.workers["d0"], mesh.gateway.fleet.get("d0")
        d0.decode_errors = [(0, EngineFailed("broke")) for _ in range(3)]
        for _ in range(3):
            await refusal(mesh, ask(max_tokens=3))
        d0.decode_gate.clear()
        tasks = [asyncio.create_task(generate(mesh, ask(max_tokens=3))) for _ in range(5)]
        await until(lambda: d0.running)
        assert worker.away == "circuit half-open"
        assert len(d0.calls) == 4  # one of the five; the others wait for its outcome
        d0.decode_gate.set()
        for task in tasks:
            assert (await task).texts == {0: "abc"}
        assert worker.routable
    finally:
        await mesh.stop()


async def test_a_pair_that_cannot_pull_is_not_chosen(model_dir: Path) -> None:
    mesh = await meshed(model_dir, "p0 d0 d1", circuit=SLOW)
    try:
        d0, d1 = mesh.workers["d0"], mesh.workers["d1"]
        d0.decode_errors = [(0, TransferFailed("the owner's stream broke", peer="p0")) for _ in range(50)]
        for i in range(40):
            result = await generate(mesh, ask(max_tokens=3, session_id=f"s{i}"))
            assert result.texts == {0: "abc"}
            assert result.accounting.attempts <= 2  # the next attempt is another pair at once
        assert len(d0.calls) == 3
        assert len(d1.calls) == 40
        fleet = mesh.gateway.fleet
        assert fleet.get("d0").routable  # for others
        listed = await mesh.stub.ListModels(generation_pb2.ListModelsRequest())
        assert [(each.owner, each.worker_id) for each in listed.away] == [("p0", "d0")]
        await mesh.add("p1", ["prefill"])
        d0.decode_errors = []
        for i in range(40):
            await generate(mesh, ask(max_tokens=3, session_id=f"t{i}"))
        sources = {request.source.owner.worker_id for _, request in d0.calls[3:]}
        assert sources == {"p1"}
        # The pair is forgotten with either life.
        await mesh.workers.pop("p0").kill()
        await mesh.publish()
        assert not fleet.pairs.open()
    finally:
        await mesh.stop()


async def test_without_a_budget_the_error_comes_at_once(model_dir: Path) -> None:
    none = RetryPolicy(share=0.0, min_per_second=0.0)
    mesh = await meshed(model_dir, "p0 p1 d0", retries=none)
    try:
        for worker in (mesh.workers["p0"], mesh.workers["p1"]):
            worker.prefill_errors = [EngineFailed("broke"), Overloaded("full")]
        code, metadata, _ = await refusal(mesh, ask(max_tokens=3, session_id="s"))
        assert (code, metadata["epd-reason"]) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        assert int(metadata["retry-after-ms"]) > 0
        code, metadata, _ = await refusal(mesh, ask(max_tokens=3, session_id="s"))
        assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert int(metadata["retry-after-ms"]) > 0
        assert sum(len(mesh.workers[name].calls) for name in ("p0", "p1")) == 2
        assert mesh.gateway.telemetry.metrics.retries_refused.labels("fake")._value.get() == 2
    finally:
        await mesh.stop()


@pytest.mark.parametrize("started", [False, True], ids=["before the first token", "in mid-stream"])
async def test_streams_with_tokens_come_first(model_dir: Path, started: bool) -> None:
    """All of the budget is kept for resumes."""
    kept = RetryPolicy(share=0.0, min_per_second=10.0, resume_share=1.0)
    mesh = await meshed(model_dir, "p0 d0", retries=kept)
    try:
        p0, d0 = mesh.workers["p0"], mesh.workers["d0"]
        if started:
            d0.decode_errors = [(2, EngineFailed("broke"))]
            assert (await generate(mesh, ask(max_tokens=9))).texts == {0: "abcdefghi"}
        else:
            p0.prefill_errors = [EngineFailed("broke")]
            _, metadata, _ = await refusal(mesh, ask(max_tokens=9))
            assert metadata["epd-reason"] == "WORKER_LOST"
    finally:
        await mesh.stop()
