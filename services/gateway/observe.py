"""What requests leave in the metrics."""

import asyncio
import contextlib
from collections.abc import Iterator

from common.errors import Cancelled, EpdError, RateLimited
from common.metrics import Metrics
from epd.v1 import generation_pb2
from services.gateway.accounting import Account

_REFUSED = ("OVERLOADED", "DRAINING", "DUPLICATE_REQUEST", "RATE_LIMITED")


class TenantLabels:
    """Tenants as values of a label, bounded: the first `max_tenants` seen, then "other"."""

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._tenants: set[str] = set()

    def __call__(self, tenant: str) -> str:
        if tenant in self._tenants:
            return tenant
        if len(self._tenants) >= self._max_tenants:
            return "other"
        self._tenants.add(tenant)
        return tenant


class Observer:
    """Label values are bounded: models are those served, tenants as in `TenantLabels`."""

    def __init__(self, metrics: Metrics, max_tenants: int) -> None:
        self._metrics = metrics
        self._tenant = TenantLabels(max_tenants)

    @contextlib.contextmanager
    def in_flight(self, model: str) -> Iterator[None]:
        gauge = self._metrics.requests_in_flight.labels(model=model)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def finished(self, model: str, tenant: str, account: Account, usage: generation_pb2.Usage) -> None:
        """A request that has been answered in full."""
        metrics, labels = self._metrics, {"model": model, "tenant": self._tenant(tenant)}
        metrics.time_to_first_token.labels(**labels).observe(account.ttft_seconds)
        if account.tpot_seconds:
            metrics.time_per_output_token.labels(**labels).observe(account.tpot_seconds)
        metrics.input_tokens.labels(**labels).inc(usage.prompt_tokens)
        metrics.output_tokens.labels(**labels).inc(usage.completion_tokens)
        metrics.cached_tokens.labels(**labels).inc(usage.cached_tokens)
        for hop in account.total_hops:
            metrics.hop_seconds.labels(hop=hop.name).observe(hop.seconds)
        if account.verdict.met:
            metrics.slo_met.labels(**labels).inc()
            metrics.goodput_tokens.labels(**labels).inc(usage.completion_tokens)
        else:
            metrics.slo_missed.labels(**labels, blame=account.verdict.blame).inc()

    def ended(self, model: str, tenant: str, error: BaseException | None, seconds: float) -> None:
        """Any request, however it ended. What failed or was refused counts as a miss of its objectives."""
        metrics, labels = self._metrics, {"model": model, "tenant": self._tenant(tenant)}
        found = _as_epd(error)
        status = found.status.name if found else "OK"
        metrics.requests.labels(**labels, status=status, reason=found.reason if found else "").inc()
        metrics.request_duration.labels(**labels).observe(seconds)
        if isinstance(found, Cancelled):
            metrics.cancellations.labels(model=model).inc()
        elif found is not None:
            if found.reason in _REFUSED:
                metrics.refusals.labels(reason=found.reason).inc()
            if found.http >= 429 and not isinstance(found, RateLimited):  # the client's own doing is no miss of ours
                metrics.slo_missed.labels(**labels, blame=found.reason).inc()


def _as_epd(error: BaseException | None) -> EpdError | None:
    if error is None or isinstance(error, EpdError):
        return error
    return Cancelled("") if isinstance(error, asyncio.CancelledError) else EpdError("")
