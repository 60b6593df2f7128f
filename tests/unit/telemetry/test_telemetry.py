import asyncio
import socket
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from common import errors, telemetry
from common.span_store import FinishedSpan, SpanStore
from common.telemetry import Telemetry

SECRET = "canary-4711"


@pytest.fixture
def owner() -> Telemetry:
    return telemetry.setup("service", store=SpanStore())


def finished(owner: Telemetry, trace_id: str) -> dict[str, FinishedSpan]:
    assert owner.store is not None
    return {span.name: span for span in owner.store.trace(trace_id)}


def test_spans_nest_and_are_counted(owner: Telemetry) -> None:
    with owner.start_span("outer", attributes={telemetry.TENANT: "t"}):
        trace_id, outer_id = telemetry.current_trace_ids()
        with telemetry.start_span("inner"):
            assert owner.open_span_names() == ["inner", "outer"]
            assert "epd_open_spans 2.0" in owner.metrics.exposition().decode()
    assert owner.open_spans == 0
    assert telemetry.current_trace_ids() == ("", "")
    spans = finished(owner, trace_id)
    assert spans["inner"].parent_span_id == outer_id
    assert spans["outer"].parent_span_id == ""
    assert spans["outer"].attributes == {"epd.tenant": "t"}
    assert spans["outer"].service == "service"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.Overloaded(SECRET), "OVERLOADED"),
        (asyncio.CancelledError(SECRET), "CANCELLED"),
        (ValueError(SECRET), "INTERNAL"),
    ],
)
def test_errors_leave_their_reason_only(owner: Telemetry, error: BaseException, reason: str) -> None:
    span = owner.begin_span("failing")
    trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    def fail() -> None:
        with owner.start_span("inner", context=trace.set_span_in_context(span)):
            raise error

    with pytest.raises(type(error)):
        fail()
    telemetry.end_span(span, error)
    telemetry.end_span(span)  # twice is fine
    for found in finished(owner, trace_id).values():
        assert (found.error, found.attributes["epd.error.reason"]) == (reason, reason)
        assert SECRET not in repr(found)
    assert owner.open_spans == 0


def test_recorded_span_has_the_durations_of_the_engine(owner: Telemetry) -> None:
    with owner.start_span("prefill.run") as parent:
        trace_id, _ = telemetry.current_trace_ids()
        before = time.time_ns()
        owner.record_span(telemetry.PREFILL_QUEUE, None, 1.5, 0.5)
        telemetry.record_span(telemetry.PREFILL_FORWARD, parent, 1.0, 0.75, {"epd.cached_tokens": 16})
        after = time.time_ns()
    spans = finished(owner, trace_id)
    queue, forward = spans["prefill.queue"], spans["prefill.forward"]
    assert queue.parent_span_id == forward.parent_span_id == spans["prefill.run"].span_id
    assert before - 1_500_000_000 <= queue.start_unix_nanos <= after - 1_500_000_000
    assert queue.end_unix_nanos - queue.start_unix_nanos == 500_000_000
    assert forward.end_unix_nanos - forward.start_unix_nanos == 750_000_000
    assert forward.attributes == {"epd.cached_tokens": "16"}


async def test_each_service_of_a_process_has_its_own(owner: Telemetry) -> None:
    other = telemetry.setup("other", store=owner.store)

    async def work(mine: Telemetry) -> str:
        mine.attach()
        await asyncio.sleep(0)
        with telemetry.start_span("work"):
            await asyncio.sleep(0)
            assert telemetry.current() is mine
            return telemetry.current_trace_ids()[0]

    first, second = await asyncio.gather(asyncio.create_task(work(owner)), asyncio.create_task(work(other)))
    assert finished(owner, first)["work"].service == "service"
    assert finished(owner, second)["work"].service == "other"
    assert telemetry.current() is other  # the last one set up, where no context says otherwise


async def test_span_of_a_generator_that_is_closed_elsewhere_ends(owner: Telemetry) -> None:
    async def generate() -> AsyncIterator[int]:
        with owner.start_span("gateway.generate"):
            yield 1
            yield 2

    generator = generate()
    await asyncio.create_task(generator.__anext__())
    assert owner.open_spans == 1
    await asyncio.create_task(generator.aclose())  # type: ignore[attr-defined]
    assert owner.open_spans == 0


def test_parent_decides_about_sampling(owner: Telemetry) -> None:
    never = telemetry.setup("never", store=owner.store, sample_ratio=0.0)
    with never.start_span("root"):
        flags = int(dict(telemetry.inject())["traceparent"].rpartition("-")[2], 16)
        assert flags & 1 == 0  # not sampled; other bits tell how the id was made
        with owner.start_span("child") as child:
            assert not child.is_recording()
    parent = telemetry.extract([("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"), ("x-bin", b"\0")])
    with never.start_span("child", context=parent) as sampled:
        assert sampled.is_recording()
    assert set(finished(owner, "a" * 32)) == {"child"}
    assert trace.get_current_span(telemetry.extract([("traceparent", "rubbish")])).get_span_context().is_valid is False


def span(trace_id: str, name: str = "span", label: str = "") -> FinishedSpan:
    attributes = {telemetry.REQUEST_ID: label} if label else {}
    return FinishedSpan(trace_id, name, "", name, "service", 0, 1, attributes, "")


def test_store_is_bounded_and_forgets_whole_traces() -> None:
    store = SpanStore(max_spans=4, max_spans_per_trace=3)
    store.add(span("a", "1", label="first"))
    store.add(span("b", "1", label="second"))
    store.add(span("a", "2"))
    assert store.trace_of_request("first") == "a"
    store.add(span("c", "1", label="first"))  # a label that is used again means the newer request
    assert store.trace_of_request("first") == "c"
    store.add(span("d", "1"))  # one too many: b is the one untouched for longest
    assert len(store) == 4
    assert store.trace("b") == []
    assert store.trace_of_request("second") is None
    for number in range(9):
        store.add(span("e", str(number)))
    assert len(store.trace("e")) == 3
    assert len(store) <= 4
    assert store.trace_of_request("first") in ("c", None)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    async def Export(self, request, context):
        for resource in request.resource_spans:
            attributes = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(attributes["service.name"], found.name) for found in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_export_to_a_collector_under_each_services_name() -> None:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    services = [telemetry.setup(name, otlp_endpoint=f"127.0.0.1:{port}") for name in ("gateway", "prefill")]
    for service in services:
        with service.start_span("work"):
            pass
    await asyncio.gather(*(service.shutdown(timeout_seconds=20) for service in services))
    await server.stop(0)
    assert sorted(collector.spans) == [("gateway", "work"), ("prefill", "work")]


async def test_absent_collector_blocks_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, not listening: refused at once
        service = telemetry.setup("gateway", otlp_endpoint=f"127.0.0.1:{nobody.getsockname()[1]}")
        for _ in range(2_000):
            with service.start_span("work"):
                pass
        assert service.open_spans == 0
        async with asyncio.timeout(30):
            await service.shutdown(timeout_seconds=0.5)
    by_logger: dict[str, int] = {}
    for record in caplog.records:
        by_logger[record.name] = by_logger.get(record.name, 0) + 1
    assert all(count == 1 for count in by_logger.values())


def test_metric_names_people_already_chart(owner: Telemetry) -> None:
    metrics = owner.metrics
    metrics.time_to_first_token.labels(model="m", tenant="t").observe(0.05)
    metrics.time_per_output_token.labels(model="m", tenant="t").observe(0.02)
    metrics.request_duration.labels(model="m", tenant="t").observe(1.0)
    metrics.requests.labels(model="m", tenant="t", status="OK", reason="").inc()
    metrics.slo_missed.labels(model="m", tenant="t", blame="prefill.queue").inc()
    text = metrics.exposition().decode()
    for line in (
        'gen_ai_server_time_to_first_token_seconds_bucket{le="0.06",model="m",tenant="t"} 1.0',
        'gen_ai_server_time_to_first_token_seconds_bucket{le="0.04",model="m",tenant="t"} 0.0',
        'gen_ai_server_time_per_output_token_seconds_bucket{le="0.025",model="m",tenant="t"} 1.0',
        'gen_ai_server_request_duration_seconds_count{model="m",tenant="t"} 1.0',
        'epd_requests_total{model="m",reason="",status="OK",tenant="t"} 1.0',
        'epd_slo_missed_total{blame="prefill.queue",model="m",tenant="t"} 1.0',
    ):
        assert line in text
    assert telemetry.setup("second").metrics.registry is not metrics.registry
