"""Bodies of requests, server-sent events, and noticing that a client has gone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + _encode(data) + b"\n\n"


async def body_of(request: Request, most: int) -> bytes:
    """A whole body. Raises HTTPException 415 for one that is not said to be JSON, 413 for a longer one.

    A page in a browser can send text and forms to any address without asking first, JSON it cannot.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(415, f"the content-type must be application/json, not {kind[:80] or 'missing'}")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > most:
            raise HTTPException(413, f"the body must have at most {most} bytes")
    return bytes(body)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The work's result. Cancels it and raises ClientGone when the client goes first. The body must have been read."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Writes events as they come; closing the source when the client goes."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._write(send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams with their stream's position, as they come. The first failure ends all."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for single in only:
                yield 0, single
        return
    queue: asyncio.Queue[tuple[int, T]] = asyncio.Queue(maxsize=len(streams))
    tasks = [asyncio.create_task(_feed(i, stream, queue)) for i, stream in enumerate(streams)]
    everything = asyncio.gather(*tasks)
    try:
        async for item in _until(everything, queue):
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if everything.done() and not everything.cancelled():
            everything.exception()  # seen: it was raised above, or came with the cancellation


async def _feed(position: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T]]) -> None:
    async with aclosing(stream) as items:
        async for item in items:
            await queue.put((position, item))


async def _until(everything: asyncio.Future[Any], queue: asyncio.Queue[tuple[int, T]]) -> AsyncIterator[tuple[int, T]]:
    while True:
        waiting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait((waiting, everything), return_when=asyncio.FIRST_COMPLETED)
        finally:
            taken = waiting.done()
            waiting.cancel()
        if taken:
            yield waiting.result()
            continue
        while not queue.empty():
            yield queue.get_nowait()
        everything.result()
        return
