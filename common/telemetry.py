"""Every span and attribute name of the mesh, each declared once, and the tracer's set-up (metric names: metrics.py)."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.errors import EpdError
from common.metrics import Metrics
from common.span_store import SpanStore

# Spans (design: one trace a request).
GATEWAY_GENERATE = "gateway.generate"
GATEWAY_ADMIT = "gateway.admit"
GATEWAY_PREPROCESS = "gateway.preprocess"
GATEWAY_ROUTE = "gateway.route"
GATEWAY_QUEUE = "gateway.queue"  # waiting for room at workers
GATEWAY_RETRY = "gateway.retry"
ENCODE_IMAGES = "encode.images"  # gateway's, all of a request's images
ENCODE_RUN = "encode.run"  # an encode worker's part of them
ENCODE_QUEUE = "encode.queue"
ENCODE_PREPROCESS = "encode.preprocess"  # decoding files, resizing, normalising
ENCODE_FORWARD = "encode.forward"
PREFILL_RUN = "prefill.run"
PREFILL_QUEUE = "prefill.queue"
CACHE_LOOKUP = "cache.lookup"
PREFILL_FORWARD = "prefill.forward"
DECODE_RUN = "decode.run"
DECODE_RESERVE = "decode.reserve"
TRANSFER_PULL = "transfer.pull"  # of KV by decode
EMBEDDING_PULL = "transfer.pull.embeddings"  # by prefill
DECODE_QUEUE = "decode.queue"
DECODE_FIRST_STEP = "decode.first_step"

# Hops of the accounting that are not spans.
ENCODE_RPC = "encode.rpc"
PREFILL_RPC = "prefill.rpc"  # gateway's time in the call less the worker's own
DECODE_RPC = "decode.rpc"
DECODE_STEPS = "decode.steps"
GATEWAY_EMIT = "gateway.emit"  # detokenizing and sending
UNATTRIBUTED = "unattributed"

# Attributes.
REQUEST_ID = "epd.request_id"
LEG = "epd.leg"
ATTEMPT = "epd.attempt"
TENANT = "epd.tenant"
WORKER = "epd.worker"
CACHED_TOKENS = "epd.cached_tokens"
IMAGES = "epd.images"
CACHED_IMAGES = "epd.cached_images"
IMAGE_TOKENS = "epd.image_tokens"
TRANSFER_BYTES = "epd.transfer.bytes"
TRANSFER_CHANNEL = "epd.transfer.channel"
SLO_TTFT_SECONDS = "epd.slo.ttft_seconds"
SLO_MET = "epd.slo.met"
SLO_BLAME = "epd.slo.blame"
ROUTE_CANDIDATES = "epd.route.candidates"
ROUTE_DECISION = "epd.route.decision"
ERROR_REASON = "epd.error.reason"
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_MAX_TOKENS = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE = "gen_ai.request.temperature"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

_REASON_CANCELLED = "CANCELLED"
_TELEMETRY_KEY = context_api.create_key("epd.telemetry")
_PROPAGATOR = TraceContextTextMapPropagator()
# One line a minute from each of these when the collector is away.
_NOISY_LOGGERS = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.sdk.trace.export",
)
Attributes = Mapping[str, Any]  # values: str, bool, int, float, bytes or sequences of them


class _OncePerMinute(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + 60
        return True


class _OpenSpans(SpanProcessor):
    """Knows the recording spans that have started and not ended."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        self.names[span.get_span_context().span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None:
            self.names.pop(span.context.span_id, None)


class Telemetry:
    """Tracer, span store and metrics of one service.

    Several may live in one process: nothing here is global, the OpenTelemetry context says which one is current.
    """

    def __init__(self, service_name: str, provider: TracerProvider, store: SpanStore | None) -> None:
        self.service_name = service_name
        self.store = store
        self.metrics = Metrics()
        self._provider = provider
        self._open = _OpenSpans()
        provider.add_span_processor(self._open)
        if store is not None:
            provider.add_span_processor(store)
        self._tracer = provider.get_tracer("epd")
        self.metrics.open_spans.set_function(lambda: len(self._open.names))

    @property
    def open_spans(self) -> int:
        return len(self._open.names)

    def open_span_names(self) -> list[str]:
        """Names of the spans that have not ended, for tests and status."""
        return sorted(self._open.names.values())

    def attach(self, context: Context | None = None) -> None:
        """Makes this the current telemetry for the rest of the running task or RPC, in the given trace context."""
        context_api.attach(context_api.set_value(_TELEMETRY_KEY, self, context))

    def begin_span(
        self,
        name: str,
        *,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        start_time_nanos: int | None = None,
    ) -> Span:
        """Starts a span that somebody ends elsewhere with `end_span`; it does not become current."""
        return self._tracer.start_span(
            name, context=context, kind=kind, attributes=attributes, start_time=start_time_nanos
        )

    @contextmanager
    def start_span(
        self,
        name: str,
        *,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> Iterator[Span]:
        """A span around a block of code, current inside it. `context` is the parent's; default: the current one."""
        span = self.begin_span(name, context=context, kind=kind, attributes=attributes)
        inner = context_api.set_value(_TELEMETRY_KEY, self, trace.set_span_in_context(span, context))
        token = context_api.attach(inner)
        error: BaseException | None = None
        try:
            yield span
        except BaseException as raised:
            error = raised
            raise
        finally:
            # An async generator may be closed in another context than it was started in.
            with suppress(ValueError):
                token.var.reset(token)
            end_span(span, error)

    def record_span(
        self,
        name: str,
        parent: Context | Span | None,
        start_seconds_ago: float,
        duration_seconds: float,
        attributes: Attributes | None = None,
    ) -> Span:
        """A finished span from durations measured elsewhere, such as the engine. parent None: the current span."""
        context = trace.set_span_in_context(parent) if isinstance(parent, Span) else parent
        start = time.time_ns() - round(start_seconds_ago * 1e9)
        span = self.begin_span(name, context=context, attributes=attributes, start_time_nanos=start)
        span.end(start + round(max(0.0, duration_seconds) * 1e9))
        return span

    async def flush(self, timeout_seconds: float = 10.0) -> None:
        """Exports the spans that have ended, for at most this long."""
        await asyncio.to_thread(self._provider.force_flush, round(timeout_seconds * 1000))

    def close(self, timeout_seconds: float = 3.0) -> None:
        """Exports what is left, for at most this long. Blocks: on an event loop use `shutdown`."""
        # A thread of its own, daemonic: with the collector away the exporter may take longer than we wait.
        thread = threading.Thread(target=self._provider.shutdown, name="telemetry-shutdown", daemon=True)
        thread.start()
        thread.join(timeout_seconds)

    async def shutdown(self, timeout_seconds: float = 3.0) -> None:
        """`close` for an event loop."""
        await asyncio.to_thread(self.close, timeout_seconds)


def setup(
    service_name: str,
    *,
    otlp_endpoint: str | None = None,
    sample_ratio: float = 1.0,
    store: SpanStore | None = None,
    instance_id: str = "",
) -> Telemetry:
    """Builds a service's telemetry and makes it the process's default where no context names another.

    sample_ratio: share of traces begun here that are recorded; a parent's decision always stands.
    otlp_endpoint: host:port or http(s) URL of a collector (OTLP over gRPC); None exports nothing.
    """
    global _default
    attributes = {"service.name": service_name} | ({"service.instance.id": instance_id} if instance_id else {})
    provider = TracerProvider(
        resource=Resource.create(attributes),
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        shutdown_on_exit=False,
    )
    telemetry = Telemetry(service_name, provider, store)
    if otlp_endpoint:
        provider.add_span_processor(_batch_exporter(otlp_endpoint))
    _default = telemetry
    return telemetry


def _batch_exporter(endpoint: str) -> SpanProcessor:
    # Imported here: a process without a collector does not pay for the exporter.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    for name in _NOISY_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _OncePerMinute) for known in logger.filters):
            logger.addFilter(_OncePerMinute())
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=2)
    return BatchSpanProcessor(exporter, max_queue_size=8192, schedule_delay_millis=500, max_export_batch_size=512)


_default: Telemetry | None = None


def current() -> Telemetry:
    """The running RPC's or task's telemetry, else the one set up last. One that records nothing if there is none."""
    global _default
    found = context_api.get_value(_TELEMETRY_KEY)
    if isinstance(found, Telemetry):
        return found
    if _default is None:
        _default = Telemetry("epd", TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False), None)
    return _default


def begin_span(
    name: str,
    *,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
) -> Span:
    """`Telemetry.begin_span` of the current telemetry."""
    return current().begin_span(name, context=context, kind=kind, attributes=attributes)


def start_span(
    name: str,
    *,
    context: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Attributes | None = None,
) -> AbstractContextManager[Span]:
    """`Telemetry.start_span` of the current telemetry."""
    return current().start_span(name, context=context, kind=kind, attributes=attributes)


def record_span(
    name: str,
    parent: Context | Span | None,
    start_seconds_ago: float,
    duration_seconds: float,
    attributes: Attributes | None = None,
) -> Span:
    """`Telemetry.record_span` of the current telemetry."""
    return current().record_span(name, parent, start_seconds_ago, duration_seconds, attributes)


def error_reason(error: BaseException) -> str:
    """What a span may say of an error: its reason, never its message."""
    if isinstance(error, EpdError):
        return error.reason
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return _REASON_CANCELLED
    return EpdError.reason


def fail_span(span: Span, reason: str) -> None:
    span.set_attribute(ERROR_REASON, reason)
    span.set_status(Status(StatusCode.ERROR, reason))


def end_span(span: Span, error: BaseException | None = None) -> None:
    """Ends a span, with the error's reason if there was one. Ending twice does nothing."""
    if error is not None and span.is_recording():
        fail_span(span, error_reason(error))
    if span.is_recording():
        span.end()


def inject(span: Span | None = None) -> list[tuple[str, str]]:
    """Metadata that carries the trace context of the span, or of the current one; empty outside a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span) if span is not None else None)
    return list(carrier.items())


def extract(metadata: Sequence[tuple[str, str | bytes]]) -> Context:
    """The trace context in a call's metadata; an empty one if there is none."""
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, Context())


def current_trace_ids() -> tuple[str, str]:
    """Trace and span id in hexadecimal, or two empty strings outside a trace."""
    found = trace.get_current_span().get_span_context()
    if not found.is_valid:
        return "", ""
    return trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id)
