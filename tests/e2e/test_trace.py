"""One trace a request (cases E2, E3), as a real OTLP collector receives it, and as `GetTrace` shows it."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from common import telemetry as names
from common.engine.settings import TimedModel
from epd.v1 import trace_pb2, trace_pb2_grpc
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh, collect, request
from tests.otlp import Collector, Received, edges, exported

session = pytest.mark.asyncio(loop_scope="session")

PREFILL = "epd.v1.PrefillService/Prefill"
DECODE = "epd.v1.DecodeService/Decode"
PULL = "epd.v1.TransferService/Pull"
FRONT = {
    ("", names.GATEWAY_GENERATE),
    (names.GATEWAY_GENERATE, names.GATEWAY_ADMIT),
    (names.GATEWAY_GENERATE, names.GATEWAY_PREPROCESS),
    (names.GATEWAY_GENERATE, names.GATEWAY_ROUTE),
}
PREFILL_EDGES = {
    (names.GATEWAY_GENERATE, PREFILL),
    (PREFILL, names.PREFILL_RUN),
    (names.PREFILL_RUN, names.PREFILL_QUEUE),
    (names.PREFILL_RUN, names.CACHE_LOOKUP),
    (names.PREFILL_RUN, names.PREFILL_FORWARD),
}
DECODE_EDGES = {
    (names.GATEWAY_GENERATE, DECODE),
    (DECODE, names.DECODE_RUN),
    (names.DECODE_RUN, names.TRANSFER_PULL),
    (names.TRANSFER_PULL, PULL),
    (names.TRANSFER_PULL, names.DECODE_RESERVE),
    (names.DECODE_RUN, names.DECODE_QUEUE),
    (names.DECODE_RUN, names.DECODE_FIRST_STEP),
    (names.DECODE_RUN, names.DECODE_STEPS),
}
AGGREGATED_EDGES = {
    (names.GATEWAY_GENERATE, DECODE),
    (DECODE, names.DECODE_RUN),
    (names.DECODE_RUN, names.PREFILL_QUEUE),
    (names.DECODE_RUN, names.CACHE_LOOKUP),
    (names.DECODE_RUN, names.PREFILL_FORWARD),
    (names.DECODE_RUN, names.DECODE_FIRST_STEP),
    (names.DECODE_RUN, names.DECODE_STEPS),
}
SERVICE_OF = {"gateway": "gateway", "prefill": "prefill", "cache": "prefill", "decode": "decode", "transfer": "decode"}
# Steps that are slow enough to be interrupted, whatever the machine.
SLOW = TimedModel(base_seconds=0.02, num_layers=3, vocab_size=512, max_context=4096)
PROMPT = list(range(20, 60))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def collector() -> AsyncIterator[Collector]:
    async with Collector() as started:
        yield started


@pytest.fixture(scope="module")
def traced(meshes: Meshes, collector: Collector) -> Callable[..., Any]:
    """traced(...): a shared mesh of which every service exports to the collector."""

    async def get(**options: Any) -> LocalMesh:
        worker, gateway = {"otlp_endpoint": collector.address}, {"otlp_endpoint": collector.address}
        return await meshes.get(worker=worker, gateway=gateway, **options)

    return get


def parent(sampled: bool = True) -> tuple[str, str, str]:
    """(trace id, span id, traceparent) of a client of its own."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"


def check_services(spans: list[Received]) -> None:
    """Every span of our own names is exported by the service whose work it is; a client span by the caller's."""
    for span in spans:
        if not span.name.startswith("epd.v1."):
            assert span.service == SERVICE_OF[span.name.partition(".")[0]], span.name
    callers = {span.name: span.service for span in spans if span.name.startswith("epd.v1.")}
    assert callers == {PREFILL: "gateway", DECODE: "gateway", PULL: "decode"}


def check_times(spans: list[Received]) -> None:
    """Every span has ended, after it began, and begins no earlier than its parent (engine's times are rounded)."""
    starts = {span.span_id: span.start for span in spans}
    for span in spans:
        assert span.end >= span.start > 0, span.name
        assert span.start >= starts.get(span.parent_span_id, 0) - 5_000_000, span.name


@session
async def test_e2_one_trace_over_all_hops(traced: Any, collector: Collector) -> None:
    mesh = await traced()
    trace_id, span_id, header = parent()
    call = mesh.stub.Generate(request(PROMPT, max_tokens=6, ignore_eos=True), metadata=[("traceparent", header)])
    answer = await collect(call)
    await exported(mesh)

    spans = collector.trace(trace_id)
    assert answer.accounting.trace_id == trace_id
    assert edges(spans) == Counter(FRONT | PREFILL_EDGES | DECODE_EDGES)
    [root] = [span for span in spans if span.name == names.GATEWAY_GENERATE]
    assert root.parent_span_id == span_id
    check_services(spans)
    check_times(spans)
    assert not [span.name for span in spans if span.failed]
    # One trace: nothing of this request was begun anywhere else.
    worker_ids = {span.attributes.get(names.REQUEST_ID) for span in spans} - {None}
    for span in collector.spans:
        if span.attributes.get(names.REQUEST_ID) in worker_ids:
            assert span.trace_id == trace_id


@session
async def test_e2_attributes_tell_the_route_and_the_transfer(traced: Any, collector: Collector) -> None:
    mesh = await traced()
    asked = request([*PROMPT, 7], max_tokens=5, ignore_eos=True)
    asked.request_id = f"label-{secrets.token_hex(4)}"
    answer = await collect(mesh.stub.Generate(asked, metadata=[("x-epd-tenant", "acme")]))
    await exported(mesh)
    spans = {span.name: span for span in collector.trace(answer.accounting.trace_id)}
    root = spans[names.GATEWAY_GENERATE].attributes
    assert root[names.REQUEST_ID] == asked.request_id
    assert root[names.TENANT] == "acme"
    assert root[names.GEN_AI_MODEL] == MODEL
    assert root[names.GEN_AI_INPUT_TOKENS] == len(PROMPT) + 1
    assert root[names.GEN_AI_OUTPUT_TOKENS] == 5
    assert root[names.GEN_AI_FINISH_REASONS] == ["length"]
    assert root[names.SLO_TTFT_SECONDS] == 0.5
    assert root[names.SLO_MET] is answer.accounting.slo_met
    assert root[names.CACHED_TOKENS] == answer.usage.cached_tokens
    route = spans[names.GATEWAY_ROUTE].attributes
    assert route[names.ROUTE_DECISION] == "disaggregated (pair)"
    assert {each.partition(":")[0] for each in route[names.ROUTE_CANDIDATES]} == {
        "prefill prefill-0",
        "decode decode-1",
    }
    for name, worker in ((names.PREFILL_RUN, "prefill-0"), (names.DECODE_RUN, "decode-1")):
        assert spans[name].attributes[names.WORKER] == worker
        assert spans[name].attributes[names.ATTEMPT] == 1
        assert spans[name].attributes[names.TENANT] == "acme"
    pull = spans[names.TRANSFER_PULL].attributes
    assert pull[names.TRANSFER_CHANNEL] == "shm"
    assert pull[names.TRANSFER_BYTES] > 0


@session
async def test_e2_aggregated(traced: Any, collector: Collector) -> None:
    mesh = await traced(roles=("prefill,decode",))
    trace_id, _, header = parent()
    await collect(mesh.stub.Generate(request(PROMPT, max_tokens=6), metadata=[("traceparent", header)]))
    await exported(mesh)
    assert edges(collector.trace(trace_id)) == Counter(FRONT | AGGREGATED_EDGES)


@session
async def test_e2_one_token_is_prefill_alone(traced: Any, collector: Collector) -> None:
    mesh = await traced()
    trace_id, _, header = parent()
    await collect(mesh.stub.Generate(request(PROMPT, max_tokens=1), metadata=[("traceparent", header)]))
    await exported(mesh)
    assert edges(collector.trace(trace_id)) == Counter(FRONT | PREFILL_EDGES)


@session
async def test_e2_http_continues_the_clients_trace(traced: Any, collector: Collector) -> None:
    mesh = await traced()
    trace_id, span_id, header = parent()
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=PATIENCE_SECONDS) as client:
        answer = await client.post("/v1/completions", json=body, headers={"traceparent": header, "x-epd-timing": "1"})
    assert answer.json()["epd"]["trace_id"] == trace_id
    await exported(mesh)
    spans = collector.trace(trace_id)
    assert edges(spans) == Counter(FRONT | PREFILL_EDGES | DECODE_EDGES)
    assert next(span for span in spans if span.name == names.GATEWAY_GENERATE).parent_span_id == span_id


@session
@pytest.mark.parametrize("edge", ["grpc", "http"])
async def test_e3_unsampled_parent_exports_nothing(edge: str, traced: Any, collector: Collector) -> None:
    mesh = await traced()
    await exported(mesh)
    before = len(collector.spans)
    trace_id, _, header = parent(sampled=False)
    if edge == "grpc":
        call = mesh.stub.Generate(request(PROMPT, max_tokens=6), metadata=[("traceparent", header)])
        assert (await collect(call)).accounting.trace_id == trace_id
    else:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 6, "stream": True}
        url = f"http://{mesh.gateway.http_address}/v1/completions"
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            answer = await client.post(url, json=body, headers={"traceparent": header})
        assert answer.text.endswith("data: [DONE]\n\n")
    await exported(mesh)
    assert collector.spans[before:] == []
    # Not even a worker keeps it: the decision went along.
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await trace_pb2_grpc.TraceServiceStub(mesh.channel).GetTrace(trace_pb2.GetTraceRequest(trace_id=trace_id))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    # The next request, with no parent of its own, is recorded.
    sampled = await mesh.generate(PROMPT, max_tokens=2)
    await exported(mesh)
    assert collector.trace(sampled.accounting.trace_id)


async def slow(traced: Any, roles: tuple[str, ...] = ("prefill", "decode"), **options: Any) -> LocalMesh:
    mesh: LocalMesh = await traced(roles=roles, executor="timed", timed=SLOW, **options)
    return mesh


@session
@pytest.mark.parametrize("after", [0, 1, 4])
async def test_cancel_ends_every_span(after: int, traced: Any, collector: Collector) -> None:
    """Before any token, after the first, in mid-decode."""
    mesh = await slow(traced)
    trace_id, _, header = parent()
    call = mesh.stub.Generate(request(PROMPT, max_tokens=2000, ignore_eos=True), metadata=[("traceparent", header)])
    if after == 0:
        await until(lambda: mesh.workers[0].context.running_requests)
    for _ in range(after):
        await call.read()
    call.cancel()
    await mesh.settled()
    await exported(mesh)
    spans = {span.name: span for span in collector.trace(trace_id)}
    for name in (names.GATEWAY_GENERATE, DECODE, names.DECODE_RUN):
        assert spans[name].failed, name
        assert spans[name].attributes[names.ERROR_REASON] == "CANCELLED", name
    found = edges(collector.trace(trace_id))
    assert set(found) <= FRONT | PREFILL_EDGES | DECODE_EDGES
    assert set(found.values()) == {1}


@session
async def test_deadline_ends_every_span(traced: Any, collector: Collector) -> None:
    mesh = await slow(traced)
    trace_id, _, header = parent()
    asked = request(PROMPT, max_tokens=2000, ignore_eos=True)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await collect(mesh.stub.Generate(asked, metadata=[("traceparent", header)], timeout=0.6))
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await mesh.settled()
    await exported(mesh)
    spans = {span.name: span for span in collector.trace(trace_id)}
    # Whether the call's own end or the gateway's clock comes first, is open; that it failed is not.
    assert spans[names.GATEWAY_GENERATE].attributes[names.ERROR_REASON] in ("DEADLINE_EXCEEDED", "CANCELLED")
    assert spans[names.DECODE_RUN].failed
    found = edges(collector.trace(trace_id))
    assert set(found) <= FRONT | PREFILL_EDGES | DECODE_EDGES
    assert set(found.values()) == {1}


@session
async def test_error_ends_every_span(traced: Any, collector: Collector) -> None:
    mesh = await traced()
    trace_id, _, header = parent()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await collect(mesh.stub.Generate(request([5] * 600), metadata=[("traceparent", header)]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await exported(mesh)
    spans = collector.trace(trace_id)
    root = names.GATEWAY_GENERATE
    assert edges(spans) == Counter([("", root), (root, names.GATEWAY_ADMIT), (root, names.GATEWAY_PREPROCESS)])
    failed = {span.name: span.attributes[names.ERROR_REASON] for span in spans if span.failed}
    assert failed == dict.fromkeys((root, names.GATEWAY_PREPROCESS), "CONTEXT_TOO_LONG")


@session
async def test_retry_shows_its_attempts(meshes: Meshes, collector: Collector) -> None:
    """The decode worker stops in mid-stream: one trace holds both attempts and the pause between them."""
    options = {"otlp_endpoint": collector.address}
    made = meshes.make(
        roles=("prefill", "decode", "decode"), executor="timed", timed=SLOW, worker=options, gateway=options
    )
    async with made as mesh:
        trace_id, _, header = parent()
        asked = request(PROMPT, max_tokens=150, ignore_eos=True)
        call = mesh.stub.Generate(asked, metadata=[("traceparent", header)], timeout=PATIENCE_SECONDS)
        received = 0
        async for _ in call:
            received += 1
            if received == 5:
                break
        [busy] = [worker for worker in mesh.workers[1:] if worker.context.running_requests]
        await busy.stop()
        answer = await collect(call)
        assert answer.accounting.attempts == 2
        mesh.workers.remove(busy)
        await mesh.settled()
        await exported(mesh)
        spans = collector.trace(trace_id)
        found = edges(spans)
        assert set(found) <= FRONT | PREFILL_EDGES | DECODE_EDGES | {(names.GATEWAY_GENERATE, names.GATEWAY_RETRY)}
        assert found[names.GATEWAY_GENERATE, names.GATEWAY_RETRY] == 1
        assert found[names.GATEWAY_GENERATE, names.GATEWAY_ROUTE] == 2
        assert found[names.GATEWAY_GENERATE, PREFILL] == 2
        assert found[names.GATEWAY_GENERATE, DECODE] == 2
        attempts = {
            name: sorted(span.attributes[names.ATTEMPT] for span in spans if span.name == name)
            for name in (names.GATEWAY_ROUTE, names.GATEWAY_RETRY, names.PREFILL_RUN, names.DECODE_RUN)
        }
        assert attempts == {
            names.GATEWAY_ROUTE: [1, 2],
            names.GATEWAY_RETRY: [2],
            names.PREFILL_RUN: [1, 2],
            names.DECODE_RUN: [1, 2],
        }
        [retry] = [span for span in spans if span.name == names.GATEWAY_RETRY]
        assert retry.attributes[names.WORKER] == busy.settings.worker_id


@session
async def test_nothing_of_a_request_is_in_a_span(traced: Any, collector: Collector) -> None:
    """Neither what was asked nor what was answered, as text or as ids; chat, gRPC and HTTP."""
    mesh = await traced()
    canary = "zebra-canary-7391"
    text = f"{canary} walks over the lazy dog and {canary} jumps"
    before = len(collector.spans)
    answer = await mesh.generate(text, max_tokens=24, ignore_eos=True, top_logprobs=3, logit_bias={77: 20.0})
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "user": canary}
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        assert (await client.post(f"http://{mesh.gateway.http_address}/v1/chat/completions", json=body)).is_success
        bad = body | {"temperature": 9, "stop": [canary]}
        assert (await client.post(f"http://{mesh.gateway.http_address}/v1/chat/completions", json=bad)).is_client_error
    with pytest.raises(grpc.aio.AioRpcError):
        await mesh.generate(text * 100)
    await exported(mesh)
    spans = collector.spans[before:]
    assert len({span.trace_id for span in spans}) == 4
    assert len(answer.choices[0].text) >= 12
    for span in spans:
        for name, value in span.attributes.items():
            shown = str(value)
            assert canary not in shown, (span.name, name)
            assert answer.choices[0].text not in shown, (span.name, name)
            numbers = [each for each in value if not isinstance(each, str)] if isinstance(value, list) else []
            assert not numbers, (span.name, name)
            assert not isinstance(value, bytes), (span.name, name)


@session
async def test_get_trace_shows_the_same_tree(traced: Any, collector: Collector) -> None:
    mesh = await traced()
    asked = request([*PROMPT, 9], max_tokens=4, ignore_eos=True)
    asked.request_id = f"asked-{secrets.token_hex(4)}"
    answer = await collect(mesh.stub.Generate(asked))
    await exported(mesh)
    sent = {(s.span_id, s.parent_span_id, s.name, s.service) for s in collector.trace(answer.accounting.trace_id)}
    assert len(sent) == len(FRONT | PREFILL_EDGES | DECODE_EDGES)
    stub = trace_pb2_grpc.TraceServiceStub(mesh.channel)
    for query in ({"trace_id": answer.accounting.trace_id}, {"request_id": asked.request_id}):
        shown = await stub.GetTrace(trace_pb2.GetTraceRequest(**query))
        assert {(s.span_id, s.parent_span_id, s.name, s.service) for s in shown.spans} == sent
        starts = [span.start_unix_nanos for span in shown.spans]
        assert starts == sorted(starts)
    # The gateway's own id, which is what the workers know, leads there too.
    [internal] = {s.attributes[names.REQUEST_ID] for s in shown.spans if s.name == names.PREFILL_RUN}
    found = await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=internal))
    assert {span.trace_id for span in found.spans} == {answer.accounting.trace_id}


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)
