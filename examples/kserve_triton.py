"""Triton's own client, unmodified, against the open inference protocol of the gateway.

    pip install 'tritonclient[grpc]'        # wants an older protobuf than this mesh: an environment of its own
    python examples/kserve_triton.py

EPD_ADDRESS: the gateway, by default 127.0.0.1:50051.
"""

import os
import queue

import numpy as np
import tritonclient.grpc as triton

model = os.environ.get("MODEL", "SmolLM2-135M-Instruct")
client = triton.InferenceServerClient(os.environ.get("EPD_ADDRESS", "127.0.0.1:50051"))
assert client.is_server_live()
assert client.is_model_ready(model)


def text(prompt: str) -> triton.InferInput:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt.encode()], dtype=np.object_))
    return tensor


# Triton's parameters have no fractions: numbers that have one are strings.
options = {"max_tokens": 8, "temperature": "0"}
result = client.infer(model, [text("The capital of France is")], parameters=options)
print(result.as_numpy("text_output")[0].decode())

answers: queue.Queue = queue.Queue()
client.start_stream(callback=lambda result, error: answers.put((result, error)))
stream = triton.InferInput("stream", [1], "BOOL")
stream.set_data_from_numpy(np.array([True]))
client.async_stream_infer(model, [text("The capital of Italy is"), stream], parameters=options)
while True:
    result, error = answers.get(timeout=300)
    if error:
        raise error
    print(result.as_numpy("text_output")[0].decode(), end="|", flush=True)
    if result.get_response().parameters["triton_final_response"].bool_param:
        break
client.stop_stream()
print()
