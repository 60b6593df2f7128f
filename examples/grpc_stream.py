"""Ask over gRPC and print the answer while it comes; then what it cost and where the time went.

    pip install .        # package `epd`: the generated messages (or generate your own from protos/)
    python examples/grpc_stream.py "What is the capital of France?"

EPD_ADDRESS: the gateway, by default 127.0.0.1:50051. EPD_API_KEY: a key, where one is needed.
"""

import os
import sys

import grpc

from epd.v1 import generation_pb2, generation_pb2_grpc

question = sys.argv[1] if sys.argv[1:] else "What is the capital of France?"
request = generation_pb2.GenerateRequest()
request.chat.messages.add(role="user").content.add(text=question)
request.sampling.temperature = 0
request.sampling.max_tokens = 32

key = os.environ.get("EPD_API_KEY")
metadata = [("authorization", f"Bearer {key}")] if key else []
with grpc.insecure_channel(os.environ.get("EPD_ADDRESS", "127.0.0.1:50051")) as channel:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    try:
        for message in stub.Generate(request, timeout=300, metadata=metadata):
            for choice in message.choices:
                print(choice.text, end="", flush=True)
    except grpc.RpcError as error:
        # docs/errors.md tells every reason.
        trailing = dict(error.trailing_metadata() or ())
        sys.exit(f"{error.code().name} {trailing.get('epd-reason', '')}: {error.details()}")

print()
usage, timing = message.usage, message.accounting  # with the last message
print(f"{usage.completion_tokens} tokens, first after {timing.ttft_seconds * 1000:.0f} ms")
for hop in timing.total_hops:
    print(f"  {hop.name} {hop.where} {hop.duration.ToMilliseconds()} ms")
print(f"epd trace {timing.trace_id}")
