"""Whom a load is sent to: what both ways in, gRPC and HTTP, have to offer."""

import random
from typing import Any, Protocol

from common.models.pictures import draw
from services.bench.clock import Clock
from services.bench.outcome import Outcome
from services.bench.workload import Ask

QUESTION = "What is in the picture? Say it in other words:"


class Target(Protocol):
    """model: whom the requests are for. context: tokens of prompt and output together, 0 where nobody says it."""

    model: str
    context: int

    def request(self, ask: Ask) -> Any:
        """What `send` takes, made beforehand: it costs time that a request's clock must not count."""
        ...

    async def send(self, request: Any, outcome: Outcome, clock: Clock) -> None:
        """Ask, and fill in what is seen. Raises EpdError for whatever goes wrong."""
        ...


def picture(ask: Ask) -> bytes:
    """A PNG file, another one for every request."""
    return draw(random.Random(f"{ask.seed} {ask.load} {ask.number}").getrandbits(40)).png()
