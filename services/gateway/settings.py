"""How one gateway is set up."""

from typing import Literal

import msgspec

from common.bounds import Count, Positive, Seconds, Share, Span
from common.media.limits import MIB, MediaLimits
from common.media.remote import RemoteSettings
from common.policies.circuit import CircuitPolicy
from common.policies.fairness import FairnessPolicy
from common.policies.limits import TenantLimits
from common.policies.retry_budget import RetryPolicy
from common.policies.routing import RoutingPolicy
from common.policies.silence import SilencePolicy
from common.policies.slo import SloTarget
from common.registry.settings import EtcdSettings
from common.rpc.channel import KEEPALIVE_SECONDS
from common.rpc.tls import TlsOptions
from services.gateway.identity.settings import IdentitySettings
from services.gateway.quota.settings import QuotaSettings

DEFAULT_TENANT = "default"  # of requests that name none


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All knobs of one gateway; durations in seconds."""

    models: dict[str, str] = {}  # served name to the directory with its tokenizer; the first is the default
    aliases: dict[str, str] = {}  # further names for clients, each with the served name that it means
    grpc_bind: str = "127.0.0.1:50051"  # port 0: a free one
    http_bind: str = "127.0.0.1:8000"
    etcd: EtcdSettings | None = EtcdSettings()  # None: no registry; whoever made the gateway feeds its fleet (tests)
    salt_secret: str = (
        ""  # tenant salts derive from it; empty: from their names alone, the default's is empty. Gateways share it
    )
    identity: IdentitySettings = IdentitySettings()  # keys and their tenants
    limits: dict[str, TenantLimits] = {}  # by tenant; those that the identity's source names win
    other_limits: TenantLimits = TenantLimits()  # of each tenant that is named in neither
    gateway_id: str = ""  # among gateways, each its own; empty: that of worker_tls' certificate, else drawn
    quota: QuotaSettings = QuotaSettings()  # how gateways keep these limits together
    max_in_flight: Positive = 256  # requests at once; more are refused with Overloaded
    max_per_tenant: Count = 0  # of those, by one tenant; 0: no bound of its own
    max_in_flight_bytes: Positive = 1024 * MIB  # of those, as they were sent: images stay in memory for another attempt
    media: MediaLimits = MediaLimits()  # of images; also bounds the size of a message and of an HTTP body
    remote: RemoteSettings = RemoteSettings()  # images by URL: off
    default_timeout_seconds: Span = 600.0  # of requests that come without a deadline, and the longest
    max_attempts: Positive = 5
    first_byte_seconds: Span = 5.0  # for a worker to accept a call
    keepalive_seconds: Span = KEEPALIVE_SECONDS  # towards workers: then a stopped one is noticed
    stall_seconds: Span = 120.0  # without any message from a worker that has accepted
    route_wait_seconds: Seconds = 5.0  # for a routable worker to turn up, for a new request
    recovery_seconds: Seconds = 60.0  # likewise for one that has lost its worker: time to start it again
    hold_seconds: Seconds = 30.0  # for room at decode or encode workers while all are full; then Overloaded
    encode_hedge_seconds: Seconds = 5.0  # until a slow encode worker's images go to another, too
    retry_backoff_seconds: Seconds = 0.02  # before attempt 2; doubles, with jitter, up to a second
    retries: RetryPolicy = RetryPolicy()  # how many of them there may be, by model
    circuit: CircuitPolicy = CircuitPolicy()  # of each worker, and of each pair of which one pulls from the other
    silence: SilencePolicy = SilencePolicy()  # of workers that have stopped, hang or cannot be reached
    drain_seconds: Seconds = 30.0
    tokenizer_threads: Positive = 2
    buffered_tokens: Positive = 512  # not yet taken by a slow client; then the worker's stream is read no further
    routing: RoutingPolicy = RoutingPolicy()
    fairness: FairnessPolicy = FairnessPolicy()  # who goes first while all workers are full
    max_queued_tokens: Count = 0  # of prompts that wait for room; 0: no bound of its own
    # A request that would wait in the queue for longer than this is refused at once: its deadline (hold_seconds in any
    # case), its TTFT target, or never.
    refuse_by: Literal["deadline", "slo", "never"] = "deadline"
    slo: SloTarget = SloTarget()
    slo_models: dict[str, SloTarget] = {}  # by served name
    slo_tenants: dict[str, SloTarget] = {}  # by tenant; wins over the model's
    max_tenants: Count = 1000  # labels in metrics; further tenants are counted as "other"
    metrics_bind: str = ""  # host:port for /metrics; empty: at the HTTP edge, unless keys are needed there
    otlp_endpoint: str = ""  # host:port of an OTLP collector (gRPC), or of Jaeger; empty: spans stay here
    trace_sample_ratio: Share = 1.0
    tls: TlsOptions | None = None  # of the public servers, gRPC and HTTPS
    worker_tls: TlsOptions | None = None  # towards workers: a certificate of this gateway

    def slo_target(self, model: str, tenant: str) -> SloTarget:
        return self.slo_tenants.get(tenant) or self.slo_models.get(model) or self.slo
