#!/bin/sh
# The HTTP API by curl: models, an answer, a stream, a picture, an error.
#
#   examples/curl.sh [picture.png]
#
# EPD_HTTP: the gateway, by default http://127.0.0.1:8000. Where keys are needed add -H "authorization: Bearer $EPD_API_KEY".
set -eu
http=${EPD_HTTP:-http://127.0.0.1:8000}
json='content-type: application/json'

curl -sSf "$http/v1/models"
echo

curl -sSf "$http/v1/chat/completions" -H "$json" -H 'x-request-id: example-1' -d '{
    "messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0, "max_tokens": 16}'
echo

# Events, one a line that begins with "data: ", the last one [DONE]. -N: do not wait until a buffer is full.
curl -sSfN "$http/v1/completions" -H "$json" -d '{
    "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4, "stream": true, "stream_options": {"include_usage": true}}'

if [ $# -gt 0 ]; then
    curl -sSf "$http/v1/chat/completions" -H "$json" -d @- <<END
{"temperature": 0, "max_tokens": 8, "messages": [{"role": "user", "content": [
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,$(base64 -w0 "$1")"}},
    {"type": "text", "text": "What colour is the background?"}]}]}
END
    echo
fi

# 400: the message names the field and its limits, `code` is the reason in docs/errors.md.
curl -sS "$http/v1/chat/completions" -H "$json" -d '{"messages": [{"role": "user", "content": "Hello"}], "temperature": 3}'
echo
curl -sS -o /dev/null -w 'ready: %{http_code}\n' "$http/ready"
