"""The HTTP edge told as OpenAPI 3.1: bodies as they are parsed, answers, and every status an error can have."""

from typing import Any

import msgspec

from common.errors import by_reason
from common.sampling import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_LOGPROBS
from services.gateway.lora_http import LoadBody, UnloadBody
from services.gateway.openai_schema import ChatBody, CompletionBody
from services.gateway.preprocess import MAX_LABEL, MAX_STREAM_INTERVAL
from services.gateway.responses_schema import ResponsesBody
from services.gateway.tokenization import DetokenizeBody, TokenizeBody

Json = dict[str, Any]
BODIES = (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody, LoadBody, UnloadBody)
_REF = "#/components/schemas/{name}"
_HTTP_OWN = {
    404: "no such path",
    405: "no such method here",
    413: "a body that is too large",
    415: "a body that is not JSON",
}
# What is checked after the body was parsed, and no type says.
_BOUNDS: dict[str, Json] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": 2**32 - 1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    # 0 with echo or prompt_logprobs: the prompt alone
    "max_tokens": {"minimum": 0, "maximum": 2**32 - 1},
    "max_completion_tokens": {"minimum": 0, "maximum": 2**32 - 1},
    "max_output_tokens": {"minimum": 1, "maximum": 2**32 - 1},
    "min_tokens": {"minimum": 0, "maximum": 2**32 - 1},
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "seed": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "top_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
    "stream_interval": {"minimum": 0, "maximum": MAX_STREAM_INTERVAL},
    "session_id": {"maxLength": MAX_LABEL},
    "prompt_cache_key": {"maxLength": MAX_LABEL},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "logit_bias": {"maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,10}$"}},
}
_TEXT, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_USAGE = {name: _INTEGER for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _object(required: Json, optional: Json | None = None) -> Json:
    return {"type": "object", "properties": required | (optional or {}), "required": list(required)}


def _answer(kind: str, choice: Json, *, scores: str) -> Json:
    """scores: where prompt_logprobs are, "choice" or "answer"."""
    told = {"prompt_logprobs": {"type": "array", "items": {"type": ["object", "null"]}}}
    reason = {"enum": ["stop", "length", "tool_calls"]}
    logprobs = {"anyOf": [{"type": "object"}, {"type": "null"}]}
    fields = {"index": _INTEGER, **choice, "logprobs": logprobs, "finish_reason": reason}
    choices = _object(fields, told if scores == "choice" else None)
    return _object(
        {
            "id": _TEXT,
            "object": {"enum": [kind]},
            "created": _INTEGER,
            "model": _TEXT,
            "choices": {"type": "array", "items": choices},
            "usage": _object(_USAGE, {"prompt_tokens_details": {"type": "object"}}),
        },
        {"epd": {"anyOf": [{"type": "object"}, {"type": "array"}]}} | (told if scores == "answer" else {}),
    )


def _response() -> Json:
    usage = _object(
        {name: _INTEGER for name in ("input_tokens", "output_tokens", "total_tokens")}
        | {name: {"type": "object"} for name in ("input_tokens_details", "output_tokens_details")}
    )
    part = _object(
        {
            "type": {"enum": ["output_text"]},
            "text": _TEXT,
            "annotations": {"type": "array"},
            "logprobs": {"type": "array", "items": {"type": "object"}},
        }
    )
    status = {"enum": ["completed", "incomplete"]}
    message = _object(
        {
            "id": _TEXT,
            "type": {"enum": ["message"]},
            "role": {"enum": ["assistant"]},
            "status": status,
            "content": {"type": "array", "items": part},
        }
    )
    return _object(
        {
            "id": _TEXT,
            "object": {"enum": ["response"]},
            "created_at": _INTEGER,
            "model": _TEXT,
            "status": status,
            "error": {"type": "null"},
            "incomplete_details": {"anyOf": [_object({"reason": {"enum": ["max_output_tokens"]}}), {"type": "null"}]},
            "output": {"type": "array", "items": message},
            "usage": usage,
        }
    )


def _schemas() -> Json:
    text = {"type": ["string", "null"]}
    calls = {"type": "array", "items": {"type": "object"}}
    message = _object({"role": _TEXT, "content": text, "refusal": {"type": "null"}}, {"tool_calls": calls})
    model = _object({"id": _TEXT, "object": {"enum": ["model"]}, "created": _INTEGER, "owned_by": _TEXT, "root": _TEXT})
    optional_text = {"type": ["string", "null"]}
    error = _object({"message": _TEXT, "type": _TEXT, "param": optional_text, "code": optional_text})
    return {
        "ChatCompletion": _answer("chat.completion", {"message": message}, scores="answer"),
        "Completion": _answer("text_completion", {"text": _TEXT}, scores="choice"),
        "Response": _response(),
        "Tokens": _object(
            {
                "count": _INTEGER,
                "max_model_len": _INTEGER,
                "tokens": {"type": "array", "items": _INTEGER},
                "token_strs": {"anyOf": [{"type": "array", "items": _TEXT}, {"type": "null"}]},
            }
        ),
        "Prompt": _object({"prompt": _TEXT}),
        "Model": model,
        "Models": _object({"object": {"enum": ["list"]}, "data": {"type": "array", "items": _ref("Model")}}),
        "Status": _object({"status": _TEXT}),
        "Trace": _object({"spans": {"type": "array", "items": {"type": "object"}}}),
        "Error": _object({"error": error}),
    }


def _ref(name: str) -> Json:
    return {"$ref": _REF.format(name=name)}


def _bodies() -> Json:
    """Of all endpoints, with their bounds."""
    _, found = msgspec.json.schema_components(BODIES, ref_template=_REF)
    for kind in (body.__name__ for body in BODIES):
        for name, schema in found[kind]["properties"].items():
            bounds = _BOUNDS.get(name)
            if bounds is None and name == "logprobs" and kind == "CompletionBody":
                bounds = _BOUNDS["top_logprobs"]
            if bounds is not None:
                schema["anyOf"][0].update(bounds)
    found["ChatBody"]["properties"]["messages"]["minItems"] = 1
    found["DetokenizeBody"]["properties"]["tokens"]["items"].update({"minimum": 0, "maximum": 2**32 - 1})
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


def _operation(summary: str, answer: Json, *, body: str = "", parameter: str = "", streams: bool = False) -> Json:
    found: Json = {"summary": summary, "responses": {"200": {"description": "fine", **answer}, **_failures()}}
    if body:
        found["requestBody"] = {"required": True, **_content(_ref(body))}
    if streams:
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
                "post": _operation("Answers a chat", _content(_ref("ChatCompletion")), body="ChatBody", streams=True)
            },
            "/v1/completions": {
                "post": _operation(
                    "Goes on with prompts", _content(_ref("Completion")), body="CompletionBody", streams=True
                )
            },
            "/v1/responses": {
                "post": _operation("Answers", _content(_ref("Response")), body="ResponsesBody", streams=True)
            },
            "/tokenize": {"post": _operation("Token ids of a prompt", _content(_ref("Tokens")), body="TokenizeBody")},
            "/detokenize": {"post": _operation("Text of token ids", _content(_ref("Prompt")), body="DetokenizeBody")},
            "/v1/load_lora_adapter": {
                "post": _operation("Loads a LoRA adapter", _content(_TEXT, "text/plain"), body="LoadBody")
            },
            "/v1/unload_lora_adapter": {
                "post": _operation("Takes no more requests for it", _content(_TEXT, "text/plain"), body="UnloadBody")
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
