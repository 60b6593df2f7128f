"""The OpenAI-compatible HTTP edge. It turns bodies into gRPC's own requests, so both edges go one way from there."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.metadata import version

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from common import telemetry
from common.errors import EpdError, InvalidArgument
from common.rpc.errors import from_exception
from common.telemetry import Telemetry
from epd.v1 import generation_pb2
from services.gateway import media, openapi
from services.gateway.adapters import AdapterControl
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.http_errors import INTERNAL, answer_errors, json_response
from services.gateway.http_mesh import MeshEdge
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
from services.gateway.service import MeshTraceService
from services.gateway.sse import DONE, EventStream, body_of, event, merge, while_connected
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
        app.add_api_route("/openapi.json", self.openapi, methods=["GET"], response_model=None)
        MeshEdge(generator, fleet, traces, tel, identity).add_to(app)
        answer_errors(app)

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
            return json_response(200, answer.whole(timing=timing))
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
            return json_response(200, answer.whole())
        first = await while_connected(request.receive, anext(responses, None))
        return EventStream(_response_events(first, responses, answer))

    async def tokenize(self, request: Request) -> Response:
        tenant = self._identity.tenant_of(request.headers)
        body = parse(await body_of(request, self._max_body_bytes), TokenizeBody)
        found = await self._tokenization.tokenize(tokenize_request(body), tenant)
        return json_response(200, tokenized(found, strings=bool(body.return_token_strs)))

    async def detokenize(self, request: Request) -> Response:
        tenant = self._identity.tenant_of(request.headers)
        body = parse(await body_of(request, self._max_body_bytes), DetokenizeBody)
        return json_response(
            200, {"prompt": (await self._tokenization.detokenize(detokenize_request(body), tenant)).text}
        )

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")


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
            yield event(error_json(from_exception(error) or INTERNAL))


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
