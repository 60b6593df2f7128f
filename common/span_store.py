"""Recent finished spans of this process, for looking at a request without a trace backend."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

REQUEST_ID = "epd.request_id"  # as in common.telemetry, which imports this file


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """Ids in hexadecimal, parent_span_id empty at a root; error is a reason, empty when fine."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    service: str
    start_unix_nanos: int
    end_unix_nanos: int
    attributes: dict[str, str]
    error: str


class SpanStore(SpanProcessor):
    """Keeps the last `max_spans` spans; whole traces are forgotten, the one untouched for longest first."""

    def __init__(self, max_spans: int = 20_000, max_spans_per_trace: int = 1_000) -> None:
        self._max_spans = max_spans
        self._max_per_trace = max_spans_per_trace
        self._traces: OrderedDict[str, list[FinishedSpan]] = OrderedDict()
        self._trace_of_request: dict[str, str] = {}
        self._requests_of_trace: dict[str, list[str]] = {}
        self._count = 0
        self._lock = threading.Lock()  # spans may end in any thread

    def __len__(self) -> int:
        return self._count

    def on_end(self, span: ReadableSpan) -> None:
        self.add(_finished(span))

    def add(self, span: FinishedSpan) -> None:
        with self._lock:
            spans = self._traces.setdefault(span.trace_id, [])
            self._traces.move_to_end(span.trace_id)
            if len(spans) >= self._max_per_trace:
                return
            spans.append(span)
            self._count += 1
            label = span.attributes.get(REQUEST_ID)
            if label and self._trace_of_request.get(label) != span.trace_id:
                self._trace_of_request[label] = span.trace_id
                self._requests_of_trace.setdefault(span.trace_id, []).append(label)
            while self._count > self._max_spans and len(self._traces) > 1:
                self._forget_oldest()

    def _forget_oldest(self) -> None:
        trace_id, spans = self._traces.popitem(last=False)
        self._count -= len(spans)
        for label in self._requests_of_trace.pop(trace_id, ()):
            if self._trace_of_request.get(label) == trace_id:
                del self._trace_of_request[label]

    def trace(self, trace_id: str) -> list[FinishedSpan]:
        """Spans of a trace by start; empty if unknown."""
        with self._lock:
            return sorted(self._traces.get(trace_id, ()), key=lambda span: span.start_unix_nanos)

    def trace_of_request(self, request_id: str) -> str | None:
        """Trace id of the newest request with this label (attribute epd.request_id)."""
        with self._lock:
            return self._trace_of_request.get(request_id)


def _finished(span: ReadableSpan) -> FinishedSpan:
    assert span.context is not None
    return FinishedSpan(
        trace_id=format_trace_id(span.context.trace_id),
        span_id=format_span_id(span.context.span_id),
        parent_span_id=format_span_id(span.parent.span_id) if span.parent else "",
        name=span.name,
        service=str(span.resource.attributes.get("service.name", "")),
        start_unix_nanos=span.start_time or 0,
        end_unix_nanos=span.end_time or 0,
        attributes={key: str(value) for key, value in (span.attributes or {}).items()},
        error=(span.status.description or "INTERNAL") if span.status.status_code is StatusCode.ERROR else "",
    )
