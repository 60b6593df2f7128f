"""Plan, attempt, and after a failure plan again: the client sees one unbroken stream.

Leg 0 carries all choices. When an attempt fails after tokens have come, each unfinished choice goes on as a leg of its
own (leg = 1 + choice), since their outputs differ by then; the tokens received so far go along as its output.
"""

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Sequence
from typing import Any

from common import telemetry
from common.errors import EpdError, Overloaded, WorkerLost
from common.policies.encoding import ENCODE
from common.policies.retry_budget import RetryBudget
from common.policies.routing import Plan, WorkerView
from common.tasks import together
from common.telemetry import Telemetry
from epd.v1 import types_pb2
from services.gateway.accounting import AttemptRecord
from services.gateway.attempt import Attempt, Turn
from services.gateway.call import CallFailed
from services.gateway.choice import Choice
from services.gateway.encoding import Encoding
from services.gateway.fleet import Fleet
from services.gateway.outbox import Outbox
from services.gateway.planning import Planner
from services.gateway.preprocess import Prepared
from services.gateway.queue import Ask
from services.gateway.race import HEDGE_LEG, Race
from services.gateway.settings import GatewaySettings
from services.gateway.worker import Worker

_LONGEST_BACKOFF_SECONDS = 1.0
_LONGEST_HINT_SECONDS = 5.0


class Orchestrator:
    """Shared by all requests; what belongs to one lives in `_Leg`."""

    def __init__(self, fleet: Fleet, settings: GatewaySettings, tel: Telemetry) -> None:
        self.fleet = fleet
        self.settings = settings
        self.telemetry = tel
        self.planner = Planner(fleet, settings, tel)
        self._budgets: dict[str, RetryBudget] = {}  # by model, of which there are as many as are served

    async def run(self, request: Prepared, choices: Sequence[Choice], outbox: Outbox) -> None:
        """Returns when every choice has ended. Raises the error that no further attempt could mend."""
        self._budget(request.model).asked(asyncio.get_running_loop().time())
        received = self.planner.receiver(request.model, request.tenant)
        for choice in choices:
            choice.on_tokens = received
        await _Leg(self, request, outbox, 0, list(choices), 1).run()

    def may_retry(self, model: str, *, resume: bool = False) -> bool:
        """Whether the budget has one more attempt, which is then spent. resume: of a stream with tokens."""
        if self._budget(model).take(asyncio.get_running_loop().time(), resume=resume):
            return True
        self.telemetry.metrics.retries_refused.labels(model=model).inc()
        return False

    def _budget(self, model: str) -> RetryBudget:
        return self._budgets.setdefault(model, RetryBudget(self.settings.retries))


class _Leg:
    """The attempts, one after the other, for some of a request's choices."""

    def __init__(
        self,
        mesh: Orchestrator,
        request: Prepared,
        outbox: Outbox,
        number: int,
        choices: list[Choice],
        attempt: int,
        *,
        exclude: frozenset[str] = frozenset(),
        prefer_prefill: str = "",
    ) -> None:
        self._mesh = mesh
        self._request = request
        self._outbox = outbox
        self._number = number
        self._choices = choices
        self._attempt = attempt
        self._exclude = exclude
        self._prefer_prefill = prefer_prefill
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        while True:
            record = AttemptRecord(attempt=self._attempt, started=self._loop.time())
            for choice in self._choices:
                choice.records.append(record)
            try:
                await self._try(record)
                return
            except CallFailed as failure:
                self._choices[0].records[-1].failed = self._loop.time()  # of the attempt that spoke last
                await self._after(failure)
            if self._number == 0 and any(choice.output_token_ids for choice in self._choices):
                await self._go_on_apart()
                return

    async def _try(self, record: AttemptRecord) -> None:
        """One attempt, with a second one beside it when a worker falls silent before there is a token."""
        hedges, model = self._mesh.telemetry.metrics.hedges, self._request.model
        race = Race(
            record,
            self._beside,
            ended=lambda outcome: hedges.labels(model=model, outcome=outcome).inc(),
            won=self._add_record,
        )
        failed: CallFailed | None = None
        try:
            try:
                await self._once(record, self._number, race.turn, race)
            except CallFailed as failure:
                failed = failure
            await race.settle(failed)
        finally:
            await race.close()

    def _add_record(self, record: AttemptRecord) -> None:
        for choice in self._choices:
            choice.records.append(record)

    def _beside(self, turn: Turn, silent: Worker) -> tuple[AttemptRecord, Coroutine[Any, Any, None]] | None:
        mesh = self._mesh
        if self._attempt >= mesh.settings.max_attempts or not mesh.fleet.can_replace(silent):
            return None
        if not mesh.may_retry(self._request.model, resume=self._resumes):
            return None
        self._attempt += 1
        record = AttemptRecord(attempt=self._attempt, started=self._loop.time())
        return record, self._second(record, turn)

    async def _second(self, record: AttemptRecord, turn: Turn) -> None:
        try:
            await self._once(record, self._number | HEDGE_LEG, turn)
        except CallFailed as failure:
            self._note_failure(failure)
            raise

    async def _once(self, record: AttemptRecord, leg: int, turn: Turn, race: Race | None = None) -> None:
        """race: of the first attempt."""
        ask = self._ask(record.attempt, wait=race is not None)
        plan = await self._plan(ask, record)
        fleet = self._mesh.fleet
        prefill, decode = _worker(fleet, plan.prefill), _worker(fleet, plan.decode)
        if (plan.prefill and not prefill) or (plan.decode and not decode):
            raise fleet.no_workers(
                self._request.model, self._request.adapter
            )  # cannot be: the snapshot is of this very moment
        record.prefill_worker = plan.prefill.worker_id if plan.prefill else ""
        record.decode_worker = plan.decode.worker_id if plan.decode else ""
        key = types_pb2.RequestKey(request_id=self._request.internal_id, leg=leg, attempt=record.attempt)
        uncached = {(score.worker_id, score.role): score.uncached_tokens for score in plan.scores}
        computing = prefill or decode
        assert computing is not None
        tokens = uncached.get((computing.worker_id, "prefill" if prefill else "local"), 0)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._mesh.planner.sent(ask, plan, record, encodes=bool(self._request.media)))
            stack.enter_context(computing.charge(tokens=tokens))
            stack.enter_context(fleet.pairs.use(prefill, decode))
            if decode is not None:
                length = len(self._request.prompt) + self._output_tokens
                blocks = -(-length // decode.record.layout.block_size) + len(self._choices)
                stack.enter_context(decode.charge(blocks=blocks))
            encoding = Encoding(self._request, key, record, self._mesh, computing, self._exclude)
            async with encoding.embeddings() as embeddings:
                attempt = Attempt(
                    self._request,
                    key,
                    self._choices,
                    record,
                    self._outbox,
                    self._mesh.settings,
                    prefill=prefill,
                    decode=decode,
                    embeddings=embeddings,
                    encoders=encoding.workers,
                    turn=turn,
                )
                if race is not None:
                    workers = [each for each in (prefill, decode, *encoding.workers) if each is not None]
                    stack.enter_context(race.watching(attempt, workers))
                await attempt.run()
            if prefill is not None and decode is not None:
                fleet.pairs.worked(prefill, decode, record.started)

    @property
    def _output_tokens(self) -> int:
        return len(self._choices[0].output_token_ids) if len(self._choices) == 1 else 0

    @property
    def _resumes(self) -> bool:
        return any(choice.output_token_ids for choice in self._choices)

    async def _plan(self, ask: Ask, record: AttemptRecord) -> Plan:
        """Waits, bounded, for a routable worker and for room. Raises NoWorkers, Overloaded."""
        attributes = {
            # The internal id, as the workers' spans have it: the trace can be found by either.
            telemetry.REQUEST_ID: self._request.internal_id.hex(),
            telemetry.LEG: self._number,
            telemetry.ATTEMPT: record.attempt,
        }
        with telemetry.start_span(telemetry.GATEWAY_ROUTE, attributes=attributes) as span:
            plan = await self._mesh.planner.plan(ask, span)
        record.queued_seconds = ask.queued_seconds
        return plan

    def _ask(self, attempt: int, *, wait: bool) -> Ask:
        request, settings = self._request, self._mesh.settings
        wanted = [
            request.route_request(
                output_tokens=self._output_tokens,
                choices=len(self._choices),
                exclude=exclude,
                prefer_prefill=self._prefer_prefill,
            )
            for exclude in (self._exclude, frozenset[str]())
        ]
        # Work done so far is worth a longer wait: the only worker of its role may be starting again.
        seconds = settings.recovery_seconds if attempt > 1 else settings.route_wait_seconds
        return Ask(
            model=request.model,
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=wanted[0].prompt_tokens,
            wanted=tuple(wanted),
            wait_seconds=seconds if wait else 0.0,
            hold_seconds=settings.hold_seconds if wait else 0.0,
            resumed=attempt > 1,
        )

    async def _after(self, failure: CallFailed) -> None:
        """Prepares the next attempt, or raises when there is none."""
        error, settings = failure.error, self._mesh.settings
        self._choices = [choice for choice in self._choices if not choice.finished]
        if not error.retryable or self._attempt >= settings.max_attempts:
            raise error
        if not self._mesh.may_retry(self._request.model, resume=self._resumes):
            raise _not_again(error)
        self._attempt += 1
        record = self._choices[0].records[-1]
        self._note_failure(failure)
        # The old prefill worker has the prompt's blocks by now, unless it is the one that failed.
        if record.first and record.prefill_worker not in self._exclude:
            self._prefer_prefill = record.prefill_worker
        self._mesh.telemetry.metrics.retries.labels(model=self._request.model, reason=error.reason).inc()
        backoff = min(_LONGEST_BACKOFF_SECONDS, settings.retry_backoff_seconds * 2 ** (self._attempt - 2))
        # The worker's own hint counts where the next attempt may meet it again.
        backoff = max(backoff, min(error.retry_after_seconds or 0.0, _LONGEST_HINT_SECONDS))
        attributes = {
            telemetry.ATTEMPT: self._attempt,
            telemetry.LEG: self._number,
            telemetry.WORKER: failure.worker.worker_id,
            telemetry.ERROR_REASON: error.reason,
        }
        with telemetry.start_span(telemetry.GATEWAY_RETRY, attributes=attributes):
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    def _note_failure(self, failure: CallFailed) -> None:
        """Whom the next attempt leaves out."""
        worker, fleet = failure.worker, self._mesh.fleet
        if failure.exclude:
            self._exclude |= {worker.worker_id}
        if owner := fleet.get(failure.error.peer):
            fleet.pairs.failed(owner, worker, self._choices[0].records[-1].started)
            # Of the two the one whose work is lost less: an embedding is soon made elsewhere, a prompt is not.
            self._exclude |= {owner.worker_id if ENCODE in owner.record.roles else worker.worker_id}

    async def _go_on_apart(self) -> None:
        """Every unfinished choice as a leg of its own, all at once."""
        legs = [
            _Leg(
                self._mesh,
                self._request,
                self._outbox,
                1 + choice.index,
                [choice],
                self._attempt,
                exclude=self._exclude,
                prefer_prefill=self._prefer_prefill,
            )
            for choice in self._choices
        ]
        await together(*(asyncio.create_task(leg.run()) for leg in legs))


def _not_again(error: EpdError) -> EpdError:
    """The error when the budget allows no further attempt."""
    hint = error.retry_after_seconds or _LONGEST_BACKOFF_SECONDS
    if isinstance(error, Overloaded):
        return Overloaded(error.message, retry_after_seconds=hint)
    return WorkerLost(f"{error.message}; too many requests are being retried now", retry_after_seconds=hint)


def _worker(fleet: Fleet, view: WorkerView | None) -> Worker | None:
    return fleet.get(view.worker_id) if view is not None else None
