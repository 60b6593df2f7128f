"""x-request-id: the client's own or one that is drawn, on every answer of the HTTP edge, errors too."""

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.errors import InvalidArgument
from services.gateway.preprocess import MAX_LABEL

REQUEST_ID = "x-request-id"
_STATE = "epd_request_id"


class RequestIds:
    """Around the whole application, so that nothing answers without one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        label = given if _good(given) else secrets.token_hex(12)
        scope[_STATE] = label

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = label
            await send(message)

        await self._app(scope, receive, labelled)


def label_of(scope: Scope) -> str:
    """Of a request that generates. Raises InvalidArgument when the client's own is no good."""
    given = Headers(scope=scope).get(REQUEST_ID, "")
    if given and not _good(given):
        raise InvalidArgument(f"{REQUEST_ID} must be at most {MAX_LABEL} printable characters", field=REQUEST_ID)
    label: str = scope[_STATE]
    return label


def _good(label: str) -> bool:
    return 0 < len(label) <= MAX_LABEL and label.isascii() and label.isprintable()
