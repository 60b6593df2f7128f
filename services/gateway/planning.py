"""Which workers an attempt goes to: the routing policy over the fleet, as it is or as it soon will be."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable

from opentelemetry.trace import Span

from common import telemetry
from common.errors import Overloaded
from common.policies.routing import Hold, Plan, RouteRequest, Score, route
from common.telemetry import Telemetry
from services.gateway.fleet import Fleet, no_workers
from services.gateway.settings import GatewaySettings

_SPAN_CANDIDATES = 16  # scores on a span


class Planner:
    """Waits, bounded, for a routable worker, and for room while every decode worker is full.

    Those that wait for room go in the order of their arrival: a small request does not overtake a large one, or the
    large one might never find room.
    """

    def __init__(self, fleet: Fleet, settings: GatewaySettings, tel: Telemetry) -> None:
        self._fleet = fleet
        self._settings = settings
        self._telemetry = tel
        self._held: defaultdict[str, deque[object]] = defaultdict(deque)  # by model

    def held(self, model: str) -> int:
        """Requests that wait for room."""
        return len(self._held[model])

    async def plan(self, model: str, wanted: Iterable[RouteRequest], wait_seconds: float, span: Span) -> Plan:
        """wanted: what to ask the policy for, the next only when the one before has no answer. wait_seconds: for a
        worker to turn up. Raises NoWorkers, and Overloaded when there was no room for too long."""
        loop = asyncio.get_running_loop()
        wanted = tuple(wanted)
        begin = loop.time()
        me = object()
        line = self._held[model]
        try:
            while True:
                found = self._route(model, wanted)
                first = not line or line[0] is me
                if isinstance(found, Plan) and (first or found.kind != "disaggregated"):
                    self._describe(span, model, found)
                    return found
                if found is None:
                    if not await self._changed(begin + wait_seconds):
                        raise no_workers(model)
                    continue
                if me not in line:
                    line.append(me)
                if not await self._changed(begin + self._settings.hold_seconds):
                    raise Overloaded("every decode worker is full", retry_after_seconds=1.0)
        finally:
            if me in line:
                line.remove(me)
                self._fleet.note_load()  # the next in line looks again

    def _route(self, model: str, wanted: tuple[RouteRequest, ...]) -> Plan | Hold | None:
        workers = self._fleet.snapshot(model)
        for request in wanted:
            found = route(workers, request, self._settings.routing)
            if found is not None:
                return found
        return None

    async def _changed(self, end: float) -> bool:
        """False when nothing has changed by then."""
        try:
            async with asyncio.timeout_at(end):
                await self._fleet.load_changed()
        except TimeoutError:
            return False
        return True

    def _describe(self, span: Span, model: str, plan: Plan) -> None:
        span.set_attribute(telemetry.ROUTE_DECISION, f"{plan.kind} ({plan.reason})")
        span.set_attribute(telemetry.ROUTE_CANDIDATES, [_words(score) for score in plan.scores[:_SPAN_CANDIDATES]])
        self._telemetry.metrics.decisions.labels(model=model, decision=plan.kind).inc()


def _words(score: Score) -> str:
    return f"{score.role} {score.worker_id}: cost {score.cost:.0f}, uncached {score.uncached_tokens}"
