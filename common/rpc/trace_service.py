"""Serves a process's recent spans."""

import re
from typing import Any

from common.errors import InvalidArgument, UnknownId
from common.span_store import FinishedSpan, SpanStore
from epd.v1 import trace_pb2, trace_pb2_grpc

SERVICE = "epd.v1.TraceService"
_TRACE_ID = re.compile("[0-9a-f]{32}")


class TraceService(trace_pb2_grpc.TraceServiceServicer):
    """This process's own spans; a gateway, which asks the others too, has a service of its own."""

    def __init__(self, store: SpanStore) -> None:
        self._store = store

    async def GetTrace(self, request: trace_pb2.GetTraceRequest, context: Any) -> trace_pb2.GetTraceResponse:
        """Raises InvalidArgument for a malformed id, UnknownId when nothing is known (any more)."""
        spans = self._store.trace(find_trace_id(self._store, request))
        if not spans:
            raise UnknownId("no spans of this trace are kept here")
        return trace_pb2.GetTraceResponse(spans=map(to_proto, spans))


def find_trace_id(store: SpanStore, request: trace_pb2.GetTraceRequest) -> str:
    """The trace a request is about; same errors as GetTrace."""
    if request.WhichOneof("id") == "request_id":
        found = store.trace_of_request(request.request_id)
        if found is None:
            raise UnknownId("no request with this id is kept here", field="request_id")
        return found
    if not _TRACE_ID.fullmatch(request.trace_id):
        raise InvalidArgument("trace_id must be 32 lower-case hexadecimal digits", field="trace_id")
    return request.trace_id


def to_proto(span: FinishedSpan) -> trace_pb2.Span:
    return trace_pb2.Span(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_span_id,
        name=span.name,
        service=span.service,
        start_unix_nanos=span.start_unix_nanos,
        end_unix_nanos=span.end_unix_nanos,
        attributes=span.attributes,
        error=span.error,
    )
