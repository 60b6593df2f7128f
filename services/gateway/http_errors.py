"""What the HTTP edge answers with: JSON, and errors in OpenAI's words."""

import math

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from common.errors import EpdError
from common.rpc.errors import from_exception
from services.gateway.openai_format import error_json
from services.gateway.sse import ClientGone

INTERNAL = EpdError("internal error; see the log of the gateway")
_CLIENT_GONE = 499


def answer_errors(app: FastAPI) -> None:
    """Every error that a handler lets through becomes an answer."""
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(EpdError, _on_epd)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(ClientGone, _on_gone)
    app.add_exception_handler(Exception, _on_any)


def json_response(status: int, content: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _refusal(error: EpdError) -> Response:
    headers = {}
    if error.http in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds or 1)))
    if error.http == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error.http, error_json(error), headers)


async def _on_epd(request: Request, error: Exception) -> Response:
    assert isinstance(error, EpdError)
    return _refusal(error)


async def _on_gone(request: Request, error: Exception) -> Response:
    """In the middle of its body, or while it waited. Nobody reads this."""
    return Response(status_code=_CLIENT_GONE)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": None}
    return json_response(error.status_code, {"error": body}, dict(error.headers or {}))


async def _on_any(request: Request, error: Exception) -> Response:
    return _refusal(from_exception(error) or INTERNAL)
