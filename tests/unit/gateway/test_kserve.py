"""KServe v2 at the gateway: the native service's answers behind another protocol."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from epd.inference import inference_pb2 as pb
from epd.inference import inference_pb2_grpc
from tests.fakes import MODEL, spell
from tests.kserve import infer, parameters, read
from tests.unit.gateway.conftest import Mesh, ask, generate

SERVICE = "inference.GRPCInferenceService"


def stub(mesh: Mesh) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(mesh.channel)


async def refused(call: Any) -> tuple[grpc.StatusCode, dict[str, str]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), dict(caught.value.trailing_metadata() or ())


async def stream(mesh: Mesh, requests: Iterable[Any], **call: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
    async with asyncio.timeout(20):
        async for response in stub(mesh).ModelStreamInfer(iter(requests), **call):
            yield response


@pytest.mark.parametrize("raw", [False, True])
async def test_whole_answer_equals_the_native_one(mesh: Mesh, raw: bool) -> None:
    p, _ = await mesh.pair()
    native = await generate(mesh, ask("hello", max_tokens=5))
    outputs = ["text_output", "finish_reason", "output_ids", "sequence_length", "num_input_tokens", "num_output_tokens"]
    response = await stub(mesh).ModelInfer(infer(raw=raw, id="mine", max_tokens=5, outputs=outputs))
    assert bool(response.raw_output_contents) is raw
    assert read(response) == {
        "text_output": [native.texts[0].encode()],
        "finish_reason": [b"length"],
        "output_ids": native.token_ids[0],
        "sequence_length": [5],
        "num_input_tokens": [5],
        "num_output_tokens": [5],
    }
    assert (response.id, response.model_name, response.model_version) == ("mine", MODEL, "1")
    told = parameters(response)
    assert (told["prompt_tokens"], told["completion_tokens"], told["cached_tokens"]) == (5, 5, 0)
    assert len(told["trace_id"]) == 32
    assert 0 < told["ttft_seconds"] <= told["total_seconds"]
    assert p.calls[0][1].prompt_token_ids == p.calls[1][1].prompt_token_ids


async def test_text_and_finish_reason_unless_told_otherwise(mesh: Mesh) -> None:
    await mesh.pair(script=spell("ab"))
    response = await stub(mesh).ModelInfer(infer())
    assert read(response) == {"text_output": [b"ab"], "finish_reason": [b"stop"]}


@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32"])
@pytest.mark.parametrize("raw", [False, True])
async def test_token_ids_as_the_prompt(mesh: Mesh, datatype: str, raw: bool) -> None:
    p, _ = await mesh.pair()
    request = infer(None, raw=raw, tensors={"input_ids": (datatype, [104, 105])}, max_tokens=2)
    request.inputs[0].shape[:] = [1, 2]  # a batch of one
    assert read(await stub(mesh).ModelInfer(request))["text_output"] == [b"ab"]
    assert list(p.calls[0][1].prompt_token_ids) == [104, 105]


SAMPLING = {"temperature": 0.5, "top_p": 0.75, "max_tokens": 4, "min_tokens": 1, "seed": 7, "top_k": 3}


@pytest.mark.parametrize("form", ["parameters", "strings", "tensors", "json"])
async def test_sampling_parameters_in_every_form(mesh: Mesh, form: str) -> None:
    p, _ = await mesh.pair()
    if form == "parameters":
        request = infer(**SAMPLING, ignore_eos=True, stop="never")
    elif form == "strings":  # of clients whose parameters know no fractions
        texts = {name: json.dumps(value) for name, value in SAMPLING.items()}
        request = infer(**texts, ignore_eos="true", stop="never")
    elif form == "tensors":
        kinds = {float: "FP32", int: "INT32"}
        tensors: dict[str, Any] = {name: (kinds[type(value)], [value]) for name, value in SAMPLING.items()}
        tensors |= {"ignore_eos": ("BOOL", [True]), "stop": ("BYTES", [b"never", b"ever"])}
        request = infer(tensors=tensors)
    else:
        table = json.dumps({**SAMPLING, "ignore_eos": True, "stop": ["never"]}).encode()
        request = infer(tensors={"sampling_parameters": ("BYTES", [table])})
    assert read(await stub(mesh).ModelInfer(request))["text_output"] == [b"abcd"]
    sampling = p.calls[0][1].sampling
    assert {name: getattr(sampling, name) for name in SAMPLING} == SAMPLING
    assert sampling.ignore_eos


async def test_names_of_tensorrt_llm(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    tensors = {"random_seed": ("INT64", [11]), "stop_words": ("BYTES", [b"cd"]), "max_tokens": ("INT32", [9])}
    assert read(await stub(mesh).ModelInfer(infer(tensors=tensors)))["text_output"] == [b"ab"]
    assert p.calls[0][1].sampling.seed == 11


async def test_choices_and_logprobs(mesh: Mesh) -> None:
    for worker in await mesh.pair():
        worker.logprobs = True
    outputs = ["output_log_probs", "output_ids", "sequence_length", "text_output"]
    found = read(await stub(mesh).ModelInfer(infer(n=2, max_tokens=3, outputs=outputs)))
    assert found["text_output"] == [b"abc", b"bcd"]
    assert found["sequence_length"] == [3, 3]
    assert found["output_ids"] == [*b"abc", *b"bcd"]
    assert found["output_log_probs"] == [-0.5] * 6


async def test_a_stream_of_pieces(mesh: Mesh) -> None:
    await mesh.pair()
    request = infer(
        id="a", tensors={"streaming": ("BOOL", [True])}, max_tokens=5, outputs=["text_output", "output_ids"]
    )
    found = [each async for each in stream(mesh, [request])]
    assert not any(each.error_message for each in found)
    pieces = [each.infer_response for each in found]
    assert len(pieces) > 1
    assert b"".join(read(piece)["text_output"][0] for piece in pieces) == b"abcde"
    assert [i for piece in pieces for i in read(piece)["output_ids"]] == list(b"abcde")
    assert {piece.id for piece in pieces} == {"a"}
    finals = ["triton_final_response" in piece.parameters for piece in pieces]
    assert finals == [False] * (len(pieces) - 1) + [True]
    assert parameters(pieces[-1])["completion_tokens"] == 5
    assert read(pieces[-1])["text_output"]  # the last one is none without text


async def test_a_stream_of_several_choices_says_which(mesh: Mesh) -> None:
    await mesh.pair()
    texts: dict[int, bytes] = {}
    reasons: dict[int, bytes] = {}
    async for each in stream(mesh, [infer(n=2, streaming=True, max_tokens=4)]):
        index = each.infer_response.parameters["index"].int64_param
        found = read(each.infer_response)
        texts[index] = texts.get(index, b"") + found["text_output"][0]
        reasons[index] = reasons.get(index, b"") + found["finish_reason"][0]
    assert texts == {0: b"abcd", 1: b"bcde"}
    assert reasons == {0: b"length", 1: b"length"}


async def test_requests_of_one_stream_run_side_by_side(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    p.prefill_gate.clear()
    requests = [infer(id=str(i), max_tokens=i + 1) for i in range(3)]
    found: dict[str, bytes] = {}

    async def collect() -> None:
        async for each in stream(mesh, requests):
            found[each.infer_response.id] = read(each.infer_response)["text_output"][0]

    task = asyncio.create_task(collect())
    await p.until(lambda: len(p.calls) == 3)
    p.prefill_gate.set()
    await task
    assert found == {"0": b"a", "1": b"ab", "2": b"abc"}


async def test_an_error_ends_its_own_request_of_a_stream(mesh: Mesh) -> None:
    await mesh.pair()
    requests = [infer(id="bad", temperature=9.0), infer(id="good", max_tokens=2)]
    found = {each.infer_response.id: each async for each in stream(mesh, requests)}
    assert "temperature" in found["bad"].error_message
    told = parameters(found["bad"].infer_response)
    assert (told["status"], told["epd-reason"], told["epd-field"]) == (
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        "temperature",
    )
    assert read(found["good"].infer_response)["text_output"] == [b"ab"]


async def test_strict_streams_end_with_the_status(mesh: Mesh) -> None:
    await mesh.pair()

    async def first() -> None:
        async for _ in stream(mesh, [infer(model="other")], metadata=(("triton_grpc_error", "true"),)):
            pass

    code, metadata = await refused(first())
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


def _two_forms() -> pb.ModelInferRequest:
    request = infer(raw=True)
    request.inputs[0].contents.bytes_contents.append(b"x")
    return request


def _reshaped(shape: list[int], raw: bool = False) -> pb.ModelInferRequest:
    request = infer(raw=raw)
    request.inputs[0].shape[:] = shape
    return request


def _raw(data: bytes) -> pb.ModelInferRequest:
    request = infer(raw=True)
    request.raw_input_contents[0] = data
    return request


BAD: dict[str, tuple[pb.ModelInferRequest, str]] = {
    "no prompt": (infer(None), "text_input"),
    "two prompts": (infer(tensors={"input_ids": ("INT32", [1])}), "text_input"),
    "unknown input": (infer(tensors={"colour": ("BYTES", [b"red"])}), "colour"),
    "a name that is no header": (infer(tensors={"é\n ": ("BYTES", [b"red"])}), "??"),
    "unknown parameter": (infer(colour="red"), "colour"),
    "unknown output": (infer(outputs=["colour"]), "outputs"),
    "given twice": (infer(tensors={"max_tokens": ("INT32", [1])}, max_tokens=2), "max_tokens"),
    "wrong type": (infer(temperature="hot"), "temperature"),
    "out of range": (infer(temperature=3.0), "temperature"),
    "not finite": (infer(temperature=float("nan")), "temperature"),
    "not JSON": (infer(tensors={"sampling_parameters": ("BYTES", [b"{"])}), "sampling_parameters"),
    "a list for one": (infer(tensors={"max_tokens": ("INT32", [1, 2])}), "max_tokens"),
    "streaming here": (infer(streaming=True), "streaming"),
    "typed and raw": (_two_forms(), "text_input"),
    "wrong shape": (_reshaped([2]), "text_input"),
    "negative shape": (_reshaped([-1, -1]), "text_input"),
    "huge shape": (_reshaped([2**62, 4], raw=True), "text_input"),
    "raw cut off": (_raw(b"\x05\x00\x00\x00hel"), "text_input"),
    "raw without length": (_raw(b"\x05"), "text_input"),
    "not UTF-8": (_raw(b"\x01\x00\x00\x00\xff"), "text_input"),
    "negative token": (infer(None, tensors={"input_ids": ("INT32", [-1])}), "input_ids"),
    "tokens as text": (infer(None, tensors={"input_ids": ("BYTES", [b"1"])}), "input_ids"),
    "images for a text model": (infer(tensors={"image": ("BYTES", [b"x"])}), "images[0]"),
    "timeout of text": (infer(timeout="soon"), "timeout"),
}


@pytest.mark.parametrize("name", BAD)
async def test_wrong_requests_name_what_is_wrong(mesh: Mesh, name: str) -> None:
    p, _ = await mesh.pair()
    request, field = BAD[name]
    code, metadata = await refused(stub(mesh).ModelInfer(request))
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert metadata["epd-field"] == field
    assert not p.calls


async def test_unknown_model_and_version(mesh: Mesh) -> None:
    await mesh.pair()
    other = infer()
    other.model_version = "2"
    for call in (
        stub(mesh).ModelInfer(infer(model="other")),
        stub(mesh).ModelInfer(other),
        stub(mesh).ModelReady(pb.ModelReadyRequest(name="other")),
        stub(mesh).ModelMetadata(pb.ModelMetadataRequest(name=MODEL, version="2")),
        stub(mesh).ModelMetadata(pb.ModelMetadataRequest()),
    ):
        code, metadata = await refused(call)
        assert (code, metadata["epd-reason"]) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("streaming", [False, True])
async def test_cancelling_the_call_cancels_the_work(mesh: Mesh, streaming: bool) -> None:
    _, d = await mesh.pair()
    d.decode_gate.clear()
    if streaming:
        call = stub(mesh).ModelStreamInfer(iter([infer(streaming=True, max_tokens=50)]))
        await call.read()
    else:
        call = stub(mesh).ModelInfer(infer(max_tokens=50))
    await d.until(lambda: bool(d.calls))
    call.cancel()
    await d.until(lambda: len(d.cancelled) == 1 and not d.running)
    async with asyncio.timeout(10):
        await mesh.gateway.admission.idle()


@pytest.mark.parametrize("how", ["call", "parameter"])
async def test_deadlines(mesh: Mesh, how: str) -> None:
    _, d = await mesh.pair()
    d.decode_gate.clear()
    if how == "call":
        call = stub(mesh).ModelInfer(infer(max_tokens=50), timeout=0.3)
    else:
        call = stub(mesh).ModelInfer(infer(max_tokens=50, timeout=300_000))
    code, _ = await refused(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await d.until(lambda: len(d.cancelled) == 1 and not d.running)


async def test_live_ready_and_metadata(mesh: Mesh) -> None:
    service = stub(mesh)
    assert (await service.ServerLive(pb.ServerLiveRequest())).live
    assert not (await service.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await service.ModelReady(pb.ModelReadyRequest(name=MODEL))).ready
    await mesh.pair()
    assert (await service.ServerReady(pb.ServerReadyRequest())).ready
    assert (await service.ModelReady(pb.ModelReadyRequest(name=MODEL, version="1"))).ready
    server = await service.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, list(server.extensions)) == ("epd-mesh", ["model_stream_infer", "parameters"])
    model = await service.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert list(model.versions) == ["1"]
    assert {"text_input", "input_ids", "streaming"} <= {each.name for each in model.inputs}
    assert {"text_output", "finish_reason"} <= {each.name for each in model.outputs}
    mesh.gateway.admission.draining = True
    assert (await service.ServerLive(pb.ServerLiveRequest())).live
    assert not (await service.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await service.ModelReady(pb.ModelReadyRequest(name=MODEL))).ready


async def test_health_and_reflection_list_it(mesh: Mesh) -> None:
    health = health_pb2_grpc.HealthStub(mesh.channel)
    found = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert found.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(mesh.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in reflection.ServerReflectionInfo(iter([asked])):
        assert SERVICE in {service.name for service in answer.list_services_response.service}


async def test_the_tenant_is_whom_limits_and_accounting_see(mesh: Mesh) -> None:
    p, _ = await mesh.pair()
    metadata = (("x-epd-tenant", "blue"),)
    await stub(mesh).ModelInfer(infer(max_tokens=2), metadata=metadata)
    assert (
        'epd_output_tokens_total{model="fake",tenant="blue"} 2.0'
        in mesh.gateway.telemetry.metrics.exposition().decode()
    )
    p.prefill_gate.clear()
    first = stub(mesh).ModelInfer(infer(id="same"), metadata=metadata)
    await p.until(lambda: len(p.calls) == 2)
    code, told = await refused(stub(mesh).ModelInfer(infer(id="same"), metadata=metadata))
    assert (code, told["epd-reason"]) == (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    first.cancel()
