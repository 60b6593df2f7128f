"""What every incoming call goes through: deadline and trace context in, errors as statuses out."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
from grpc._cython import cygrpc

from common import telemetry
from common.errors import EpdError, InvalidArgument
from common.rpc import deadline
from common.rpc.access import Access
from common.rpc.errors import from_exception, to_metadata
from common.rpc.peer_name import set_caller
from common.telemetry import Telemetry

_log = logging.getLogger(__name__)
_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}
_INTERNAL = EpdError("internal error; see the log of the service")


class ServerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Sets the handler's deadline and trace context, and answers its exceptions with the right status.

    It makes no span itself: the handler's own (`prefill.run`, ...) is the server's span. access: by which every call is
    checked first.
    """

    def __init__(self, owner: Telemetry | None = None, access: Access | None = None) -> None:
        self._telemetry = owner
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        # gRPC runs this in a fresh context and the handler in the same one.
        owner = self._telemetry or telemetry.current()
        owner.attach(telemetry.extract(handler_call_details.invocation_metadata or ()))
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        name, make = _KINDS[handler.request_streaming, handler.response_streaming]
        behavior = getattr(handler, name)
        # gRPC would answer a message that cannot be parsed with UNKNOWN and the parser's words, so it is parsed here.
        parse = _parser(handler.request_deserializer, streaming=handler.request_streaming)
        if inspect.isasyncgenfunction(behavior):
            guarded: Callable[..., Any] = _guard_generator(behavior, parse, handler_call_details.method, self._access)
        elif inspect.iscoroutinefunction(behavior):
            guarded = _guard_coroutine(behavior, parse, handler_call_details.method, self._access)
        elif self._access is not None:
            raise TypeError(f"{handler_call_details.method} is of a kind that cannot be checked")
        else:
            return handler
        return make(guarded, None, handler.response_serializer)


def _parser(deserialize: Callable[[bytes], Any] | None, *, streaming: bool) -> Callable[[Any], Any]:
    """From what gRPC hands over, bytes or an iterator of them, to what the handler takes."""

    def parse(message: bytes) -> Any:
        try:
            return message if deserialize is None else deserialize(message)
        except Exception:
            raise InvalidArgument("the message is not what this method takes, or is damaged") from None

    async def parse_all(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            yield parse(message)

    return parse_all if streaming else parse


def _guard_generator(
    behavior: Callable[..., AsyncIterator[Any]], parse: Callable[[Any], Any], method: str, access: Access | None
) -> Callable[..., AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        deadline.set_remaining(context.time_remaining())
        try:
            if access is not None:
                set_caller(access.check(method, context))
            async with aclosing(behavior(parse(request), context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except (Exception, asyncio.CancelledError) as error:
            await _answer(error, context, method)

    return guarded


def _guard_coroutine(
    behavior: Callable[..., Awaitable[Any]], parse: Callable[[Any], Any], method: str, access: Access | None
) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        deadline.set_remaining(context.time_remaining())
        try:
            if access is not None:
                set_caller(access.check(method, context))
            return await behavior(parse(request), context)
        except (Exception, asyncio.CancelledError) as error:
            await _answer(error, context, method)

    return guarded


async def _answer(error: BaseException, context: Any, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, cygrpc.ExecuteBatchError):
        raise asyncio.CancelledError from None  # the call is over, and nobody there to hear more
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error  # this call itself was cancelled; otherwise one that the handler made was, and the caller must hear
    found = from_exception(error, out_of_time=deadline.remaining() == 0.0)
    if found is None:
        _log.error("%s failed with %s", method, type(error).__name__, exc_info=error)
        found = _INTERNAL
    telemetry.current().metrics.call_errors.labels(method=method, reason=found.reason).inc()
    try:
        await context.abort(found.status, found.message, to_metadata(found))
    except cygrpc.ExecuteBatchError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")
