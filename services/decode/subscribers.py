"""Token streams to gateways: what all calls of one gateway have produced goes out in one message.

A stream a request costs both sides a message a token; with one a gateway it is one an engine step (docs/adr/0005).
"""

import asyncio
from collections.abc import Callable

from common.errors import DuplicateRequest, NotReady
from common.sampling import ChoiceTokens

MAX_SUBSCRIBERS = 256


class Subscriber:
    """One gateway's stream. Tokens are kept by call until the stream takes them."""

    def __init__(self) -> None:
        self.lost = False
        self._pending: dict[int, list[ChoiceTokens]] = {}
        self._wake: asyncio.Future[None] | None = None
        self._on_lost: dict[int, Callable[[], None]] = {}

    def join(self, tag: int, on_lost: Callable[[], None]) -> None:
        """Raises DuplicateRequest while a call with this tag runs, NotReady when the stream has ended."""
        if self.lost:
            raise NotReady("the subscriber's stream has ended")
        if tag in self._on_lost:
            raise DuplicateRequest("a call with this tag is running")
        self._on_lost[tag] = on_lost

    def leave(self, tag: int) -> None:
        self._on_lost.pop(tag, None)

    def put(self, tag: int, tokens: list[ChoiceTokens]) -> None:
        self._pending.setdefault(tag, []).extend(tokens)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def take(self) -> dict[int, list[ChoiceTokens]]:
        """Tokens by tag, waiting for some. All calls that had a token in one step have put it before this returns."""
        while not self._pending:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        pending, self._pending = self._pending, {}
        return pending

    def close(self) -> None:
        """The stream ended: calls that rely on it fail."""
        self.lost = True
        for on_lost in list(self._on_lost.values()):
            on_lost()


class Subscribers:
    """By id; an id is good for one stream."""

    def __init__(self) -> None:
        self._open: dict[bytes, Subscriber] = {}

    def open(self, subscriber: bytes) -> Subscriber:
        """Raises DuplicateRequest for an id in use, NotReady beyond the bound."""
        if subscriber in self._open:
            raise DuplicateRequest("this subscriber has a stream")
        if len(self._open) >= MAX_SUBSCRIBERS:
            raise NotReady(f"at most {MAX_SUBSCRIBERS} subscribers", retry_after_seconds=1.0)
        found = self._open[subscriber] = Subscriber()
        return found

    def get(self, subscriber: bytes) -> Subscriber:
        """Raises NotReady for one without a stream."""
        found = self._open.get(subscriber)
        if found is None:
            raise NotReady("no stream of this subscriber is open here")
        return found

    def close(self, subscriber: bytes) -> None:
        self._open.pop(subscriber).close()
