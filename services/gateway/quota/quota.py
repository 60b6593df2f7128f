"""Quota: what requests take of their tenants' limits, together with all other gateways.

Each tenant is owned by one gateway, which counts for all. The owner's own requests, and those of tenants without
limits, are decided here at once; for others the owner is asked over a stream (link.py, service.py). While it cannot be
asked a gateway counts for itself, up to its part of the limit.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc

from common.errors import Cancelled, DeadlineExceeded, EpdError, PermissionDenied
from common.policies.limits import Amounts
from common.registry.record import GatewayRecord
from services.gateway.quota.ledger import Ledger
from services.gateway.quota.link import Link, Unsettled
from services.gateway.quota.members import Members

_OVERLOADED = 429  # errors from here on are no fault of the client's


class Quota:
    """connect: a channel to another gateway's QuotaService."""

    def __init__(
        self, ledger: Ledger, connect: Callable[[GatewayRecord], grpc.aio.Channel], answer_seconds: float
    ) -> None:
        self.ledger = ledger
        self.members: Members = ledger.members
        self._connect = connect
        self._answer_seconds = answer_seconds
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.members.on_change(self._changed)

    def use(self, tenant: str) -> "Use":
        """What one request takes: a context, at whose end it is given back as far as it was not used."""
        return Use(self, tenant)

    async def take(self, tenant: str, amounts: Amounts) -> Amounts:
        """What of it is bounded, and taken now: for `release`. Raises RateLimited, NeverFits, Overloaded."""
        amounts = self.ledger.limits(tenant).counted(amounts)
        if not amounts:
            return amounts
        mine, owner = self.members.mine.gateway_id, self.members.owner(tenant)
        if owner == mine:
            self.ledger.take(tenant, amounts, mine)
            return amounts
        link = self._links.get(owner)
        try:
            if link is None:
                raise Unsettled
            await link.acquire(tenant, amounts)
        except Unsettled:
            self.ledger.take_share(tenant, amounts)
            if link is not None:
                link.charge(tenant, amounts)
        else:
            self.ledger.add(tenant, amounts)
        return amounts

    def release(self, tenant: str, amounts: Amounts, at: float) -> None:
        """Ends holds; gives back what was taken at `at` and not used."""
        if amounts:
            self.ledger.release(tenant, amounts, at)
            link = self._links.get(self.members.owner(tenant))
            if link is not None:
                link.release(tenant, amounts, at)

    def shares_with(self, gateway: str) -> bool:
        """Whether the stream to another gateway is open."""
        return gateway in self._links and self._links[gateway].open

    async def close(self) -> None:
        for name in list(self._links):
            self._close(name)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _changed(self) -> None:
        others = self.members.others
        for name, link in list(self._links.items()):
            if others.get(name) != link.record:
                self._close(name)
        for name, record in others.items():
            if name not in self._links:
                self._links[name] = Link(record, self.ledger, self._connect(record), self._answer_seconds)
        self.ledger.forget_others()
        for link in self._links.values():
            link.settle()

    def _close(self, name: str) -> None:
        task = asyncio.create_task(self._links.pop(name).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class Use:
    """One request. Holds end with it; what it was charged is given back when it failed and that was not its fault."""

    def __init__(self, quota: Quota, tenant: str) -> None:
        self._quota, self._tenant = quota, tenant
        self._taken: list[tuple[Amounts, float]] = []

    async def admit(self, priority: int) -> None:
        """One more request, in flight until the end. Raises RateLimited, and PermissionDenied for its priority."""
        most = self._quota.ledger.limits(self._tenant).max_priority
        if most is not None and priority > most:
            raise PermissionDenied(f"this tenant's requests have a priority of {most} at most", field="priority")
        await self._take(Amounts(requests=1, in_flight=1))

    async def prompt(self, tokens: int, pixels: int) -> None:
        """Raises RateLimited, NeverFits."""
        await self._take(Amounts(prompt_tokens=tokens, image_pixels=pixels))

    async def _take(self, amounts: Amounts) -> None:
        at = self._quota.ledger.clock()
        self._taken.append((await self._quota.take(self._tenant, amounts), at))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        unused = _unused(error)
        for amounts, at in self._taken:
            self._quota.release(self._tenant, amounts if unused else Amounts(in_flight=amounts.in_flight), at)
        self._taken = []


def _unused(error: BaseException | None) -> bool:
    """Whether a request that ended so got nothing: refused or failed, not given up by its client, not wrong itself."""
    if isinstance(error, EpdError):
        return error.http >= _OVERLOADED and not isinstance(error, Cancelled | DeadlineExceeded)
    return isinstance(error, Exception)
