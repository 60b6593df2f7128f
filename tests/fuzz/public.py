"""The gateway's gRPC: generation, natively and by KServe's protocol, traces, health, reflection."""

import base64
from random import Random
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from epd.inference import inference_pb2
from epd.v1 import generation_pb2, trace_pb2, types_pb2
from tests.fuzz import messages, values
from tests.fuzz.calls import CALL_SECONDS, call
from tests.fuzz.oracle import check_rpc, check_words
from tests.fuzz.surface import Surface
from tests.fuzz.world import World, picture
from tests.kserve import infer
from tests.mesh import MODEL

_NOT_FOUND = (grpc.StatusCode.NOT_FOUND, "")  # health has no reasons
_MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


def _sampling(rng: Random) -> types_pb2.SamplingParams:
    made = types_pb2.SamplingParams(temperature=rng.choice((0.0, 0.8)), max_tokens=rng.choice((1, 2, 5)), seed=3)
    if rng.random() < 0.4:
        made.top_logprobs = 2
        made.top_k, made.top_p, made.min_p = 20, 0.9, 0.05
        made.repetition_penalty, made.presence_penalty, made.frequency_penalty = 1.1, 0.5, 0.5
        made.logit_bias[5] = 2.0
        made.stop_token_ids.extend([4, 9])
        made.min_tokens = 1
    if rng.random() < 0.2:
        made.prompt_logprobs = rng.choice((0, 3))
    return made


def generate(rng: Random) -> generation_pb2.GenerateRequest:
    """A valid one, of any form."""
    made = generation_pb2.GenerateRequest(model=rng.choice(("", MODEL)), stop=["é~"], n=rng.choice((1, 1, 2, 3)))
    made.sampling.CopyFrom(_sampling(rng))
    made.echo, made.include_stop_in_output = rng.random() < 0.2, rng.random() < 0.2
    file = picture(kind=rng.choice(("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")))
    match rng.randrange(4):
        case 0:
            made.text = "the quick brown é fox"
        case 1:
            made.token_ids.ids.extend([37, 38, 39] * 5)
        case 2:
            made.text = f"{_MARKER}what is it?"
            made.images.add().data = file
        case _:
            content = made.chat.messages.add(role="user").content
            content.add(text="look é")
            content.add().image.url = "data:image/png;base64," + base64.b64encode(file).decode()
    return made


def inference(rng: Random) -> tuple[str, list[Any]]:
    """A method of KServe's service and valid messages for it."""
    if rng.random() < 0.15:
        name = rng.choice(("ModelReady", "ModelMetadata", "ServerReady", "ServerLive", "ServerMetadata"))
        asked = getattr(inference_pb2, f"{name}Request")()
        if name.startswith("Model"):
            asked.name = MODEL
        return f"/inference.GRPCInferenceService/{name}", [asked]
    text: str | None = "the quick é fox"
    tensors: dict[str, tuple[str, list[Any]]] = {"max_tokens": ("INT32", [2])}
    match rng.randrange(4):
        case 0:
            text, tensors["input_ids"] = None, (rng.choice(("INT32", "INT64")), [37, 38, 39])
        case 1:
            text, tensors["image"] = f"{_MARKER}what?", ("BYTES", [picture()])
        case 2:
            tensors["sampling_parameters"] = (
                "BYTES",
                [b'{"temperature": 0.5, "stop": ["\xc3\xa9"], "logit_bias": {"5": 2}}'],
            )
    outputs = rng.sample(("text_output", "output_ids", "output_log_probs", "num_output_tokens"), rng.randrange(3))
    streams = rng.random() < 0.5
    sent = [
        infer(text, raw=rng.random() < 0.5, model=MODEL, tensors=tensors, outputs=outputs, n=rng.choice((1, 2)), seed=3)
        for _ in range(rng.choice((1, 1, 3)) if streams else 1)
    ]
    if not streams:
        return "/inference.GRPCInferenceService/ModelInfer", sent
    for each in sent:
        each.parameters["streaming"].bool_param = rng.random() < 0.7
    return "/inference.GRPCInferenceService/ModelStreamInfer", sent


class PublicGrpc(Surface):
    name = "gRPC, public"

    def __init__(self, world: World) -> None:
        self._world = world

    def _asked(self, rng: Random) -> tuple[str, list[Any]]:
        """A method and valid messages for it."""
        choice = rng.random()
        if choice < 0.25:
            return inference(rng)
        if choice < 0.7:
            return "/epd.v1.GenerationService/Generate", [generate(rng)]
        if choice < 0.73:
            asked = [
                ("Tokenize", generation_pb2.TokenizeRequest(model=MODEL, text="the quick")),
                ("Detokenize", generation_pb2.DetokenizeRequest(model=MODEL, token_ids=[30, 31])),
                ("LoadAdapter", generation_pb2.LoadAdapterRequest(name="x", path="of/x", model=MODEL)),
                ("UnloadAdapter", generation_pb2.UnloadAdapterRequest(name="x")),
            ]
            name, message = rng.choice(asked)
            return f"/epd.v1.GenerationService/{name}", [message]
        if choice < 0.75:
            return "/epd.v1.GenerationService/ListModels", [generation_pb2.ListModelsRequest()]
        if choice < 0.85:
            asked = trace_pb2.GetTraceRequest(trace_id=rng.randbytes(16).hex())
            if rng.random() < 0.5:
                asked = trace_pb2.GetTraceRequest(request_id="chatcmpl-1")
            return "/epd.v1.TraceService/GetTrace", [asked]
        if choice < 0.93:
            service = rng.choice(("", "epd.v1.GenerationService", "nothing"))
            method = rng.choice(("Check", "Watch"))
            return f"/grpc.health.v1.Health/{method}", [health_pb2.HealthCheckRequest(service=service)]
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_by_filename="epd/v1/types.proto"),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="epd.v1.Usage"),
        ]
        return "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", asked

    async def one(self, rng: Random) -> str:
        method, asked = self._asked(rng)
        sent = [messages.mutated(rng, message) for message in asked]
        if rng.random() < 0.03:
            sent *= rng.choice((0, 2, 3))
        if rng.random() < 0.02:
            method += rng.choice(("x", "/", "é".encode().hex()))
        leave_after = 1 if method.endswith("Watch") else rng.choice((None, None, None, None, 1, 2))
        timeout = 0.02 if rng.random() < 0.05 else CALL_SECONDS
        outcome = await call(
            self._world.gateway, method, sent, metadata=_metadata(rng), leave_after=leave_after, timeout=timeout
        )
        check_rpc(outcome.code, outcome.reason, outcome.details, (_NOT_FOUND,) if "health" in method else ())
        if "Generate" in method:
            for answer in outcome.answers:
                check_words(generation_pb2.GenerateResponse.FromString(answer).request_id[:300])
        if method.endswith("/ModelStreamInfer"):
            for answer in outcome.answers:
                _check_told(inference_pb2.ModelStreamInferResponse.FromString(answer))
        return outcome.label

    async def alive(self) -> None:
        await self._world.alive()


def _check_told(told: inference_pb2.ModelStreamInferResponse) -> None:
    """An error within a stream is as a status would be."""
    if told.error_message:
        parameters = told.infer_response.parameters
        status = grpc.StatusCode[parameters["status"].string_param]
        check_rpc(status, parameters["epd-reason"].string_param, told.error_message)


def _metadata(rng: Random) -> list[tuple[str, str | bytes]]:
    found: list[tuple[str, str | bytes]] = []
    if rng.random() < 0.3:
        odd = rng.choice(("", "a", "a b", "~" * 65, "x" * 3_000, "00-" + "0" * 32 + "-" + "f" * 16 + "-01", "%zz", "1"))
        found.append((rng.choice(("x-epd-tenant", "traceparent", "tracestate", "baggage", "authorization")), odd))
    if rng.random() < 0.05:
        found.append((rng.choice(("x-epd-tenant-bin", "traceparent-bin")), values.data(rng)[:500]))
    return found
