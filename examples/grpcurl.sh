#!/bin/sh
# gRPC by grpcurl, without a proto file: the gateway tells its services by reflection.
#
#   examples/grpcurl.sh [picture.png]
#
# EPD_ADDRESS: the gateway, by default 127.0.0.1:50051. With TLS: -cacert FILE for -plaintext. Where keys are needed add
# -H "authorization: Bearer $EPD_API_KEY".
set -eu
address=${EPD_ADDRESS:-127.0.0.1:50051}
service=epd.v1.GenerationService

grpcurl -plaintext "$address" list
grpcurl -plaintext "$address" describe epd.v1.SamplingParams
grpcurl -plaintext -d '{"service": "epd.v1.GenerationService"}' "$address" grpc.health.v1.Health/Check
grpcurl -plaintext "$address" $service/ListModels

# A stream of messages; the last one has usage and accounting.
grpcurl -plaintext -max-time 300 -d '{
    "chat": {"messages": [{"role": "user", "content": [{"text": "What is the capital of France?"}]}]},
    "sampling": {"temperature": 0, "max_tokens": 16}}' "$address" $service/Generate

if [ $# -gt 0 ]; then # bytes are base64 in JSON
    printf '{"chat": {"messages": [{"role": "user", "content": [{"image": {"data": "%s"}}, {"text": "What colour is the background?"}]}]},
        "sampling": {"temperature": 0, "max_tokens": 8}}' "$(base64 -w0 "$1")" |
        grpcurl -plaintext -max-time 300 -d @ "$address" $service/Generate
fi

# KServe v2 is on the same port.
grpcurl -plaintext -max-time 300 -d '{"model_name": "'"${MODEL:-SmolLM2-135M-Instruct}"'", "parameters": {"max_tokens": {"int64_param": 4}},
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1],
        "contents": {"bytes_contents": ["'"$(printf 'The capital of France is' | base64)"'"]}}]}' \
    "$address" inference.GRPCInferenceService/ModelInfer

# An error is a status; -v shows its reason in the trailing metadata: epd-reason, epd-field.
if grpcurl -plaintext -v -d '{"text": "Hello", "sampling": {"temperature": 3}}' "$address" $service/Generate 2>&1; then exit 1; fi
