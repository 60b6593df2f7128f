"""The HTTP edge told as OpenAPI 3.1: bodies as they are parsed, answers, and every status an error can have."""

from typing import Any

import msgspec

from common.errors import by_reason
from common.sampling import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from services.gateway.openai_schema import ChatBody, CompletionBody
from services.gateway.preprocess import MAX_LABEL, MAX_STREAM_INTERVAL

Json = dict[str, Any]
_REF = "#/components/schemas/{name}"
_HTTP_OWN = {404: "no such path", 405: "no such method here", 413: "a body that is too large"}
# What is checked after the body was parsed, and no type says.
_BOUNDS: dict[str, Json] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**32 - 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "max_tokens": {"minimum": 1, "maximum": 2**32 - 1},
    "max_completion_tokens": {"minimum": 1, "maximum": 2**32 - 1},
    "min_tokens": {"minimum": 0, "maximum": 2**32 - 1},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "stream_interval": {"minimum": 0, "maximum": MAX_STREAM_INTERVAL},
    "session_id": {"maxLength": MAX_LABEL},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,10}$"}},
}
_TEXT, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_USAGE = {name: _INTEGER for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _object(required: Json, optional: Json | None = None) -> Json:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def _answer(kind: str, choice: Json) -> Json:
    reason = {"enum": ["stop", "length", "tool_calls"]}
    logprobs = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    choices = _object({"index": _INTEGER, **choice, "logprobs": logprobs, "finish_reason": reason})
    return _object(
        {
            "id": _TEXT,
            "object": {"enum": [kind]},
            "created": _INTEGER,
            "model": _TEXT,
            "choices": {"type": "array", "items": choices},
            "usage": _object(_USAGE, {"prompt_tokens_details": {"type": "object"}}),
        },
        {"epd": {"anyOf": [{"type": "object"}, {"type": "array"}]}},
    )


def _schemas() -> Json:
    text = {"type": ["string", "null"]}
    calls = {"type": "array", "items": {"type": "object"}}
    message = _object({"role": _TEXT, "content": text, "refusal": {"type": "null"}}, {"tool_calls": calls})
    model = _object({"id": _TEXT, "object": {"enum": ["model"]}, "created": _INTEGER, "owned_by": _TEXT})
    optional_text = {"type": ["string", "null"]}
    error = _object({"message": _TEXT, "type": _TEXT, "param": optional_text, "code": optional_text})
    return {
        "ChatCompletion": _answer("chat.completion", {"message": message}),
        "Completion": _answer("text_completion", {"text": _TEXT}),
        "Model": model,
        "Models": _object({"object": {"enum": ["list"]}, "data": {"type": "array", "items": _ref("Model")}}),
        "Status": _object({"status": _TEXT}),
        "Trace": _object({"spans": {"type": "array", "items": {"type": "object"}}}),
        "Error": _object({"error": error}),
    }


def _ref(name: str) -> Json:
    return {"$ref": _REF.format(name=name)}


def _bodies() -> Json:
    """Of both endpoints, with their bounds."""
    _, found = msgspec.json.schema_components([ChatBody, CompletionBody], ref_template=_REF)
    for kind in ("ChatBody", "CompletionBody"):
        for name, schema in found[kind]["properties"].items():
            bounds = _BOUNDS.get(name)
            if bounds is None and name == "logprobs" and kind == "CompletionBody":
                bounds = _BOUNDS["top_logprobs"]
            if bounds is not None:
                schema["anyOf"][0].update(bounds)
    found["ChatBody"]["properties"]["messages"]["minItems"] = 1
    return found


def _content(schema: Json, kind: str = "application/json") -> Json:
    return {"content": {kind: {"schema": schema}}}


def _failures() -> Json:
    """Every status of common/errors.py, and HTTP's own."""
    told = {kind.http: reason for reason, kind in sorted(by_reason().items(), reverse=True)} | _HTTP_OWN
    return {
        str(code): {"description": text.lower().replace("_", " "), **_content(_ref("Error"))}
        for code, text in sorted(told.items())
        if code != 499  # the client has gone and reads nothing
    }


def _operation(summary: str, answer: Json, *, body: str = "", parameter: str = "") -> Json:
    found: Json = {"summary": summary, "responses": {"200": {"description": "fine", **answer}, **_failures()}}
    if body:
        found["requestBody"] = {"required": True, **_content(_ref(body))}
        found["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    if parameter:
        found["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}]
    return found


def _status(summary: str) -> Json:
    found = _operation(summary, _content(_ref("Status")))
    found["responses"]["503"] = {"description": "not now", **_content(_ref("Status"))}
    found["security"] = []
    return found


def document(version: str) -> Json:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "epd-mesh", "version": version},
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": {
                "post": _operation("Answers a chat", _content(_ref("ChatCompletion")), body="ChatBody")
            },
            "/v1/completions": {
                "post": _operation("Goes on with prompts", _content(_ref("Completion")), body="CompletionBody")
            },
            "/v1/models": {"get": _operation("Models that can be asked now", _content(_ref("Models")))},
            "/v1/models/{model}": {"get": _operation("One of them", _content(_ref("Model")), parameter="model")},
            "/health": {"get": _status("503 while the gateway drains")},
            "/live": {"get": _status("The process runs")},
            "/ready": {"get": _status("A request sent now would reach a worker")},
            "/metrics": {"get": _operation("Prometheus' text format", _content(_TEXT, "text/plain"))},
            "/debug/trace/{trace}": {
                "get": _operation("Spans by trace id or request id", _content(_ref("Trace")), parameter="trace")
            },
        },
        "components": {
            "schemas": _bodies() | _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
