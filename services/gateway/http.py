"""The OpenAI-compatible HTTP edge. It turns bodies into gRPC's own requests, so both edges go one way from there."""

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.metadata import version

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common import telemetry
from common.errors import EpdError, InvalidArgument, PermissionDenied
from common.metrics import CONTENT_TYPE
from common.rpc.errors import from_exception
from common.telemetry import Telemetry
from epd.v1 import generation_pb2, trace_pb2
from services.gateway import media, openapi
from services.gateway.adapters import AdapterControl
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.identity.identity import Identity
from services.gateway.lora_http import LoraEdge
from services.gateway.names import Served
from services.gateway.openai_format import Answer, ChatFormat, CompletionFormat, PromptScores, error_json
from services.gateway.openai_schema import ChatBody, CompletionBody, chat_request, completion_requests, parse
from services.gateway.openai_structured import named
from services.gateway.preprocess import MAX_LABEL
from services.gateway.request_id import RequestIds, label_of
from services.gateway.responses_format import ResponseAnswer
from services.gateway.responses_schema import ResponsesBody, responses_request
from services.gateway.service import MeshTraceService, list_models
from services.gateway.sse import DONE, ClientGone, EventStream, body_of, event, merge, while_connected
from services.gateway.tokenization import (
    DetokenizeBody,
    Tokenization,
    TokenizeBody,
    detokenize_request,
    tokenize_request,
    tokenized,
)

SESSION_ID = "x-session-id"
TIMING = "x-epd-timing"
_INTERNAL = EpdError("internal error; see the log of the gateway")
_CLIENT_GONE = 499
Responses = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]


class HttpEdge:
    def __init__(
        self,
        generator: Generator,
        fleet: Fleet,
        traces: MeshTraceService,
        tel: Telemetry,
        identity: Identity,
        adapters: AdapterControl,
    ) -> None:
        self._identity = identity
        self._generator = generator
        self._fleet = fleet
        self._traces = traces
        self._telemetry = tel
        self._max_body_bytes = generator.settings.media.message_bytes
        # Bodies are parsed by msgspec and answers written by it, so the schema is msgspec's, too.
        self._openapi = msgspec.json.encode(openapi.document(version("epd-mesh")))
        self._tokenization = Tokenization(generator, fleet)
        lora = LoraEdge(adapters, identity)
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        self.app = RequestIds(app)
        for path, handler in (
            ("/v1/chat/completions", self.chat),
            ("/v1/completions", self.completions),
            ("/v1/responses", self.responses),
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
            ("/v1/load_lora_adapter", lora.load),
            ("/v1/unload_lora_adapter", lora.unload),
        ):
            app.add_api_route(path, handler, methods=["POST"], response_model=None)
        for path, handler in (
            ("/openapi.json", self.openapi),
            ("/v1/models", self.models),
            ("/v1/models/{model:path}", self.model),
            ("/health", self.health),
            ("/live", self.live),
            ("/ready", self.ready),
            ("/metrics", self.metrics),
            ("/debug/trace/{trace}", self.trace),
        ):
            app.add_api_route(path, handler, methods=["GET"], response_model=None)
        app.add_exception_handler(HTTPException, _on_http)
        app.add_exception_handler(EpdError, _on_epd)
        app.add_exception_handler(ClientDisconnect, _on_gone)
        app.add_exception_handler(ClientGone, _on_gone)
        app.add_exception_handler(Exception, _on_any)

    async def chat(self, request: Request) -> Response:
        tenant = self._identity.tenant_of(request.headers)  # before the body is read
        body = parse(await body_of(request, self._max_body_bytes), ChatBody)
        return await self._answer(request, tenant, body, [chat_request(body)])

    async def completions(self, request: Request) -> Response:
        tenant = self._identity.tenant_of(request.headers)
        body = parse(await body_of(request, self._max_body_bytes), CompletionBody)
        return await self._answer(request, tenant, body, completion_requests(body))

    async def _answer(
        self,
        request: Request,
        tenant: str,
        body: ChatBody | CompletionBody,
        asked: list[generation_pb2.GenerateRequest],
    ) -> Response:
        try:
            return await self._answered(request, tenant, body, asked)
        except EpdError as error:
            raise named(error, body) from None

    async def _answered(
        self,
        request: Request,
        tenant: str,
        body: ChatBody | CompletionBody,
        asked: list[generation_pb2.GenerateRequest],
    ) -> Response:
        label, served, responses = self._start(request, tenant, asked)
        tokenizer = self._generator.preprocessor.tokenizers[served.model]
        n, top = body.n or 1, body.prompt_logprobs
        chat = isinstance(body, ChatBody)
        answer = Answer(
            ChatFormat(tokenizer) if isinstance(body, ChatBody) else CompletionFormat(tokenizer, top=body.logprobs),
            label,
            served.name,
            logprobs=bool(body.logprobs) if chat else body.logprobs is not None,
            n=n,
            echo=not isinstance(body, ChatBody) and bool(body.echo),
            scores=PromptScores(tokenizer, top) if top is not None else None,
        )
        timing = request.headers.get(TIMING) == "1"
        if not body.stream:
            await while_connected(request.receive, _collect(responses, answer, n))
            return _json(200, answer.whole(timing=timing))
        # Until the first message an error has a status of its own; from then on only an event can carry it.
        first = await while_connected(request.receive, anext(responses, None))
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(_events(first, responses, answer, n, usage=usage, timing=timing))

    def _start(
        self, request: Request, tenant: str, asked: list[generation_pb2.GenerateRequest]
    ) -> tuple[str, Served, Responses]:
        """(label, what is asked for, answers): the requests begin when the answers are read."""
        label = label_of(request.scope)
        self._telemetry.attach(telemetry.extract(list(request.headers.items())))
        images = any(media.sources(one) for one in asked)
        served = self._generator.preprocessor.names.find(asked[0].model, images=images)
        session = request.headers.get(SESSION_ID, "")
        if len(session) > MAX_LABEL:
            raise InvalidArgument(f"{SESSION_ID} must have at most {MAX_LABEL} characters", field=SESSION_ID)
        for i, one in enumerate(asked):
            one.request_id = label if len(asked) == 1 else f"{label}-{i}"
            one.session_id = one.session_id or session
        return (
            label,
            served,
            merge([self._generator.generate(one, tenant=tenant, timeout_seconds=None) for one in asked]),
        )

    async def responses(self, request: Request) -> Response:
        tenant = self._identity.tenant_of(request.headers)
        body = parse(await body_of(request, self._max_body_bytes), ResponsesBody)
        label, served, responses = self._start(request, tenant, [responses_request(body)])
        answer = ResponseAnswer(body, label, served.name, self._generator.preprocessor.tokenizers[served.model])
        if not body.stream:
            await while_connected(request.receive, _take_all(responses, answer))
            return _json(200, answer.whole())
        first = await while_connected(request.receive, anext(responses, None))
        return EventStream(_response_events(first, responses, answer))

    async def tokenize(self, request: Request) -> Response:
        tenant = self._identity.tenant_of(request.headers)
        body = parse(await body_of(request, self._max_body_bytes), TokenizeBody)
        found = await self._tokenization.tokenize(tokenize_request(body), tenant)
        return _json(200, tokenized(found, strings=bool(body.return_token_strs)))

    async def detokenize(self, request: Request) -> Response:
        tenant = self._identity.tenant_of(request.headers)
        body = parse(await body_of(request, self._max_body_bytes), DetokenizeBody)
        return _json(200, {"prompt": (await self._tokenization.detokenize(detokenize_request(body), tenant)).text})

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def models(self, request: Request) -> Response:
        self._identity.tenant_of(request.headers)
        found = [_model(model) for model in list_models(self._generator, self._fleet)]
        return _json(200, {"object": "list", "data": found})

    async def model(self, request: Request) -> Response:
        self._identity.tenant_of(request.headers)
        name = request.path_params["model"]
        served = self._generator.preprocessor.names.find(name)
        for model in list_models(self._generator, self._fleet):
            if model.id == name:
                return _json(200, _model(model))
        raise HTTPException(404, self._fleet.no_workers(served.model, served.adapter).message)

    async def health(self, request: Request) -> Response:
        """503 while draining."""
        draining = self._generator.admission.draining
        return _json(503 if draining else 200, {"status": "draining" if draining else "ok"})

    async def live(self, request: Request) -> Response:
        return _json(200, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """200 when a request sent now would reach a worker."""
        ready = not self._generator.admission.draining and bool(list_models(self._generator, self._fleet))
        return _json(200 if ready else 503, {"status": "ready" if ready else "not ready"})

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
        return _json(200, {"spans": spans})


async def _collect(responses: Responses, answer: Answer, n: int) -> None:
    async with aclosing(responses):
        async for position, response in responses:
            answer.add(response, position * n)


async def _events(
    first: tuple[int, generation_pb2.GenerateResponse] | None,
    responses: Responses,
    answer: Answer,
    n: int,
    *,
    usage: bool,
    timing: bool,
) -> AsyncGenerator[bytes, None]:
    """With usage every chunk has the field, null but in the last, as OpenAI has it."""
    empty = {"usage": None} if usage else {}
    async with aclosing(responses):
        try:
            if first is not None:
                for chunk in answer.chunks(first[1], first[0] * n):
                    yield event(chunk | empty)
                async for position, response in responses:
                    for chunk in answer.chunks(response, position * n):
                        yield event(chunk | empty)
            if usage or timing:
                yield event(answer.last_chunk(usage=usage, timing=timing))
            yield DONE
        except Exception as error:
            # The status is long sent: one event tells, and no [DONE] follows.
            yield event(error_json(from_exception(error) or _INTERNAL))


async def _take_all(responses: Responses, answer: ResponseAnswer) -> None:
    async with aclosing(responses):
        async for _, response in responses:
            answer.take(response)


async def _response_events(
    first: tuple[int, generation_pb2.GenerateResponse] | None, responses: Responses, answer: ResponseAnswer
) -> AsyncGenerator[bytes, None]:
    async with aclosing(responses):
        try:
            for told in answer.opening():
                yield event(told, told["type"])
            if first is not None:
                for told in answer.delta(first[1]):
                    yield event(told, told["type"])
                async for _, response in responses:
                    for told in answer.delta(response):
                        yield event(told, told["type"])
            for told in answer.closing():
                yield event(told, told["type"])
        except Exception as error:
            told = answer.failure(error)
            yield event(told, told["type"])


def _json(status: int, content: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


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


def _refusal(error: EpdError) -> Response:
    headers = {}
    if error.http in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds or 1)))
    if error.http == 401:
        headers["www-authenticate"] = "Bearer"
    return _json(error.http, error_json(error), headers)


async def _on_epd(request: Request, error: Exception) -> Response:
    assert isinstance(error, EpdError)
    return _refusal(error)


async def _on_gone(request: Request, error: Exception) -> Response:
    """In the middle of its body, or while it waited. Nobody reads this."""
    return Response(status_code=_CLIENT_GONE)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}
    return _json(error.status_code, {"error": body}, dict(error.headers or {}))


async def _on_any(request: Request, error: Exception) -> Response:
    return _refusal(from_exception(error) or _INTERNAL)
