"""A tenant's limits at one gateway, through both edges: what is refused, how, and what comes back."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.errors import EngineFailed, InvalidArgument
from common.policies.limits import Amounts, TenantLimits
from services.gateway.quota.quota import Quota
from tests.fakes import MODEL
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal
from tests.unit.gateway.test_images import FACTOR, TALL, WIDE, chat
from tests.vlm_files import qwen_files

A = (("x-epd-tenant", "a"),)
B = (("x-epd-tenant", "b"),)


@pytest.fixture(scope="module")
def vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_files(tmp_path_factory.mktemp("vlm"))


async def started(model_dir: Path, **limits: Any) -> Mesh:
    mesh = Mesh(model_dir)
    await mesh.start(limits={"a": TenantLimits(**limits)})
    await mesh.pair()
    return mesh


def used(mesh: Mesh, kind: str, tenant: str = "a") -> int:
    ledger = mesh.gateway.sharing.quota.ledger
    return ledger.account(tenant).mine.used(kind, ledger.clock())


async def test_requests_per_minute(model_dir: Path) -> None:
    mesh = await started(model_dir, requests_per_minute=3)
    try:
        for _ in range(3):
            await generate(mesh, ask(max_tokens=1), metadata=A)
        code, metadata, details = await refusal(mesh, ask(max_tokens=1), metadata=A)
        assert (code, metadata["epd-reason"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "RATE_LIMITED")
        assert metadata["epd-field"] == "requests_per_minute"
        assert "3 requests a minute" in details
        assert 0 < int(metadata["retry-after-ms"]) <= 61_000
        async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as http:
            body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
            response = await http.post("/v1/completions", json=body, headers=dict(A))
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (429, "rate_limited")
            assert (error["type"], error["param"]) == ("rate_limit_error", "requests_per_minute")
            assert 0 < int(response.headers["retry-after"]) <= 61
            assert (await http.post("/v1/completions", json=body, headers=dict(B))).status_code == 200
        assert len(mesh.workers["p0"].calls) == 4
        metrics = mesh.gateway.telemetry.metrics.exposition().decode()
        assert 'epd_refusals_total{reason="RATE_LIMITED"} 2.0' in metrics
        assert 'blame="RATE_LIMITED"' not in metrics
    finally:
        await mesh.stop()


async def test_requests_in_flight(model_dir: Path) -> None:
    mesh = await started(model_dir, requests_in_flight=2)
    p = mesh.workers["p0"]
    try:
        p.prefill_gate.clear()
        running = [asyncio.create_task(generate(mesh, ask(max_tokens=1), metadata=A)) for _ in range(2)]
        await p.until(lambda: len(p.calls) == 2)
        _, metadata, _ = await refusal(mesh, ask(max_tokens=1), metadata=A)
        assert (metadata["epd-reason"], metadata["epd-field"]) == ("RATE_LIMITED", "requests_in_flight")
        running[0].cancel()  # a client that goes frees its place, too
        async with asyncio.timeout(10):
            while used(mesh, "in_flight") != 1:
                await asyncio.sleep(0)
        p.prefill_gate.set()
        await generate(mesh, ask(max_tokens=1), metadata=A)
        await running[1]
        assert used(mesh, "in_flight") == 0
    finally:
        await mesh.stop()


async def test_prompt_tokens_per_minute_cached_or_not(model_dir: Path) -> None:
    mesh = await started(model_dir, prompt_tokens_per_minute=10)
    try:
        mesh.workers["p0"].cached_tokens = 6
        await generate(mesh, ask("x" * 6, max_tokens=1), metadata=A)
        _, metadata, _ = await refusal(mesh, ask("x" * 5, max_tokens=1), metadata=A)
        assert (metadata["epd-reason"], metadata["epd-field"]) == ("RATE_LIMITED", "prompt_tokens_per_minute")
        await generate(mesh, ask("x" * 4, max_tokens=1), metadata=A)
        code, metadata, details = await refusal(mesh, ask("x" * 11, max_tokens=1), metadata=A)
        assert (code, metadata["epd-reason"]) == (grpc.StatusCode.INVALID_ARGUMENT, "NEVER_FITS")
        assert "11 prompt tokens" in details
        await generate(mesh, ask("x" * 50, max_tokens=1), metadata=B)
    finally:
        await mesh.stop()


async def test_what_was_not_used_is_given_back(model_dir: Path) -> None:
    """Refused later or failed: given back. Answered, given up, or wrong itself: used."""
    mesh = await started(model_dir, requests_per_minute=9, prompt_tokens_per_minute=10, requests_in_flight=1)
    p = mesh.workers["p0"]
    try:
        await generate(mesh, ask("x" * 8, max_tokens=1), metadata=A)
        await refusal(mesh, ask("x" * 8, max_tokens=1), metadata=A)  # its tokens were too many: its request comes back
        assert (used(mesh, "requests"), used(mesh, "prompt_tokens")) == (1, 8)
        p.prefill_errors = [InvalidArgument("no")]
        await refusal(mesh, ask("x", max_tokens=1), metadata=A)
        assert (used(mesh, "requests"), used(mesh, "prompt_tokens")) == (2, 9)
        p.prefill_errors = [EngineFailed("broken") for _ in range(20)]
        await refusal(mesh, ask("x", max_tokens=1), metadata=A)
        assert (used(mesh, "requests"), used(mesh, "prompt_tokens")) == (2, 9)
        p.prefill_errors = []
        p.prefill_gate.clear()
        code, _, _ = await refusal(mesh, ask("x", max_tokens=1), metadata=A, timeout=0.5)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(10):
            while used(mesh, "in_flight"):
                await asyncio.sleep(0)
        assert (used(mesh, "requests"), used(mesh, "prompt_tokens")) == (3, 10)
    finally:
        await mesh.stop()


async def test_image_pixels_per_minute(vlm_dir: Path) -> None:
    area = FACTOR * FACTOR
    mesh = await started(vlm_dir, image_pixels_per_minute=6 * area)
    await mesh.add("e0", ["encode"])
    try:
        await generate(mesh, chat(WIDE, TALL, "?"), metadata=A)
        assert used(mesh, "image_pixels") == 5 * area
        _, metadata, _ = await refusal(mesh, chat(WIDE, "?"), metadata=A)
        assert (metadata["epd-reason"], metadata["epd-field"]) == ("RATE_LIMITED", "image_pixels_per_minute")
        await generate(mesh, chat("no picture"), metadata=A)
        await generate(mesh, chat(WIDE, "?"), metadata=B)
        assert mesh.workers["e0"].calls[0][1].tenant == "a"
    finally:
        await mesh.stop()


async def test_max_priority(model_dir: Path) -> None:
    mesh = await started(model_dir, max_priority=3)
    try:
        await generate(mesh, ask(max_tokens=1, priority=3), metadata=A)
        code, metadata, details = await refusal(mesh, ask(max_tokens=1, priority=4), metadata=A)
        assert (code, metadata["epd-field"]) == (grpc.StatusCode.PERMISSION_DENIED, "priority")
        assert "3" in details
        await generate(mesh, ask(max_tokens=1, priority=4), metadata=B)
        assert [request.priority for _, request in mesh.workers["p0"].calls] == [3, 4]
    finally:
        await mesh.stop()


async def test_idle_tenants_are_forgotten_and_those_without_limits_never_known(model_dir: Path) -> None:
    mesh = Mesh(model_dir)
    await mesh.start(limits={"a": TenantLimits()}, other_limits=TenantLimits(requests_in_flight=1))
    await mesh.pair()
    try:
        ledger = mesh.gateway.sharing.quota.ledger
        for tenant in ("a", "b", "c"):
            await generate(mesh, ask(max_tokens=1), metadata=(("x-epd-tenant", tenant),))
        assert set(ledger.accounts) == {"b", "c"}
        ledger.account("c").mine.add(Amounts(in_flight=1), ledger.clock())
        ledger.sweep()
        assert set(ledger.accounts) == {"c"}
    finally:
        await mesh.stop()


async def test_cache_bytes_and_weight_reach_those_who_need_them(model_dir: Path) -> None:
    mesh = await started(model_dir, cache_bytes=12345, weight=2.5)
    try:
        await generate(mesh, ask(max_tokens=2), metadata=A)
        await generate(mesh, ask(max_tokens=2), metadata=B)
        for worker in mesh.workers.values():
            assert [request.cache_bytes for _, request in worker.calls] == [12345, 0]
        weight = mesh.gateway.generator.orchestrator.planner.weight
        assert (weight("a"), weight("b")) == (2.5, 1.0)
    finally:
        await mesh.stop()


def test_quota_asks_nobody_alone(model_dir: Path) -> None:
    """The fast path has no call in it: a coroutine that ends without ever waiting."""

    async def run() -> None:
        mesh = await started(model_dir, requests_per_minute=1)
        try:
            quota: Quota = mesh.gateway.sharing.quota
            for tenant, taken in (("a", Amounts(requests=1)), ("b", Amounts())):
                with pytest.raises(StopIteration) as ended:
                    quota.take(tenant, Amounts(requests=1)).send(None)
                assert ended.value.value == taken
        finally:
            await mesh.stop()

    asyncio.run(run())
