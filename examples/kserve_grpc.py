"""The open inference protocol (KServe v2): metadata, one answer, a stream of answers. docs/kserve.md tells the tensors.

    pip install .        # package `epd`: messages of protos/epd/inference, with the published field numbers
    python examples/kserve_grpc.py

Triton's own client works as well: examples/kserve_triton.py. EPD_ADDRESS: the gateway, by default 127.0.0.1:50051.
"""

import os
from collections.abc import Iterator

import grpc

from epd.inference import inference_pb2, inference_pb2_grpc


def infer(model: str, prompt: str, *, stream: bool = False) -> inference_pb2.ModelInferRequest:
    request = inference_pb2.ModelInferRequest(model_name=model, id="example")
    text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(prompt.encode())
    if stream:
        request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters["max_tokens"].int64_param = 8
    request.parameters["temperature"].string_param = "0"  # or double_param
    return request


def outputs(response: inference_pb2.ModelInferResponse) -> dict[str, str]:
    return {each.name: each.contents.bytes_contents[0].decode() for each in response.outputs}


with grpc.insecure_channel(os.environ.get("EPD_ADDRESS", "127.0.0.1:50051")) as channel:
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
    assert stub.ServerReady(inference_pb2.ServerReadyRequest(), timeout=10).ready
    model = os.environ.get("MODEL", "SmolLM2-135M-Instruct")
    about = stub.ModelMetadata(inference_pb2.ModelMetadataRequest(name=model), timeout=10)
    for kind, tensors in (("in", about.inputs), ("out", about.outputs)):
        print(f"{about.name}, {kind}: {', '.join(each.name for each in tensors)}")

    response = stub.ModelInfer(infer(model, "The capital of France is"), timeout=300)
    print(outputs(response)["text_output"])
    print(f"{response.parameters['completion_tokens'].int64_param} tokens, {outputs(response)['finish_reason']}")

    def requests() -> Iterator[inference_pb2.ModelInferRequest]:
        yield infer(model, "The capital of Italy is", stream=True)

    for message in stub.ModelStreamInfer(requests(), timeout=300):
        if message.error_message:
            raise SystemExit(message.error_message)
        print(outputs(message.infer_response)["text_output"], end="|", flush=True)
    print()
