"""The public gRPC services: GenerationService, and TraceService for the whole mesh."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

import grpc

from common import telemetry
from common.errors import EpdError, UnknownId
from common.policies.encoding import ENCODE
from common.policies.routing import DECODE, PREFILL
from common.rpc import deadline
from common.rpc.trace_service import find_trace_id, to_proto
from common.span_store import SpanStore
from epd.v1 import generation_pb2, generation_pb2_grpc, trace_pb2, trace_pb2_grpc
from services.gateway.adapters import AdapterControl
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.identity.identity import Identity
from services.gateway.openai_format import ChatFormat, CompletionFormat
from services.gateway.responses_format import PREFIX
from services.gateway.tokenization import Tokenization

GENERATION_SERVICE = "epd.v1.GenerationService"
_TRACE_SECONDS = 2.0
_SHOWN_PREFIXES = (f"{ChatFormat.prefix}-", f"{CompletionFormat.prefix}-", f"{PREFIX}_", "req-")


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, generator: Generator, fleet: Fleet, identity: Identity, adapters: AdapterControl) -> None:
        self._identity = identity
        self._adapters = adapters
        self._generator = generator
        self._fleet = fleet
        self._tokenization = Tokenization(generator, fleet)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        tenant = self._identity.tenant_of(_metadata(context))
        responses = self._generator.generate(request, tenant=tenant, timeout_seconds=context.time_remaining())
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.ListModelsResponse:
        self._identity.tenant_of(_metadata(context))
        return generation_pb2.ListModelsResponse(
            models=list_models(self._generator, self._fleet), away=_away(self._fleet)
        )

    async def Tokenize(
        self, request: generation_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.TokenizeResponse:
        return await self._tokenization.tokenize(request, self._identity.tenant_of(_metadata(context)))

    async def LoadAdapter(
        self, request: generation_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.LoadAdapterResponse:
        self._identity.check_admin(_metadata(context))
        return await self._adapters.load(request)

    async def UnloadAdapter(
        self, request: generation_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.UnloadAdapterResponse:
        self._identity.check_admin(_metadata(context))
        await self._adapters.unload(request.name)
        return generation_pb2.UnloadAdapterResponse()

    async def Detokenize(
        self, request: generation_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> generation_pb2.DetokenizeResponse:
        return await self._tokenization.detokenize(request, self._identity.tenant_of(_metadata(context)))


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
                    root=model,
                )
            )
    listed = {model.id: model for model in found}
    names = generator.preprocessor.names
    for alias, model in sorted(names.aliases.items()):
        if model in listed:
            found.append(_like(listed[model], alias))
    for name, adapter in names.adapters().items():
        if (base := listed.get(adapter.model)) is not None and (counts := fleet.roles_with(adapter)):
            found.append(_like(base, name))
            found[-1].parent = base.id
            found[-1].prefill_workers, found[-1].decode_workers = counts
    return found


def _like(model: generation_pb2.Model, name: str) -> generation_pb2.Model:
    made = generation_pb2.Model()
    made.CopyFrom(model)
    made.id = name
    return made


def _away(fleet: Fleet) -> list[generation_pb2.AwayWorker]:
    found = [
        generation_pb2.AwayWorker(worker_id=worker.worker_id, why=worker.away) for worker in fleet.all() if worker.away
    ]
    found += [
        generation_pb2.AwayWorker(worker_id=puller.worker_id, why=f"circuit {state}", owner=owner.worker_id)
        for owner, puller, state in fleet.pairs.open()
    ]
    return found


class MeshTraceService(trace_pb2_grpc.TraceServiceServicer):
    """This gateway's spans and those of all workers. Where keys are needed, a tenant sees what was done for it."""

    def __init__(self, store: SpanStore, fleet: Fleet, identity: Identity) -> None:
        self._identity = identity
        self._store = store
        self._fleet = fleet

    async def GetTrace(
        self, request: trace_pb2.GetTraceRequest, context: grpc.aio.ServicerContext
    ) -> trace_pb2.GetTraceResponse:
        return await self.collect(request, _metadata(context))

    async def collect(
        self, request: trace_pb2.GetTraceRequest, headers: Mapping[str, str]
    ) -> trace_pb2.GetTraceResponse:
        """Spans by start. A worker that does not answer is left out. Raises UnknownId, InvalidArgument and what
        Identity.tenant_of does.

        A request is known by its own id and by the one its answer showed, `chatcmpl-…` or the like.
        """
        tenant = self._identity.tenant_of(headers)
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
            elif answer is not None and not isinstance(answer, EpdError | grpc.aio.AioRpcError):  # None: not to be read
                raise answer
        if self._identity.required:
            spans = done_for(tenant, spans)
        if not spans:  # another tenant's are as good as none, and the answer is the same
            if self._identity.required and request.WhichOneof("id") == "request_id":
                raise UnknownId("no request with this id is kept here", field="request_id")
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


def done_for(tenant: str, spans: Mapping[str, trace_pb2.Span]) -> dict[str, trace_pb2.Span]:
    """Those of a trace, by their ids, that belong to a tenant: the nearest span above that names one names it.

    Not the trace as a whole: its id, and what its first span hangs on, are the client's to choose.
    """
    owners: dict[str, str] = {"": ""}
    for first in spans:
        path = []
        at = first
        while at not in owners:
            owners[at] = ""  # should the parents go round in a circle
            path.append(at)
            span = spans.get(at)
            if span is None:
                break
            if named := span.attributes.get(telemetry.TENANT, ""):
                owners[at] = named
                break
            at = span.parent_span_id
        owner = owners.get(at, "")
        owners.update(dict.fromkeys(path, owner))
    return {span_id: span for span_id, span in spans.items() if owners[span_id] == tenant}


def _metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return dict(context.invocation_metadata() or ())


def _start(span: trace_pb2.Span) -> int:
    return span.start_unix_nanos
