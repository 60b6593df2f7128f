"""Channels to other services: trace context, deadline and a CLIENT span for every call.

This wraps the channel's four kinds of calls instead of using gRPC's client interceptors. Those run each call in a task
behind a second call object; cancelling then misses the real call at times, and a stream left by `break` is kept
alive by reference cycles until the garbage collector comes by.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind

from common import telemetry
from common.metrics import Metrics
from common.rpc import deadline
from common.rpc.errors import reason_of
from common.rpc.tls import TlsOptions, handshake_refusal

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
KEEPALIVE_SECONDS = 30.0
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", -1),  # images make some large; the server's limit counts, and its error says more
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),  # the gateway retries, and knows when it may
    ("grpc.enable_http_proxy", 0),
    # A connection of this channel's own: a restarted worker on the same port is not met through an old one's back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


def connect(
    address: str,
    name: str = "",
    *,
    tls: TlsOptions | None = None,
    metrics: Metrics | None = None,
    keepalive_seconds: float = KEEPALIVE_SECONDS,
    options: Sequence[tuple[str, Any]] = (),
    metadata: Sequence[tuple[str, str]] = (),
) -> grpc.aio.Channel:
    """A channel to host:port. Every call of it

    - ends when the running request's time does (`common.rpc.deadline`), or at its own timeout if that is earlier;
    - carries the current trace context and, inside a trace, gets a CLIENT span that ends with the call in every way
      a call can end; a stream ends when nobody holds it any more, so also when it is left by `break`.

    A peer that stopped, or cannot be reached any more, is noticed after `keepalive_seconds` and a third of it at most;
    its calls then end with UNAVAILABLE. The calls look like grpc.aio's own. `options` are further channel arguments,
    `metadata` goes with every call.

    name: with TLS, whom the certificate must be of; without one, the address. Another's, one that is out of date or of
    an authority that `tls` does not trust ends every call with UNAVAILABLE, counted in `metrics` (peer_refusals).
    """
    timeout_ms = int(keepalive_seconds * 1000 / 3)
    keepalive = (
        ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # A minute by default, and the one that counts for a stopped peer, whose kernel still answers.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    )
    merged = (*_OPTIONS, *keepalive, *options)
    if tls is None:
        return _Channel(grpc.aio.insecure_channel(address, options=merged), None, metadata)
    if expected := name or tls.server_name:
        merged = (*merged, ("grpc.ssl_target_name_override", expected))
    return _Channel(grpc.aio.secure_channel(address, tls.channel_credentials(), options=merged), metrics, metadata)


class _Channel(grpc.aio.Channel):  # type: ignore[misc]
    def __init__(
        self, inner: grpc.aio.Channel, metrics: Metrics | None, metadata: Sequence[tuple[str, str]] = ()
    ) -> None:
        self._inner = inner
        self._metadata = tuple(metadata)
        self._metrics = metrics  # of channels with TLS

    async def __aenter__(self) -> _Channel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._starter(self._inner.unary_unary(method, *args, **kwargs), method)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._starter(self._inner.stream_unary(method, *args, **kwargs), method)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        start = self._starter(self._inner.unary_stream(method, *args, **kwargs), method)
        return lambda *a, **k: _Stream(start(*a, **k))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        start = self._starter(self._inner.stream_stream(method, *args, **kwargs), method)
        return lambda *a, **k: _Stream(start(*a, **k))

    def _starter(self, call_method: Callable[..., Any], method: str) -> Callable[..., Any]:
        return functools.partial(_start, call_method, method, self._metrics, self._metadata)


def _start(
    call_method: Callable[..., Any],
    method: str,
    metrics: Metrics | None,
    always: tuple[tuple[str, str], ...],
    request: Any = None,
    *,
    timeout: float | None = None,
    metadata: Sequence[tuple[str, str | bytes]] | None = None,
    **kwargs: Any,
) -> Any:
    """Starts the call inside a span of its own, if there is a trace to belong to."""
    span: Span | None = None
    if trace.get_current_span().get_span_context().is_valid:
        span = telemetry.begin_span(method.lstrip("/"), kind=SpanKind.CLIENT)
    sent = (*always, *(metadata or ()), *telemetry.inject(span))
    try:
        call = call_method(request, timeout=deadline.cap(timeout), metadata=sent, **kwargs)
    except BaseException as error:
        if span is not None:
            telemetry.end_span(span, error)
        raise
    if span is not None and span.is_recording():
        call.add_done_callback(functools.partial(_end, span))
    if metrics is not None:
        call.add_done_callback(functools.partial(_count_refusal, metrics))
    return call


def _end(span: Span, call: Any) -> None:
    """The call is over, so what its coroutines answer is there already: nothing is awaited."""
    code = _now(call.code())
    if code is not grpc.StatusCode.OK:
        reason = reason_of(_now(call.trailing_metadata()) or ())
        telemetry.fail_span(span, reason or (code.name if code else "UNKNOWN"))
    span.end()


def _count_refusal(metrics: Metrics, call: Any) -> None:
    if _now(call.code()) is grpc.StatusCode.UNAVAILABLE and (found := handshake_refusal(_now(call.details()) or "")):
        metrics.peer_refusals.labels(reason=found[0]).inc()


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    finally:
        coroutine.close()
    return None


async def _readable(message: Awaitable[Any], call: Any) -> Any:
    """gRPC hands out None for an answer that it could not parse. No method of `_Stream`: the traceback of an error that
    it lets through would keep the stream, and with it the call, alive.

    A task that is cancelled while its call fails gets gRPC's error and no CancelledError: a loop that then tries again
    would never end."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        found = await message
    except grpc.aio.AioRpcError:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError from None
        raise
    if found is not None:
        return found
    call.cancel()
    nothing = grpc.aio.Metadata()
    raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "the peer's answer cannot be read")


class _Stream:
    """A streaming call that is cancelled when the last reference to it goes; an answer that is no message fails it.

    grpc.aio's own call object and its iterator refer to each other, so it alone would go on until the next collection.
    """

    __slots__ = ("__weakref__", "_call", "_finalizer", "_iterator")

    def __init__(self, call: Any) -> None:
        self._call = call
        self._iterator: AsyncIterator[Any] | None = None
        self._finalizer = weakref.finalize(self, call.cancel)
        self._finalizer.atexit = False

    def __aiter__(self) -> _Stream:
        return self

    def __anext__(self) -> Any:
        if self._iterator is None:
            self._iterator = self._call.__aiter__()
        return _readable(self._iterator.__anext__(), self._call)

    def read(self) -> Any:
        return _readable(self._call.read(), self._call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
