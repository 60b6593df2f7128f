"""The tokens of all calls to one decode worker, in one stream: a message an engine step instead of one a token."""

import asyncio
import contextlib
import itertools
import logging
import random
import secrets
from collections.abc import Callable, Iterable

import grpc

from epd.v1 import decode_pb2, decode_pb2_grpc, types_pb2

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS = 0.05
_LAST_BACKOFF_SECONDS = 2.0
_FIRST_SECONDS = 5.0  # for the first, empty message
OnTokens = Callable[[Iterable[types_pb2.ChoiceTokens]], None]


class TokenRoute:
    """Where one call's tokens go. `lost` is called when the stream ends before the call has."""

    __slots__ = ("lost", "subscription", "tokens")

    def __init__(self, subscription: decode_pb2.Subscription, tokens: OnTokens, lost: Callable[[], None]) -> None:
        self.subscription, self.tokens, self.lost = subscription, tokens, lost


class TokenStream:
    """Kept open while its worker is known. While it is not there calls bring their tokens themselves."""

    def __init__(self, stub: decode_pb2_grpc.DecodeServiceStub, name: str) -> None:
        self._stub = stub
        self._name = name
        self._subscriber = b""  # empty: no stream
        self._routes: dict[int, TokenRoute] = {}
        self._tags = itertools.count(1)
        self._task = asyncio.create_task(self._keep(), name=f"tokens-{name}")

    def attach(self, tokens: OnTokens, lost: Callable[[], None]) -> TokenRoute | None:
        """A route for a new call, or None while there is no stream. `detach` it when the call has ended."""
        if not self._subscriber:
            return None
        tag = next(self._tags)
        route = TokenRoute(decode_pb2.Subscription(subscriber=self._subscriber, tag=tag), tokens, lost)
        self._routes[tag] = route
        return route

    def detach(self, route: TokenRoute) -> None:
        self._routes.pop(route.subscription.tag, None)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            worked = False
            try:
                worked = await self._follow()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
            except TimeoutError:
                _log.warning("worker %s opens no token stream", self._name)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            except Exception:  # whatever a foreign peer sent: this worker only, and not for good
                _log.exception("token stream of worker %s failed", self._name)
            backoff = _FIRST_BACKOFF_SECONDS if worked else min(_LAST_BACKOFF_SECONDS, 2 * backoff)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _follow(self) -> bool:
        """Reads one stream to its end; whether it ever worked."""
        subscriber = secrets.token_bytes(16)
        stream = self._stub.Subscribe(decode_pb2.SubscribeRequest(subscriber=subscriber))
        try:
            async with asyncio.timeout(_FIRST_SECONDS):
                message = await stream.read()
            while message is not grpc.aio.EOF:
                self._subscriber = subscriber
                for call in message.calls:
                    route = self._routes.get(call.tag)  # none: it has ended meanwhile
                    if route is not None:
                        self._hand_over(route, call.choices)
                message = await stream.read()
            return bool(self._subscriber)
        finally:
            stream.cancel()
            self._subscriber = b""
            routes, self._routes = self._routes, {}
            for route in routes.values():
                route.lost()

    def _hand_over(self, route: TokenRoute, choices: Iterable[types_pb2.ChoiceTokens]) -> None:
        try:
            route.tokens(choices)
        except Exception:  # one call's fault ends that call, not the others'
            _log.exception("tokens of a call to worker %s could not be taken", self._name)
            with contextlib.suppress(Exception):
                route.lost()
