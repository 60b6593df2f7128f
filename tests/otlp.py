"""A collector for tests: OTLP's own service on a real gRPC server, keeping what it is sent."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

ROOT = ""


@dataclass(frozen=True)
class Received:
    """One exported span; ids in hexadecimal."""

    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    service: str
    attributes: dict[str, Any]
    start: int
    end: int
    failed: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """bind: host:port to listen on; port 0 is any free one."""

    def __init__(self, bind: str = "127.0.0.1:0") -> None:
        self.spans: list[Received] = []
        self.bind = bind
        self.address = ""

    async def __aenter__(self) -> "Collector":
        self._server = grpc.aio.server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"{self.bind.rpartition(':')[0]}:{self._server.add_insecure_port(self.bind)}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Received(
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_span_id=span.parent_span_id.hex(),
                            name=span.name,
                            service=service,
                            attributes=_attributes(span.attributes),
                            start=span.start_time_unix_nano,
                            end=span.end_time_unix_nano,
                            failed=span.status.code == span.status.STATUS_CODE_ERROR,
                        )
                    )
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Received]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def edges(spans: list[Received]) -> Counter[tuple[str, str]]:
    """(parent's name, name) of every span. The parent's name is empty when no span of the list is it."""
    names = {span.span_id: span.name for span in spans}
    return Counter((names.get(span.parent_span_id, ROOT), span.name) for span in spans)


async def exported(mesh: Any) -> None:
    """Returns once every span of a mesh has ended and was sent to its collector. Fails with those still open."""
    telemetries = [mesh.gateway.telemetry, *(worker.telemetry for worker in mesh.workers)]
    try:
        async with asyncio.timeout(20):
            while any(each.open_spans for each in telemetries):
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"still open: {[each.open_span_names() for each in telemetries]}") from None
    for each in telemetries:
        await each.flush()
