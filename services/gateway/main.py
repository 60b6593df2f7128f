"""One gateway process, put together: registry watch, fleet, gRPC and HTTP servers on one event loop."""

import asyncio
import contextlib
import logging
import signal
from pathlib import Path

from common import telemetry
from common.errors import InvalidArgument
from common.media.remote import RemoteImages
from common.metrics import Metrics
from common.models.tokenizer import Tokenizer
from common.models.vision.spec import VisionSpec
from common.registry.etcd import EtcdRegistry
from common.rpc.lag import LoopLag
from common.rpc.peer_name import GATEWAY, PeerName
from common.rpc.server import Server, make_server
from common.span_store import SpanStore
from epd.inference import inference_pb2_grpc
from epd.v1 import generation_pb2_grpc, trace_pb2_grpc
from services.gateway.adapters import AdapterControl
from services.gateway.admission import Admission
from services.gateway.fleet import Fleet
from services.gateway.generation import Generator
from services.gateway.http import HttpEdge
from services.gateway.http_server import HttpServer, serve_metrics
from services.gateway.identity.identity import Identity
from services.gateway.kserve.service import INFERENCE_SERVICE, InferenceService
from services.gateway.orchestrator import Orchestrator
from services.gateway.preprocess import Preprocessor
from services.gateway.pulse import Pulse
from services.gateway.quota.sharing import Sharing
from services.gateway.service import GENERATION_SERVICE, GenerationService, MeshTraceService
from services.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)
_LAST_SECONDS = 2.0  # for cancelled calls to tell their clients, after the drain


class Gateway:
    """Start, serve, drain, stop. Several may live in one process (tests).

    Without `settings.etcd` no registry is watched and the caller feeds `fleet.update` (tests).
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.store = SpanStore()
        self.telemetry = telemetry.setup(
            "gateway",
            otlp_endpoint=settings.otlp_endpoint or None,
            sample_ratio=settings.trace_sample_ratio,
            store=self.store,
        )
        self.identity: Identity
        self.sharing: Sharing
        self.fleet: Fleet
        self.admission: Admission
        self.generator: Generator
        self.metrics_address = ""  # when it is not the HTTP edge's
        self.lag = LoopLag(self.telemetry.metrics)
        self._server: Server
        self._http: HttpServer
        self._exit = contextlib.AsyncExitStack()

    @property
    def grpc_address(self) -> str:
        return self._server.address

    @property
    def http_address(self) -> str:
        return self._http.address

    async def start(self) -> None:
        """Returns once requests can be sent. Raises AddressTaken, InvalidArgument (a model's files, a setting),
        Unavailable (etcd)."""
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise

    async def _start(self) -> None:
        settings, cleanup, tel = self.settings, self._exit, self.telemetry
        cleanup.push_async_callback(tel.shutdown)
        self.lag.start()
        cleanup.push_async_callback(self.lag.stop)
        _check_certificates(settings, tel.metrics)
        self.identity = Identity(
            settings.identity,
            tel.metrics,
            etcd=settings.etcd,
            limits=settings.limits,
            other_limits=settings.other_limits,
        )
        cleanup.push_async_callback(self.identity.stop)
        await self.identity.start()
        tokenizers = {name: await asyncio.to_thread(_load, name, path) for name, path in settings.models.items()}
        specs = {name: await asyncio.to_thread(_load_vision, path) for name, path in settings.models.items()}
        remote = RemoteImages(settings.remote, settings.media)
        cleanup.push_async_callback(remote.close)
        self.fleet = Fleet(tel.metrics, settings.worker_tls, settings.keepalive_seconds, settings.circuit)
        cleanup.push_async_callback(self.fleet.close)
        pulse = Pulse(self.fleet, settings.silence)
        pulse.start()
        cleanup.push_async_callback(pulse.stop)
        self.admission = Admission(settings.max_in_flight, settings.max_per_tenant, settings.max_in_flight_bytes)
        preprocessor = Preprocessor(
            tokenizers,
            self.fleet,
            specs={name: spec for name, spec in specs.items() if spec is not None},
            limits=settings.media,
            remote=remote,
            threads=settings.tokenizer_threads,
            salt_secret=settings.salt_secret,
            wait_seconds=settings.route_wait_seconds,
            cache_bytes=lambda tenant: self.identity.limits(tenant).cache_bytes,
            aliases=settings.aliases,
        )
        cleanup.callback(preprocessor.close)
        self.sharing = Sharing(settings.gateway_id, settings.quota, self.identity.limits, tel, settings.worker_tls)
        cleanup.push_async_callback(self.sharing.stop)
        await self.sharing.start()
        orchestrator = Orchestrator(self.fleet, settings, tel)
        orchestrator.planner.weight = self.identity.weight
        self.generator = Generator(self.admission, preprocessor, orchestrator, settings, tel, self.sharing.quota)
        traces = MeshTraceService(self.store, self.fleet, self.identity)

        server = self._server = make_server(telemetry=tel, tls=settings.tls, receive_bytes=settings.media.message_bytes)
        adapters = AdapterControl(self.fleet, preprocessor.names, settings.etcd)
        service = GenerationService(self.generator, self.fleet, self.identity, adapters)
        server.add(generation_pb2_grpc.add_GenerationServiceServicer_to_server, service, GENERATION_SERVICE)
        inference = InferenceService(self.generator, self.fleet, self.identity)
        server.add(inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, inference, INFERENCE_SERVICE)
        server.add(trace_pb2_grpc.add_TraceServiceServicer_to_server, traces, "epd.v1.TraceService")
        await server.start(settings.grpc_bind)
        cleanup.push_async_callback(server.stop, _LAST_SECONDS)
        edge = HttpEdge(self.generator, self.fleet, traces, tel, self.identity, adapters)
        self._http = HttpServer(edge.app, settings.tls)
        await self._http.start(settings.http_bind)
        cleanup.push_async_callback(self._http.stop, _LAST_SECONDS)
        if settings.metrics_bind:
            https = settings.worker_tls.prometheus_options() if settings.worker_tls is not None else {}
            self.metrics_address, close = serve_metrics(tel.metrics, settings.metrics_bind, **https)
            cleanup.callback(close)
        if settings.etcd is not None:
            registry = EtcdRegistry(settings.etcd, tel.metrics)
            cleanup.push_async_callback(registry.close)
            await registry.start()
            await registry.watch(self.fleet.update)
            await self.sharing.join(settings.etcd, tel.metrics)
        await server.set_serving(True)
        _log.info("gateway: gRPC on %s, HTTP on %s", self.grpc_address, self.http_address)

    async def drain(self) -> None:
        """Refuses new requests, with a hint to retry, and lets the running ones finish, for `drain_seconds` at most."""
        self.admission.draining = True
        await self._server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                await self.admission.idle()

    async def stop(self) -> None:
        """At once; `drain` first to be kind."""
        self.admission.draining = True
        await self._exit.aclose()


async def run_gateway(settings: GatewaySettings) -> None:
    """Serves until SIGTERM or SIGINT, then drains and stops; a second signal skips the drain."""
    gateway = Gateway(settings)
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    again = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: again.set() if asked.is_set() else asked.set())
    await gateway.start()
    try:
        await asked.wait()
        drained, hurried = asyncio.create_task(gateway.drain()), asyncio.create_task(again.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, hurried):
            task.cancel()
        await asyncio.gather(drained, hurried, return_exceptions=True)
    finally:
        await gateway.stop()


def _check_certificates(settings: GatewaySettings, metrics: Metrics) -> None:
    """Raises InvalidArgument, before anything is loaded, saying what to do about one that cannot be used."""
    ends = [settings.tls.check()] if settings.tls is not None else []
    if settings.worker_tls is not None:
        ends.append(settings.worker_tls.check(PeerName(GATEWAY, "")))
    if ends:
        metrics.certificate_end.set(min(ends))


def _load_vision(path: str) -> VisionSpec | None:
    """None for a text model. Of those the gateway needs no more than the tokenizer's files."""
    return VisionSpec.read(path) if (Path(path) / "config.json").is_file() else None


def _load(name: str, path: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer(path)
        tokenizer.warm_up()
        return tokenizer
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"the tokenizer of {name} cannot be read from {path}: {error}", field="models") from error
    except Exception as error:  # what the tokenizers library raises is a bare Exception
        raise InvalidArgument(f"the tokenizer of {name} in {path} is damaged", field="models") from error
