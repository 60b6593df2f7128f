"""The gateway's queue: whose turn it is when a prefill worker has room, who is sent away, and what it costs whom."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from common import telemetry
from common.errors import EngineFailed
from common.policies.fairness import FairnessPolicy
from common.policies.refusal import ServiceRate
from common.policies.routing import RoutingPolicy
from common.rpc.wire import hop_seconds
from epd.v1 import worker_pb2
from services.gateway.queue import Queue
from tests.fakes import MODEL, FakeWorker
from tests.unit.gateway.conftest import Mesh, Result, ask, generate

ONE_BY_ONE = RoutingPolicy(dispatch_tokens=1)
LONG, SHORT = "x" * 3000, "x" * 20  # a token a byte


async def one_by_one(mesh: Mesh, **settings: Any) -> tuple[FakeWorker, FakeWorker]:
    """A pair of workers whose prefill takes a prompt at a time, and none yet: its gate is shut."""
    await mesh.stop()
    mesh.workers.clear()
    await mesh.start(**{"routing": ONE_BY_ONE, **settings})
    prefill, decode = await mesh.pair()
    prefill.prefill_gate.clear()
    prefill.load = worker_pb2.Load(total_blocks=1024, free_blocks=1024, pending_prefill_tokens=1 << 20)
    await prefill.note()
    return prefill, decode


def queue(mesh: Mesh) -> Queue:
    return mesh.gateway.generator.orchestrator.planner._queue(MODEL)


async def send(mesh: Mesh, tenants: Sequence[str], text: str = SHORT, **fields: Any) -> list[asyncio.Task[Result]]:
    """One after the other; each is at the prefill worker or in the queue before the next is sent."""
    sent = []
    for tenant in tenants:
        before = len(queue(mesh)) + len(mesh.workers["p0"].calls)
        request = ask(text, max_tokens=3, **fields)
        sent.append(asyncio.create_task(generate(mesh, request, metadata=(("x-epd-tenant", tenant),))))
        async with asyncio.timeout(10):
            while len(queue(mesh)) + len(mesh.workers["p0"].calls) == before and not sent[-1].done():
                await asyncio.sleep(0.001)
    return sent


async def report(mesh: Mesh, prefill: FakeWorker, tokens: int) -> None:
    """Twice, as a report may have left before the last prompt came."""
    known = mesh.gateway.fleet.get("p0")
    assert known is not None
    for each in (tokens + 1, tokens):
        prefill.load.pending_prefill_tokens = each
        await prefill.note()
        async with asyncio.timeout(10):
            while known.load.pending_prefill_tokens != each:
                await asyncio.sleep(0.001)


async def refusal(task: asyncio.Task[Result]) -> tuple[grpc.StatusCode, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await task
    return caught.value.code(), dict(caught.value.trailing_metadata() or ())


def order(prefill: FakeWorker) -> str:
    return "".join(request.tenant for name, request in prefill.calls if name == "prefill")


@pytest.mark.parametrize(("policy", "expected"), [("vtc", "abcbb"), ("fcfs", "abbbc")])
async def test_who_waits_is_served_in_the_order_of_the_policy(mesh: Mesh, policy: Any, expected: str) -> None:
    prefill, _ = await one_by_one(mesh, fairness=FairnessPolicy(order=policy))
    sent = await send(mesh, "abbbc")
    assert order(prefill) == "a"
    assert mesh.gateway.generator.orchestrator.planner.held(MODEL) == 4
    text = mesh.gateway.telemetry.metrics.exposition().decode()
    assert 'epd_gateway_queued_requests{tenant="b"} 3.0' in text
    assert f'epd_gateway_queued_tokens{{tenant="b"}} {3.0 * len(SHORT)}' in text
    prefill.prefill_gate.set()
    for each in await asyncio.gather(*sent):
        assert each.token_ids[0] == [ord("a"), ord("b"), ord("c")]
    assert order(prefill) == expected
    assert 'epd_gateway_queued_requests{tenant="b"} 0.0' in mesh.gateway.telemetry.metrics.exposition().decode()


async def test_a_heavier_tenant_gets_more(mesh: Mesh) -> None:
    prefill, _ = await one_by_one(mesh)
    mesh.gateway.generator.orchestrator.planner.weight = {"a": 1.0, "b": 100.0}.__getitem__
    sent = await send(mesh, "aaaabbb")
    prefill.prefill_gate.set()
    await asyncio.gather(*sent)
    assert order(prefill) == "abbbaaa"


async def test_a_short_prompt_does_not_wait_behind_a_long_one(mesh: Mesh) -> None:
    prefill, _ = await one_by_one(mesh)
    sent = [*await send(mesh, "a"), *await send(mesh, "a", LONG), *await send(mesh, "aa")]
    prefill.prefill_gate.set()
    await asyncio.gather(*sent)
    lengths = [len(request.prompt_token_ids) for name, request in prefill.calls if name == "prefill"]
    assert lengths == [len(SHORT)] * 3 + [len(LONG)]


async def test_a_retry_goes_first_and_is_not_charged_again(mesh: Mesh) -> None:
    prefill, decode = await one_by_one(mesh)
    decode.decode_errors = [(1, EngineFailed("broke"))]
    sent = await send(mesh, "abc")
    prefill.prefill_gate.set()
    results = await asyncio.gather(*sent)
    assert [each.token_ids[0] for each in results] == [[ord("a"), ord("b"), ord("c")]] * 3
    assert sorted(each.accounting.attempts for each in results) == [1, 1, 2]
    again = [name for name, request in prefill.calls if request.key.attempt == 2]
    assert len(again) == 1
    counters = queue(mesh).fair.counters
    assert counters["a"] == len(SHORT) + 2 * 3


async def test_what_a_cache_had_is_not_charged(mesh: Mesh) -> None:
    prefill, _ = await one_by_one(mesh)
    prefill.cached_tokens = 16
    sent = await send(mesh, "a")
    assert queue(mesh).fair.counters["a"] == len(SHORT)
    prefill.prefill_gate.set()
    await asyncio.gather(*sent)
    async with asyncio.timeout(10):
        while queue(mesh).fair.counters["a"] != len(SHORT) - 16 + 2 * 3:
            await asyncio.sleep(0.001)


async def test_a_cancelled_request_leaves_the_queue_and_its_turn(mesh: Mesh) -> None:
    prefill, _ = await one_by_one(mesh)
    sent = await send(mesh, "abc")
    sent[1].cancel()
    async with asyncio.timeout(10):
        while len(queue(mesh)) > 1:
            await asyncio.sleep(0.001)
    prefill.prefill_gate.set()
    await asyncio.gather(sent[0], sent[2])
    assert order(prefill) == "ac"
    assert mesh.gateway.generator.orchestrator.planner.held(MODEL) == 0


async def test_a_full_queue_sends_away_who_has_most_in_it(mesh: Mesh) -> None:
    prefill, _ = await one_by_one(mesh, max_queued_tokens=3 * len(SHORT))
    sent = await send(mesh, "abbb")
    other = asyncio.create_task(generate(mesh, ask(SHORT, max_tokens=3), metadata=(("x-epd-tenant", "c"),)))
    assert (await refusal(sent[3]))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    (more,) = await send(mesh, "b")
    status, trailers = await refusal(more)
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(trailers["retry-after-ms"]) > 0
    prefill.prefill_gate.set()
    await asyncio.gather(*sent[:3], other)
    assert order(prefill) == "abcb"
    text = mesh.gateway.telemetry.metrics.exposition().decode()
    assert 'epd_gateway_queue_refusals_total{cause="queue full",tenant="b"} 2.0' in text


@pytest.mark.parametrize(("refuse_by", "refused"), [("deadline", True), ("slo", True), ("never", False)])
async def test_what_cannot_be_served_in_time_is_refused_at_once(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, refuse_by: Any, refused: bool
) -> None:
    prefill, _ = await one_by_one(mesh, refuse_by=refuse_by)
    sent = await send(mesh, "aa", LONG)
    monkeypatch.setattr(ServiceRate, "tokens_per_second", lambda self, now, tokens: 100.0)
    last = asyncio.create_task(
        generate(mesh, ask(LONG + SHORT, max_tokens=3), timeout=15, metadata=(("x-epd-tenant", "a"),))
    )
    if not refused:
        async with asyncio.timeout(10):
            while len(queue(mesh)) < 2:
                await asyncio.sleep(0.001)
        prefill.prefill_gate.set()
        await asyncio.gather(*sent, last)
        return
    status, trailers = await refusal(last)
    # 3000 tokens before it at 100 a second; 15 s are left of its deadline, 0.5 s of its target.
    assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    after = int(trailers["retry-after-ms"]) / 1000
    assert after == pytest.approx(30.0 - (0.5 if refuse_by == "slo" else 15.0), abs=2.0)
    # Another tenant's line is its own.
    other = await send(mesh, "b")
    prefill.prefill_gate.set()
    await asyncio.gather(*sent, *other)
    assert order(prefill) == "aba"


async def test_the_wait_is_a_hop_and_a_span(mesh: Mesh) -> None:
    prefill, _ = await one_by_one(mesh)
    sent = await send(mesh, "ab")
    await asyncio.sleep(0.05)  # something to see
    prefill.prefill_gate.set()
    first, second = await asyncio.gather(*sent)
    found = {hop.name: hop_seconds(hop) for hop in second.accounting.ttft_hops}
    assert found[telemetry.GATEWAY_QUEUE] >= 0.05
    assert sum(found.values()) == pytest.approx(second.accounting.ttft_seconds, abs=1e-6)
    assert telemetry.GATEWAY_QUEUE not in {hop.name for hop in first.accounting.ttft_hops}
    spans = [span.name for span in mesh.gateway.store.trace(second.accounting.trace_id)]
    assert telemetry.GATEWAY_QUEUE in spans


async def test_a_long_prompt_makes_room_as_it_is_computed(mesh: Mesh) -> None:
    """What has been sent counts even while the worker does not report it, but for the one that it may be computing."""
    prefill, _ = await one_by_one(mesh, routing=RoutingPolicy(dispatch_tokens=1000))
    sent = [*await send(mesh, "a", LONG), *await send(mesh, "b")]
    assert order(prefill) == "a"
    await report(mesh, prefill, 900)
    await prefill.until(lambda: order(prefill) == "ab")
    sent += [*await send(mesh, "a", LONG), *await send(mesh, "b")]
    assert order(prefill) == "aba"
    await report(mesh, prefill, 0)
    assert mesh.gateway.generator.orchestrator.planner.held(MODEL) == 1
    prefill.prefill_gate.set()
    await asyncio.gather(*sent)
    assert order(prefill) == "abab"
