#!/bin/sh
# gRPC by `buf curl` and reflection. The protocol has to be named: its own default is Connect's.
#
#   examples/buf_curl.sh
#
# EPD_ADDRESS: the gateway, by default 127.0.0.1:50051. With TLS: https:// and --cacert FILE, without --http2-prior-knowledge.
set -eu
url=http://${EPD_ADDRESS:-127.0.0.1:50051}

buf curl --protocol grpc --http2-prior-knowledge --list-methods "$url"
buf curl --protocol grpc --http2-prior-knowledge "$url/epd.v1.GenerationService/ListModels"
buf curl --protocol grpc --http2-prior-knowledge -d '{
    "chat": {"messages": [{"role": "user", "content": [{"text": "What is the capital of France?"}]}]},
    "sampling": {"temperature": 0, "maxTokens": 16}}' "$url/epd.v1.GenerationService/Generate"
