"""Which workers an attempt goes to, and when: the routing policy over the fleet, as it is or as it soon will be."""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import Span

from common import telemetry
from common.policies.routing import DECODE, PREFILL, Hold, Plan, Score, WorkerView, route
from common.telemetry import Telemetry
from services.gateway.accounting import AttemptRecord
from services.gateway.fleet import Fleet
from services.gateway.observe import TenantLabels
from services.gateway.queue import Ask, Queue, Waiter
from services.gateway.settings import GatewaySettings

_SPAN_CANDIDATES = 16  # scores on a span
_LOOK_AHEAD = 8  # requests that are asked about when the first in the queue must wait


@dataclass(slots=True, eq=False)
class _Sent:
    """A prompt at its worker, until the first token has come."""

    worker_id: str
    tokens: int
    record: AttemptRecord
    encodes: bool  # its images go first

    @property
    def encoding(self) -> bool:
        return self.encodes and not self.record.called


class Planner:
    """Waits, bounded, for a routable worker, and for room while every worker is full.

    Room is a decode worker's blocks, and a prefill worker to which fewer than `routing.dispatch_tokens` prompt tokens
    have been sent that it has not computed: so the order is decided here, where it can still change. Who is first in
    the order waits until there is room for it; a small request does not take the room that a large one waits for, or
    the large one might never find any. `weight`: a tenant's share.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: GatewaySettings,
        tel: Telemetry,
        weight: Callable[[str], float] = lambda tenant: 1.0,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._telemetry = tel
        self.weight = weight
        self._labels = TenantLabels(settings.max_tenants)
        self._queues: dict[str, Queue] = {}  # by the set of workers
        self._sent: set[_Sent] = set()
        self._watching: asyncio.Task[None] | None = None

    def held(self, model: str) -> int:
        """Requests that wait for room."""
        return len(self._queue(model))

    async def plan(self, ask: Ask, span: Span) -> Plan:
        """Raises NoWorkers, and Overloaded when there is no room in time."""
        begin = asyncio.get_running_loop().time()
        while True:
            queue, found = self._queue(ask.model), self._route(ask)
            waits = found is not None and (bool(queue) or isinstance(found, Hold))
            if waits:
                found = await self._wait(queue, ask, begin)
            if isinstance(found, Plan):
                if not ask.resumed:
                    queue.fair.admit(ask.tenant, _uncached(found), waited=waits)
                self._describe(span, ask.model, found)
                return found
            if not await self._changed(begin + ask.wait_seconds):
                raise self._fleet.no_workers(ask.model, ask.wanted[0].adapter)

    @contextlib.contextmanager
    def sent(self, ask: Ask, plan: Plan, record: AttemptRecord, *, encodes: bool) -> Iterator[None]:
        """While an attempt runs. Enter it as soon as there is a plan. encodes: images come before the prompt."""
        worker = plan.prefill or plan.decode
        assert worker is not None
        tokens = _uncached(plan)
        each = _Sent(worker.worker_id, tokens, record, encodes)
        self._sent.add(each)
        try:
            yield
        finally:
            self._sent.discard(each)
            queue = self._queue(ask.model)
            if record.first and not ask.resumed:  # what it took from a cache is known now
                queue.fair.counters.prompt(ask.tenant, ask.prompt_tokens - record.cached_tokens - tokens)
            self._dispatch(queue)

    def receiver(self, model: str, tenant: str) -> Callable[[int], None]:
        """To be told how many output tokens have come, whenever some have."""
        queue = self._queue(model)
        counters = queue.fair.counters

        def received(tokens: int) -> None:
            counters.output(tenant, tokens)
            if queue and any(each.record.first for each in self._sent):
                self._dispatch(queue)

        return received

    # --- the queue --------------------------------------------------------------------------------------------------

    def _queue(self, model: str) -> Queue:
        """Models that share workers wait in one queue."""
        records = (worker.record for worker in self._fleet.all())
        name = min(
            (each.model for each in records if model in each.names and {PREFILL, DECODE} & set(each.roles)),
            default=model,
        )
        if name not in self._queues:
            self._queues[name] = Queue(
                self._settings, self._telemetry.metrics, self._labels, lambda tenant: self.weight(tenant)
            )
        return self._queues[name]

    async def _wait(self, queue: Queue, ask: Ask, begin: float) -> Plan | None:
        """Until it is its turn and there is room. None: its workers have gone. Raises Overloaded."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        found: Plan | Hold | None = None
        waiter = queue.enter(ask)
        try:
            with telemetry.start_span(telemetry.GATEWAY_QUEUE):
                while True:
                    self._dispatch(queue)
                    self._watch()
                    try:
                        async with asyncio.timeout_at(begin + ask.hold_seconds):
                            await waiter.woken.wait()
                    except TimeoutError:
                        raise queue.full(waiter) from None
                    if waiter.refused is not None:
                        raise waiter.refused
                    found = self._route(ask)
                    if not isinstance(found, Hold):
                        return found
                    waiter.woken.clear()  # the room has gone to somebody else
                    queue.turn = None
        finally:
            ask.queued_seconds += loop.time() - since
            queue.leave(waiter, served=isinstance(found, Plan))
            # When the caller has told the worker's counts: the next one must see them.
            loop.call_soon(self._dispatch, queue)

    def _dispatch(self, queue: Queue) -> None:
        """Tells the first that can go that it is its turn; it asks again then."""
        if queue.turn is not None or not queue:
            return
        blocked: set[str] = set()  # models whose first request waits for decode's room
        for waiter in itertools.islice(queue.fair.in_order(), _LOOK_AHEAD):
            assert isinstance(waiter, Waiter)
            found = self._route(waiter.ask)
            if isinstance(found, Hold):
                if found.role == DECODE:
                    blocked.add(waiter.ask.model)
            elif found is None or found.kind != "disaggregated" or waiter.ask.model not in blocked:
                queue.turn = waiter
                waiter.woken.set()
                return

    def _watch(self) -> None:
        """Looks again at every change of a worker's load, as long as something waits."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._keep_watching(), name="queue")

    async def _keep_watching(self) -> None:
        while any(self._queues.values()):
            await self._fleet.load_changed()
            for queue in self._queues.values():
                self._dispatch(queue)

    # --- routing ----------------------------------------------------------------------------------------------------

    def _route(self, ask: Ask) -> Plan | Hold | None:
        workers = self._views(ask.model)
        for request in ask.wanted:
            found = route(workers, request, self._settings.routing)
            if found is not None:
                return found
        return None

    def _views(self, model: str) -> list[WorkerView]:
        """The fleet's, with what is on its way from here."""
        views = self._fleet.snapshot(model)
        self._sent = {each for each in self._sent if not each.record.first}
        if not self._sent:
            return views
        queued: Counter[str] = Counter()
        encoding: Counter[str] = Counter()
        longest: Counter[str] = Counter()
        for each in self._sent:
            if each.encoding:
                encoding[each.worker_id] += each.tokens
            else:
                queued[each.worker_id] += each.tokens
                longest[each.worker_id] = max(longest[each.worker_id], each.tokens)
        return [
            msgspec.structs.replace(
                view,
                # What the worker reports may lack what is on its way there, but tells how much is left of a long one.
                queued_tokens=queued[view.worker_id] - max(0, longest[view.worker_id] - view.pending_prefill_tokens),
                encoding_tokens=encoding[view.worker_id],
            )
            for view in views
        ]

    async def _changed(self, end: float) -> bool:
        """False when no worker has come or gone by then."""
        try:
            async with asyncio.timeout_at(end):
                await self._fleet.changed()
        except TimeoutError:
            return False
        return True

    def _describe(self, span: Span, model: str, plan: Plan) -> None:
        span.set_attribute(telemetry.ROUTE_DECISION, f"{plan.kind} ({plan.reason})")
        span.set_attribute(telemetry.ROUTE_CANDIDATES, [_words(score) for score in plan.scores[:_SPAN_CANDIDATES]])
        self._telemetry.metrics.decisions.labels(model=model, decision=plan.kind).inc()


def _uncached(plan: Plan) -> int:
    """Prompt tokens that the plan's worker is thought to compute."""
    worker, role = (plan.prefill, "prefill") if plan.prefill else (plan.decode, "local")
    assert worker is not None
    found = (each.uncached_tokens for each in plan.scores if (each.worker_id, each.role) == (worker.worker_id, role))
    return next(found, 0)


def _words(score: Score) -> str:
    return f"{score.role} {score.worker_id}: cost {score.cost:.0f}, uncached {score.uncached_tokens}"
