"""Ids, names and labels that only a client has made up: what the gateway keeps of them is bounded."""

import asyncio
import secrets
import threading

import pytest

from common.cache.keys import INDEX_KEY_BYTES
from common.errors import Overloaded
from common.metrics import Metrics
from common.span_store import REQUEST_ID, FinishedSpan, SpanStore
from epd.v1 import decode_pb2, worker_pb2
from services.gateway.admission import Admission
from services.gateway.observe import Observer
from services.gateway.token_stream import TokenStream
from tests.fakes import MODEL
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal
from tests.unit.gateway.hearts import until


def span(trace: str, number: int, label: str) -> FinishedSpan:
    attributes = {REQUEST_ID: label}
    return FinishedSpan(trace, f"{number:016x}", "", "gateway.generate", "gateway", number, number + 1, attributes, "")


@pytest.mark.parametrize("traces", [1, 50_000], ids=["one trace", "a trace each"])
def test_spans(traces: int) -> None:
    """Labels go with their spans."""
    store = SpanStore(max_spans=100, max_spans_per_trace=20)
    for i in range(50_000):
        store.add(span(f"{i % traces:032x}", i, f"label-{i}"))
        assert len(store) <= 100
    sizes = len(store._traces), len(store._trace_of_request), sum(map(len, store._requests_of_trace.values()))
    assert max(sizes) <= 100
    store.add(span("f" * 32, 1, "mine"))
    assert store.trace_of_request("mine") == "f" * 32
    assert len(store.trace("f" * 32)) == 1


def test_tenants_in_metrics() -> None:
    metrics = Metrics()
    observer = Observer(metrics, 10)
    for i in range(5000):
        observer.ended(MODEL, f"tenant-{i}", Overloaded("full"), 0.1)
    text = metrics.exposition().decode()
    assert text.count("epd_requests_total{") == 11
    assert 'tenant="other"' in text
    observer.ended(MODEL, "tenant-3", None, 0.1)
    assert (
        'epd_requests_total{model="fake",reason="",status="OK",tenant="tenant-3"} 1.0' in metrics.exposition().decode()
    )


def test_requests_and_tenants_in_flight() -> None:
    admission = Admission(8, max_per_tenant=4)
    for i in range(10_000):
        with admission.admit(f"tenant-{i}", secrets.token_hex(8)):
            pass
    assert (len(admission._running), len(admission._by_tenant)) == (0, 0)


class MadeUp:
    """A stub whose one stream names calls that nobody has opened, and now and then one that somebody has."""

    def __init__(self) -> None:
        self.known: asyncio.Queue[int] = asyncio.Queue()
        self.sent = 0

    def Subscribe(self, request: decode_pb2.SubscribeRequest) -> "MadeUp":
        return self

    async def read(self) -> decode_pb2.SubscribeResponse:
        self.sent += 1
        tags = [] if self.known.empty() else [self.known.get_nowait()]
        tags += [] if self.sent == 1 else [secrets.randbits(63) + 1000 for _ in range(100)]
        await asyncio.sleep(0)
        return decode_pb2.SubscribeResponse(calls=[decode_pb2.CallTokens(tag=tag) for tag in tags])

    def cancel(self) -> None:
        pass


async def test_tokens_of_unknown_calls() -> None:
    stub, heard = MadeUp(), asyncio.Event()
    stream = TokenStream(stub, "d0")  # type: ignore[arg-type]
    try:
        await until(lambda: stream._subscriber)
        route = stream.attach(lambda _: heard.set(), lambda: None)
        assert route is not None
        await until(lambda: stub.sent > 200)
        assert not heard.is_set()
        stub.known.put_nowait(route.subscription.tag)
        await until(heard.is_set)
        assert list(stream._routes) == [route.subscription.tag]
        stream.detach(route)
        assert not stream._routes
    finally:
        await stream.close()


async def test_keys_of_a_worker_that_makes_them_up(mesh: Mesh) -> None:
    p = await mesh.add("p0", ["prefill"], num_blocks=64)
    await mesh.add("d0", ["decode"])
    worker = mesh.gateway.fleet.get("p0")
    for sequence in range(1, 41):
        stored = [secrets.token_bytes(INDEX_KEY_BYTES) for _ in range(50)]
        p.blocks.append(worker_pb2.BlockEvents(sequence=sequence, stored=stored))
    await p.note()
    await until(lambda: worker.index.sequence == 40)
    assert len(worker.index.keys) == 64
    assert (await generate(mesh, ask(max_tokens=3))).texts == {0: "abc"}


async def test_a_full_gateway_refuses_before_any_work(model_dir) -> None:
    """The refusal does not queue behind what keeps the gateway busy: not for a thread, not for a worker."""
    mesh = Mesh(model_dir)
    await mesh.start(max_in_flight=2, tokenizer_threads=1)
    busy, free = threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        free.wait(60)

    try:
        _, d = await mesh.pair()
        d.decode_gate.clear()
        running = asyncio.create_task(generate(mesh, ask(max_tokens=3)))
        await until(lambda: d.running)
        mesh.gateway.generator.preprocessor._pool.submit(hold)
        await until(busy.is_set)
        queued = asyncio.create_task(generate(mesh, ask(max_tokens=3)))  # waits for the thread
        await until(lambda: mesh.gateway.admission.in_flight == 2)
        for _ in range(20):
            _, metadata, _ = await refusal(mesh, ask(max_tokens=3))
            assert metadata["epd-reason"] == "OVERLOADED"
            assert int(metadata["retry-after-ms"]) > 0
        assert not free.is_set()
        assert not running.done()
        assert not queued.done()
        free.set()
        d.decode_gate.set()
        assert (await running).texts == (await queued).texts == {0: "abc"}
    finally:
        free.set()
        await mesh.stop()
