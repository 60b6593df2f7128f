"""Every metric of the mesh, declared once. Each service has a registry of its own: several may share a process."""

import threading
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, start_http_server

# Buckets in seconds, those that gen_ai dashboards are made for.
REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
HOP_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters end in _total, durations in _seconds. Labels hold names and reasons only, never contents.

    status is a gRPC status name, reason one of common.errors (empty when fine), hop a span name of common.telemetry.
    """

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        by_model = ("model", "tenant")

        # gen_ai semantic conventions
        self.request_duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "From a request's arrival to its last byte.",
            by_model,
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            by_model,
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time per token after the first, once a request.",
            by_model,
            buckets=TPOT_BUCKETS,
            registry=registry,
        )

        # requests
        self.requests = Counter(
            "epd_requests_total", "Requests that ended.", (*by_model, "status", "reason"), registry=registry
        )
        self.requests_in_flight = Gauge("epd_requests_in_flight", "Requests under way.", ("model",), registry=registry)
        self.input_tokens = Counter("epd_input_tokens_total", "Prompt tokens.", by_model, registry=registry)
        self.output_tokens = Counter("epd_output_tokens_total", "Generated tokens.", by_model, registry=registry)
        self.cached_tokens = Counter(
            "epd_cached_tokens_total", "Prompt tokens taken from a cache.", by_model, registry=registry
        )
        self.refusals = Counter("epd_refusals_total", "Requests refused before work.", ("reason",), registry=registry)
        self.retries = Counter("epd_retries_total", "Attempts after the first.", ("model", "reason"), registry=registry)
        self.retries_refused = Counter(
            "epd_retries_refused_total", "Attempts that the retry budget did not allow.", ("model",), registry=registry
        )
        self.hedges = Counter(
            "epd_hedges_total",
            "Second attempts beside one whose worker fell silent: won, lost, failed.",
            ("model", "outcome"),
            registry=registry,
        )
        self.cancellations = Counter(
            "epd_cancellations_total", "Requests given up by their client.", ("model",), registry=registry
        )
        self.decisions = Counter(
            "epd_route_decisions_total", "Routing decisions by form.", ("model", "decision"), registry=registry
        )

        # where time goes
        self.hop_seconds = Histogram(
            "epd_hop_seconds", "Time in each hop.", ("hop",), buckets=HOP_BUCKETS, registry=registry
        )
        self.slo_met = Counter("epd_slo_met_total", "Requests within their targets.", by_model, registry=registry)
        self.slo_missed = Counter(
            "epd_slo_missed_total", "Requests that missed one, by hop.", (*by_model, "blame"), registry=registry
        )
        self.goodput_tokens = Counter(
            "epd_goodput_tokens_total", "Tokens of requests within their targets.", by_model, registry=registry
        )

        # transfer
        self.transfer_bytes = Counter("epd_transfer_bytes_total", "Bytes pulled.", ("channel",), registry=registry)
        self.transfer_seconds = Histogram(
            "epd_transfer_seconds", "Duration of a pull.", ("channel",), buckets=HOP_BUCKETS, registry=registry
        )
        self.transfer_failures = Counter(
            "epd_transfer_failures_total", "Pulls that failed.", ("reason",), registry=registry
        )

        # who calls
        self.call_errors = Counter(
            "epd_call_errors_total", "Calls answered with an error.", ("method", "reason"), registry=registry
        )
        self.access_refusals = Counter(
            "epd_access_refusals_total",
            "Calls that their role may not make.",
            ("method", "role"),
            registry=registry,
        )
        self.peer_refusals = Counter(
            "epd_peer_refusals_total",
            "Calls not made since a certificate was not the expected one.",
            ("reason",),
            registry=registry,
        )
        self.tls_connections = Counter(
            "epd_tls_connections_total",
            "Connections from within the mesh: opened, and of those that came to a call, authenticated.",
            ("state",),
            registry=registry,
        )
        self.certificate_end = Gauge(
            "epd_certificate_end_seconds", "When the own certificate expires, in Unix time.", registry=registry
        )

        # the gateway's queue
        self.queued_requests = Gauge(
            "epd_gateway_queued_requests", "Requests that wait for room at workers.", ("tenant",), registry=registry
        )
        self.queued_tokens = Gauge(
            "epd_gateway_queued_tokens", "Prompt tokens of requests that wait.", ("tenant",), registry=registry
        )
        self.queue_refusals = Counter(
            "epd_gateway_queue_refusals_total",
            "Requests not let into the queue, or sent away from it, by why.",
            ("tenant", "cause"),
            registry=registry,
        )

        # state
        self.queue_depth = Gauge("epd_queue_depth", "What waits in a worker.", ("queue",), registry=registry)
        self.kv_blocks = Gauge(
            "epd_kv_blocks", "KV blocks by state: free, cached, active, held.", ("state",), registry=registry
        )
        self.embedding_rows = Gauge(
            "epd_embedding_rows", "Rows of an embedding pool: free, cached, held.", ("state",), registry=registry
        )
        self.running_choices = Gauge("epd_running_choices", "Choices in the engine's batch.", registry=registry)
        self.engine_steps = Counter("epd_engine_steps_total", "Steps of the engine.", registry=registry)
        self.preemptions = Counter("epd_preemptions_total", "Sequences preempted.", registry=registry)
        self.workers = Gauge("epd_workers", "Workers known to the gateway.", ("model", "role"), registry=registry)
        self.workers_away = Gauge(
            "epd_workers_away",
            "Workers that get nothing now, by why: down, silent, circuit open, circuit half-open.",
            ("model", "why"),
            registry=registry,
        )
        self.pairs_away = Gauge(
            "epd_pairs_away", "Pairs of workers whose pulls failed, not chosen now.", registry=registry
        )
        self.registry_alive = Gauge("epd_registry_alive", "1 while registered.", registry=registry)
        self.registry_bad_values = Counter(
            "epd_registry_bad_values_total", "Registry values skipped.", ("cause",), registry=registry
        )
        self.loop_lag = Gauge(
            "epd_loop_lag_seconds", "Event loop's lag over the last minute.", ("quantile",), registry=registry
        )
        self.open_spans = Gauge("epd_open_spans", "Spans started and not ended.", registry=registry)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self.registry)

    def serve(self, host: str, port: int, **tls: Any) -> tuple[WSGIServer, threading.Thread]:
        """Serves /metrics over HTTP from a thread; the caller ends it with `server.shutdown()`. tls: as the library's
        start_http_server takes it."""
        return start_http_server(port, addr=host, registry=self.registry, **tls)
