"""The public gRPC services: GenerationService, and TraceService for the whole mesh."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from common.errors import EpdError, InvalidArgument, UnknownId
from common.policies.encoding import ENCODE
from common.policies.routing import DECODE, PREFILL
from common.rpc import deadline
from common.rpc.trace_service import find_trace_id, to_proto
from common.span_store import SpanStore
from epd.v1 import generation_pb2, generation_pb2_grpc, trace_pb2, trace_pb2_grpc
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.openai_format import ChatFormat, CompletionFormat
from services.gateway.settings import DEFAULT_TENANT

GENERATION_SERVICE = "epd.v1.GenerationService"
TENANT_KEY = "x-epd-tenant"
MAX_TENANT_CHARACTERS = 64
_TRACE_SECONDS = 2.0
_SHOWN_PREFIXES = (f"{ChatFormat.prefix}-", f"{CompletionFormat.prefix}-", "req-")


def check_tenant(tenant: str | None) -> str:
    """Raises InvalidArgument for what cannot be a tenant's name."""
    if not tenant:
        return DEFAULT_TENANT
    if len(tenant) > MAX_TENANT_CHARACTERS or not tenant.isprintable():
        raise InvalidArgument(
            f"{TENANT_KEY} must be at most {MAX_TENANT_CHARACTERS} printable characters", field=TENANT_KEY
        )
    return tenant


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, generator: Generator, fleet: Fleet) -> None:
        self._generator = generator
        self._fleet = fleet

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        metadata = dict(context.invocation_metadata() or ())
        tenant = check_tenant(metadata.get(TENANT_KEY))
        responses = self._generator.generate(request, tenant=tenant, timeout_seconds=context.time_remaining())
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse(models=list_models(self._generator, self._fleet))


def list_models(generator: Generator, fleet: Fleet) -> list[generation_pb2.Model]:
    """Only models that a request sent now would reach."""
    found = []
    for model, roles in sorted(fleet.model_roles().items()):
        if model in generator.preprocessor.tokenizers:
            records = roles[PREFILL] + roles[DECODE]
            found.append(
                generation_pb2.Model(
                    id=model,
                    max_context_tokens=max(record.max_context for record in records),
                    dtype=records[0].layout.dtype,
                    prefill_workers=len(roles[PREFILL]),
                    decode_workers=len(roles[DECODE]),
                    encode_workers=len(roles[ENCODE]),
                    images=model in generator.preprocessor.specs,
                )
            )
    return found


class MeshTraceService(trace_pb2_grpc.TraceServiceServicer):
    """This gateway's spans and those of all workers."""

    def __init__(self, store: SpanStore, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet

    async def GetTrace(
        self, request: trace_pb2.GetTraceRequest, context: grpc.aio.ServicerContext
    ) -> trace_pb2.GetTraceResponse:
        return await self.collect(request)

    async def collect(self, request: trace_pb2.GetTraceRequest) -> trace_pb2.GetTraceResponse:
        """Spans by start. A worker that does not answer is left out. Raises UnknownId, InvalidArgument.

        A request is known by its own id and by the one its answer showed, `chatcmpl-…` or the like.
        """
        trace_id = self._find(request)
        asked = trace_pb2.GetTraceRequest(trace_id=trace_id)
        workers = [worker for worker in self._fleet.all() if worker.up]
        with deadline.detached():
            calls = [worker.trace.GetTrace(asked, timeout=_TRACE_SECONDS) for worker in workers]
            answers = await asyncio.gather(*calls, return_exceptions=True)
        spans: dict[str, trace_pb2.Span] = {}
        for own in self._store.trace(trace_id):
            spans[own.span_id] = to_proto(own)
        for answer in answers:
            if isinstance(answer, trace_pb2.GetTraceResponse):
                spans.update((span.span_id, span) for span in answer.spans)
            elif not isinstance(answer, EpdError | grpc.aio.AioRpcError):
                raise answer
        if not spans:
            raise UnknownId("no spans of this trace are kept in the mesh")
        ordered: list[trace_pb2.Span] = sorted(spans.values(), key=_start)
        return trace_pb2.GetTraceResponse(spans=ordered)

    def _find(self, request: trace_pb2.GetTraceRequest) -> str:
        shown = request.request_id
        plain = [shown.removeprefix(prefix) for prefix in _SHOWN_PREFIXES if shown.startswith(prefix)]
        # The exact id first, since clients may choose ids that look so. Of several prompts the first one's.
        for label in (shown, *plain, *(f"{label}-0" for label in plain)):
            if label and (found := self._store.trace_of_request(label)):
                return found
        return find_trace_id(self._store, request)


def _start(span: trace_pb2.Span) -> int:
    return span.start_unix_nanos
