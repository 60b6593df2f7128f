"""What the HTTP edge tells of the mesh: its models, health, metrics and traces."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import PermissionDenied
from common.metrics import CONTENT_TYPE
from common.telemetry import Telemetry
from epd.v1 import generation_pb2, trace_pb2
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.http_errors import json_response
from services.gateway.identity.identity import Identity
from services.gateway.service import MeshTraceService, list_models


class MeshEdge:
    def __init__(
        self, generator: Generator, fleet: Fleet, traces: MeshTraceService, tel: Telemetry, identity: Identity
    ) -> None:
        self._generator = generator
        self._fleet = fleet
        self._traces = traces
        self._telemetry = tel
        self._identity = identity

    def add_to(self, app: FastAPI) -> None:
        for path, handler in (
            ("/v1/models", self.models),
            ("/v1/models/{model:path}", self.model),
            ("/health", self.health),
            ("/live", self.live),
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/debug/trace/{trace}", self.trace),
        ):
            app.add_api_route(path, handler, methods=["GET"], response_model=None)

    async def models(self, request: Request) -> Response:
        self._identity.tenant_of(request.headers)
        found = [_model(model) for model in list_models(self._generator, self._fleet)]
        return json_response(200, {"object": "list", "data": found})

    async def model(self, request: Request) -> Response:
        self._identity.tenant_of(request.headers)
        name = request.path_params["model"]
        served = self._generator.preprocessor.names.find(name)
        for model in list_models(self._generator, self._fleet):
            if model.id == name:
                return json_response(200, _model(model))
        raise HTTPException(404, self._fleet.no_workers(served.model, served.adapter).message)

    async def health(self, request: Request) -> Response:
        """503 while draining."""
        draining = self._generator.admission.draining
        return json_response(503 if draining else 200, {"status": "draining" if draining else "ok"})

    async def live(self, request: Request) -> Response:
        return json_response(200, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when a request sent now would reach a worker."""
        ready = not self._generator.admission.draining and bool(list_models(self._generator, self._fleet))
        return json_response(200 if ready else 503, {"status": "ready" if ready else "not ready"})

    async def metrics(self, request: Request) -> Response:
        """Not where keys are needed: the labels name every tenant. There they have an address of their own."""
        if self._identity.required or self._generator.settings.metrics_bind:
            raise PermissionDenied("metrics are at an address of their own here, the gateway's metrics_bind")
        return Response(self._telemetry.metrics.exposition(), media_type=CONTENT_TYPE)

    async def trace(self, request: Request) -> Response:
        """Spans of the whole mesh, by trace id or by request id."""
        asked = request.path_params["trace"]
        is_trace = len(asked) == 32 and all(digit in "0123456789abcdef" for digit in asked)
        query = trace_pb2.GetTraceRequest(**{"trace_id" if is_trace else "request_id": asked})
        found = await self._traces.collect(query, request.headers)
        spans = [
            {field.name: getattr(span, field.name) for field in span.DESCRIPTOR.fields if field.name != "attributes"}
            | {"attributes": dict(span.attributes)}
            for span in found.spans
        ]
        return json_response(200, {"spans": spans})


def _model(model: generation_pb2.Model) -> dict[str, object]:
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "epd-mesh",
        "root": model.root,
        "parent": model.parent or None,
        "max_model_len": model.max_context_tokens,
        "dtype": model.dtype,
        "images": model.images,
    }
