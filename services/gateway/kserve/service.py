"""KServe v2 beside the native service: the same generator, limits, accounting and traces behind another protocol."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from importlib.metadata import version

import grpc

from common.errors import EpdError, InvalidArgument, ModelNotFound
from common.rpc.errors import from_exception, to_metadata
from epd.inference import inference_pb2 as pb
from epd.inference import inference_pb2_grpc
from epd.v1 import generation_pb2
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.identity.identity import Identity
from services.gateway.kserve import answer
from services.gateway.kserve.request import OUTPUTS, STREAMING, VERSION, Asked, check_version, input_tensors, read
from services.gateway.names import Served
from services.gateway.service import list_models

INFERENCE_SERVICE = "inference.GRPCInferenceService"
STRICT_ERRORS = "triton_grpc_error"
MAX_AT_ONCE = 64  # requests of one stream under way; more wait in the transport
_EXTENSIONS = ("model_stream_infer", "parameters")


class InferenceService(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, generator: Generator, fleet: Fleet, identity: Identity) -> None:
        self._generator = generator
        self._fleet = fleet
        self._identity = identity

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=not self._draining and bool(list_models(self._generator, self._fleet)))

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelReadyResponse:
        self._identity.tenant_of(_metadata(context))
        name = self._known(request.name, request.version).name
        return pb.ModelReadyResponse(ready=not self._draining and self._model(name) is not None)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerMetadataResponse:
        self._identity.tenant_of(_metadata(context))
        return pb.ServerMetadataResponse(name="epd-mesh", version=version("epd-mesh"), extensions=_EXTENSIONS)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelMetadataResponse:
        self._identity.tenant_of(_metadata(context))
        served = self._known(request.name, request.version)
        made = pb.ModelMetadataResponse(name=served.name, versions=[VERSION], platform="epd-mesh")
        takes = input_tensors(images=served.model in self._generator.preprocessor.specs)
        for tensors, added in ((takes, made.inputs), (OUTPUTS, made.outputs)):
            for tensor, (datatype, size) in tensors.items():
                added.add(name=tensor, datatype=datatype, shape=[size])
        return made

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelInferResponse:
        tenant = self._identity.tenant_of(_metadata(context))
        asked = read(request)
        if asked.streaming:
            raise InvalidArgument("ModelInfer answers once; ModelStreamInfer streams", field=STREAMING[0])
        return await answer.whole(asked, self._generate(asked, tenant, context.time_remaining()))

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        headers = _metadata(context)
        tenant = self._identity.tenant_of(headers)
        strict = headers.get(STRICT_ERRORS, "").lower() == "true"
        answers: asyncio.Queue[pb.ModelStreamInferResponse | Exception | None] = asyncio.Queue(maxsize=1)
        room = asyncio.Semaphore(MAX_AT_ONCE)

        async def one(request: pb.ModelInferRequest) -> None:
            try:
                async with aclosing(self._stream(request, tenant, context.time_remaining())) as found:
                    async for response in found:
                        await answers.put(pb.ModelStreamInferResponse(infer_response=response))
            except Exception as error:
                told = from_exception(error)
                if strict or told is None:
                    raise
                await answers.put(_failed(request, told))
            finally:
                room.release()

        async def all_of_them() -> None:
            end: Exception | None = None
            try:
                async with asyncio.TaskGroup() as group:
                    async for request in requests:
                        await room.acquire()
                        group.create_task(one(request))
            except ExceptionGroup as failed:
                end = failed.exceptions[0]
            await answers.put(end)

        running = asyncio.create_task(all_of_them(), name="ModelStreamInfer")
        try:
            while (found := await answers.get()) is not None:
                if isinstance(found, Exception):
                    raise found
                yield found
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _stream(
        self, request: pb.ModelInferRequest, tenant: str, seconds: float | None
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        asked = read(request)
        responses = self._generate(asked, tenant, seconds)
        if not asked.streaming:
            made = await answer.whole(asked, responses)
            made.parameters[answer.FINAL].bool_param = True
            yield made
            return
        async with aclosing(answer.pieces(asked, responses)) as found:
            async for piece in found:
                yield piece

    def _generate(
        self, asked: Asked, tenant: str, seconds: float | None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        left = [each for each in (asked.timeout_seconds, seconds) if each is not None]
        return self._generator.generate(asked.request, tenant=tenant, timeout_seconds=min(left, default=None))

    @property
    def _draining(self) -> bool:
        return self._generator.admission.draining

    def _known(self, name: str, version: str) -> Served:
        """Raises ModelNotFound."""
        if not name:
            raise ModelNotFound("a model's name is needed", field="name")
        check_version(version)
        return self._generator.preprocessor.names.find(name)

    def _model(self, name: str) -> generation_pb2.Model | None:
        return next((model for model in list_models(self._generator, self._fleet) if model.id == name), None)


def _failed(request: pb.ModelInferRequest, error: EpdError) -> pb.ModelStreamInferResponse:
    """What would have been the status' message and trailing metadata."""
    made = pb.ModelStreamInferResponse(error_message=error.message)
    made.infer_response.id, made.infer_response.model_name = request.id, request.model_name
    made.infer_response.parameters["status"].string_param = error.status.name
    for name, value in to_metadata(error):
        made.infer_response.parameters[name].string_param = value
    made.infer_response.parameters[answer.FINAL].bool_param = True
    return made


def _metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return dict(context.invocation_metadata() or ())
