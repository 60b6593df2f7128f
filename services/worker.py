"""One worker process: what it computes with and the services of its roles. Several in one: the aggregated form."""

import asyncio
import contextlib
import logging
import os
import signal
import socket

import msgspec

from common import telemetry
from common.engine.client import Engine
from common.errors import EngineFailed, InvalidArgument
from common.registry.etcd import EtcdRegistry
from common.registry.record import ADAPTERS, AdapterRecord
from common.rpc.access import Access
from common.rpc.adapters import WorkerAdapters
from common.rpc.engine_pulse import EnginePulse
from common.rpc.lag import LoopLag
from common.rpc.peer_name import WORKER, PeerName
from common.rpc.server import Server, make_server
from common.rpc.trace_service import TraceService
from common.rpc.worker_context import WorkerContext, new_incarnation
from common.rpc.worker_metrics import publish_load
from common.rpc.worker_service import WorkerService
from common.span_store import SpanStore
from common.tasks import first
from common.transfer.channels import allowed_channels
from common.transfer.key import Identity
from epd.v1 import (
    decode_pb2_grpc,
    encode_pb2_grpc,
    prefill_pb2_grpc,
    trace_pb2_grpc,
    transfer_pb2_grpc,
    worker_pb2_grpc,
)
from services.decode.service import DecodeService
from services.encode.service import EncodeService
from services.prefill.service import PrefillService
from services.worker_parts import DECODE, ENCODE, PREFILL, ROLES, Computing, Transfers, describe
from services.worker_settings import WorkerSettings

log = logging.getLogger(__name__)

_LAST_SECONDS = 2.0  # for cancelled calls to tell their callers, after the drain


class Worker:
    """Start, serve, drain, stop. Several may live in one process (tests)."""

    def __init__(self, settings: WorkerSettings) -> None:
        unknown = [role for role in settings.roles if role not in ROLES]
        if unknown or not settings.roles:
            raise InvalidArgument(f"roles must be some of {', '.join(ROLES)}", field="roles")
        self.settings = settings
        self.store = SpanStore()
        self.telemetry = telemetry.setup(
            "-".join(settings.roles),
            otlp_endpoint=settings.otlp_endpoint or None,
            sample_ratio=settings.trace_sample_ratio,
            store=self.store,
            instance_id=settings.worker_id,
        )
        self.lag = LoopLag(self.telemetry.metrics)
        self.computing: Computing
        self.transfers: Transfers
        self.context: WorkerContext
        self._server: Server
        self._service: WorkerService
        self._exit = contextlib.AsyncExitStack()

    @property
    def engine(self) -> Engine:
        """The language engine, of workers that have one."""
        return self.context.engine

    @property
    def address(self) -> str:
        return self.context.record.address

    async def start(self) -> None:
        """Returns once the worker is registered and can be called. Raises what its engine or the registry raised."""
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise

    async def _start(self) -> None:
        settings, cleanup, tel = self.settings, self._exit, self.telemetry
        tel.attach()
        cleanup.push_async_callback(tel.shutdown)
        self.lag.start()
        cleanup.push_async_callback(self.lag.stop)
        # Replicas in containers share roles and process ids, not host names.
        default_id = f"{'-'.join(settings.roles)}-{socket.gethostname()}-{os.getpid()}"
        identity = Identity(settings.worker_id or default_id, new_incarnation())
        if settings.tls is not None:
            tel.metrics.certificate_end.set(settings.tls.check(PeerName(WORKER, identity.worker_id)))
        allowed_channels(settings.channels, encrypted=settings.tls is not None)  # refused before anything is loaded
        computing = self.computing = await Computing.launch(settings, cleanup)

        server = self._server = make_server(
            telemetry=tel,
            tls=settings.tls,
            access=Access(tel.metrics) if settings.tls is not None else None,
            receive_bytes=settings.encoder.media.message_bytes,
        )
        transfers = self.transfers = Transfers(settings, computing, identity)
        await transfers.start(cleanup)
        record = await describe(settings, computing, identity)
        self.context = context = WorkerContext(record, computing.engine, computing.encoder)
        adapters: WorkerAdapters | None = None
        if computing.engine is not None:
            adapters = context.adapters = WorkerAdapters(settings.lora, computing.engine, record.names)
            cleanup.push_async_callback(adapters.stop)
            await adapters.start()
        publish_load(context, tel.metrics)
        pulse: EnginePulse | None = None
        if computing.engine is not None:
            pulse = EnginePulse(computing.engine, settings.hang_seconds)
            pulse.start()
            cleanup.push_async_callback(pulse.stop)
        self._service = WorkerService(
            context,
            open_publications=lambda: transfers.tables.open_publications,
            open_pulls=lambda: transfers.open_pulls,
            open_spans=lambda: tel.open_spans,
            loop_lag_p99=lambda: self.lag.p99,
            answers=lambda: pulse is None or pulse.answers,
        )
        if adapters is not None:
            adapters.on_change = self._service.touch
        add = server.add
        add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, self._service, "epd.v1.WorkerService")
        add(trace_pb2_grpc.add_TraceServiceServicer_to_server, TraceService(self.store), "epd.v1.TraceService")
        self._add_roles()
        port = await server.start(f"{settings.host}:{settings.port}")
        cleanup.push_async_callback(server.stop, _LAST_SECONDS)
        context.record = msgspec.structs.replace(record, address=f"{settings.reachable_host}:{port}")
        if settings.metrics_port >= 0:
            https = settings.tls.prometheus_options() if settings.tls is not None else {}
            http, _ = tel.metrics.serve(settings.host, settings.metrics_port, **https)
            cleanup.callback(http.shutdown)
        registry = EtcdRegistry(settings.etcd, tel.metrics)
        cleanup.push_async_callback(registry.close)
        await registry.start()
        if adapters is not None and settings.lora.directory:
            folder = settings.etcd.folder(ADAPTERS)
            await registry.watch(adapters.follow, grace_seconds=0.0, prefix=folder, kind=AdapterRecord)
            await adapters.settled()
        # Healthy before listed: whoever finds this worker in the registry can call it.
        await server.set_serving(True)
        self._registration = await registry.register(
            context.record, settings.lease_ttl_seconds, on_alive=self._on_alive
        )
        log.info("worker %s: %s on %s", identity, "+".join(settings.roles), self.address)

    def _add_roles(self) -> None:
        settings, context, transfers, add = self.settings, self.context, self.transfers, self._server.add
        kv, embeddings = transfers.tables.kv, transfers.tables.embeddings
        if {ENCODE, PREFILL} & set(settings.roles):
            add(transfer_pb2_grpc.add_TransferServiceServicer_to_server, transfers.service, "epd.v1.TransferService")
        if ENCODE in settings.roles and embeddings is not None:
            encode = EncodeService(context, embeddings)
            add(encode_pb2_grpc.add_EncodeServiceServicer_to_server, encode, "epd.v1.EncodeService")
        if PREFILL in settings.roles and kv is not None:
            prefill = PrefillService(context, kv, transfers.embeddings)
            add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill, "epd.v1.PrefillService")
        if DECODE in settings.roles and transfers.puller is not None:
            decode = DecodeService(context, transfers.puller, transfers.embeddings)
            add(decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode, "epd.v1.DecodeService")

    def _on_alive(self, alive: bool) -> None:
        """Not listed means not ready: health says so until the registration is back (cases B1, B2)."""
        self._listed = asyncio.ensure_future(self._server.set_serving(alive and not self.context.draining))

    async def drain(self) -> None:
        """Takes nothing new, tells registry and gateways, lets running requests end, for `drain_seconds` at most."""
        self.context.draining = True
        self._service.touch()
        await self._server.set_serving(False)
        with contextlib.suppress(Exception):  # without etcd the refusals tell
            await self._registration.update(msgspec.structs.replace(self.context.record, draining=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_seconds):
                await self.context.idle()
                await self.transfers.tables.idle()  # prompts that decode workers are still pulling

    async def stop(self) -> None:
        """At once; `drain` first to be kind."""
        await self._exit.aclose()


async def run_worker(settings: WorkerSettings) -> None:
    """Serves until SIGTERM or SIGINT, then drains and stops; a second signal skips the drain.

    Raises EngineFailed when engine or encoder end by themselves: whoever started this process starts another.
    """
    worker = Worker(settings)
    loop = asyncio.get_running_loop()
    asked, again = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: again.set() if asked.is_set() else asked.set())
    await worker.start()
    try:
        if await first(asked.wait(), worker.computing.closed()) == 1:
            raise EngineFailed("engine or encoder ended; see the log above")
        await first(worker.drain(), again.wait())
    finally:
        await worker.stop()
