"""Requests of the models of one set of workers that wait at the gateway for room, and whose turn it is."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import Overloaded
from common.metrics import Metrics
from common.policies import refusal
from common.policies.fairness import FairQueue, Waiting
from common.policies.routing import RouteRequest
from common.rpc import deadline
from services.gateway.observe import TenantLabels
from services.gateway.settings import GatewaySettings


@dataclass(slots=True, eq=False, kw_only=True)
class Ask:
    """What one leg of a request wants of the planner.

    wanted: what to ask the routing policy for, the next only when the one before has no answer. wait_seconds: for a
    worker to turn up; hold_seconds: for room. prompt_tokens: resumed output included. resumed: the request has been at
    workers before. queued_seconds: how long it waited for room, for its time line.
    """

    model: str
    tenant: str
    prompt_tokens: int
    priority: int
    wanted: tuple[RouteRequest, ...]
    wait_seconds: float
    hold_seconds: float
    resumed: bool
    queued_seconds: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter(Waiting):
    """An `Ask` in the queue. `woken`: it is its turn, or `refused` says why it waits no longer."""

    ask: Ask
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    refused: Overloaded | None = None


class Queue:
    """The fair queue of one set of workers, with its bounds. `turn`: who was told to go and has not gone yet."""

    def __init__(
        self, settings: GatewaySettings, metrics: Metrics, labels: TenantLabels, weight: Callable[[str], float]
    ) -> None:
        self.fair = FairQueue(settings.fairness, weight)
        self.turn: Waiter | None = None
        self._rate = refusal.ServiceRate()
        self._settings = settings
        self._metrics = metrics
        self._labels = labels
        self._now = asyncio.get_running_loop().time

    def __len__(self) -> int:
        return len(self.fair)

    def enter(self, ask: Ask) -> Waiter:
        """Raises Overloaded, with a hint, for a new request that would wait for too long, or is more than may wait."""
        now = self._now()
        waiter = Waiter(ask.tenant, ask.prompt_tokens, now, ask.priority, ask.resumed, ask=ask)
        if not ask.resumed:
            self._refuse_in_time(waiter, now)
            self._make_room(waiter)
        self.fair.push(waiter)
        self._rate.waits(now)
        self._count(waiter, 1)
        return waiter

    def leave(self, waiter: Waiter, *, served: bool) -> None:
        now = self._now()
        self.fair.remove(waiter)
        self._count(waiter, -1)
        if served:
            self._rate.served(now, waiter.tokens)
        if not self.fair:
            self._rate.empty(now)
        if self.turn is waiter:
            self.turn = None

    def full(self, waiter: Waiter) -> Overloaded:
        """For one that has waited for as long as it may."""
        self._refused(waiter.tenant, "no room in time")
        wait = self._wait_seconds(waiter, self._now())
        return Overloaded("every worker is full", retry_after_seconds=refusal.hint(1.0 if wait is None else wait))

    def _refuse_in_time(self, waiter: Waiter, now: float) -> None:
        settings = self._settings
        if settings.refuse_by == "never":
            return
        left = deadline.remaining()
        limit = min(waiter.ask.hold_seconds, math.inf if left is None else left)
        if settings.refuse_by == "slo":
            limit = min(limit, settings.slo_target(waiter.ask.model, waiter.tenant).ttft_seconds)
        wait = self._wait_seconds(waiter, now)
        if wait is not None and (found := refusal.refuse(wait, limit)):
            self._refused(waiter.tenant, "too long to wait")
            raise Overloaded(
                f"the request would wait for {found.wait_seconds:.1f} s; it can for {limit:.1f} s",
                retry_after_seconds=found.retry_after_seconds,
            )

    def _wait_seconds(self, waiter: Waiter, now: float) -> float | None:
        """None: not known."""
        first = next(self.fair.in_order(), None)
        if first is None:
            return 0.0
        rate = self._rate.tokens_per_second(now, first.tokens)
        if rate is None:
            return None
        return refusal.wait_seconds(*self.fair.ahead(waiter), self.fair.share(waiter.tenant), rate)

    def _make_room(self, newcomer: Waiter) -> None:
        bound = self._settings.max_queued_tokens
        leaving = self.fair.to_leave(newcomer, bound) if bound else []
        too_much = f"more than {bound} prompt tokens wait for room"
        if leaving is None:
            self._refused(newcomer.tenant, "queue full")
            wait = self._wait_seconds(newcomer, self._now())
            raise Overloaded(too_much, retry_after_seconds=refusal.hint(wait or 1.0))
        for each in leaving:
            assert isinstance(each, Waiter)
            if each.refused is None:
                self._refused(each.tenant, "queue full")
                each.refused = Overloaded(too_much, retry_after_seconds=refusal.hint(1.0))
                each.woken.set()

    def _refused(self, tenant: str, cause: str) -> None:
        self._metrics.queue_refusals.labels(tenant=self._labels(tenant), cause=cause).inc()

    def _count(self, waiter: Waiter, sign: int) -> None:
        tenant = self._labels(waiter.tenant)
        self._metrics.queued_requests.labels(tenant=tenant).inc(sign)
        self._metrics.queued_tokens.labels(tenant=tenant).inc(sign * waiter.tokens)
