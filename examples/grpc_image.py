"""Ask about a picture over gRPC, and see that the second question does not encode it again.

    pip install .
    python examples/grpc_image.py picture.png "What colour is the background?"

EPD_ADDRESS: the gateway, by default 127.0.0.1:50051.
"""

import os
import sys
from pathlib import Path

import grpc

from epd.v1 import generation_pb2, generation_pb2_grpc

path = Path(sys.argv[1])
question = sys.argv[2] if sys.argv[2:] else "What colour is the background?"


def ask(stub: generation_pb2_grpc.GenerationServiceStub, question: str) -> generation_pb2.GenerateResponse:
    request = generation_pb2.GenerateRequest()  # no model named: the first that takes images
    message = request.chat.messages.add(role="user")
    message.content.add(image=generation_pb2.Image(data=path.read_bytes()))  # parts in the order they are read
    message.content.add(text=question)
    request.sampling.temperature = 0
    request.sampling.max_tokens = 16
    text = ""
    for response in stub.Generate(request, timeout=300):
        text += "".join(choice.text for choice in response.choices)
    print(f"> {question}\n{text}")
    return response


with grpc.insecure_channel(os.environ.get("EPD_ADDRESS", "127.0.0.1:50051")) as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    first = ask(stub, question)
    second = ask(stub, "How many objects are there?")
print(f"{first.usage.image_tokens} of {first.usage.prompt_tokens} prompt tokens stand for the image")
print(f"encoded by {', '.join(first.accounting.encode_workers)}")
print(f"images known the second time: {second.accounting.cached_images}")
