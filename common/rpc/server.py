"""A gRPC server with what all services of the mesh share: errors, deadlines, traces, health, reflection."""

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import AddressTaken
from common.rpc.access import Access
from common.rpc.channel import MAX_MESSAGE_BYTES
from common.rpc.interceptor import ServerInterceptor
from common.rpc.tls import TlsOptions
from common.telemetry import Telemetry

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # or two servers would share a port without a word
    # Clients ping every 30 s, also without calls: that is no abuse.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # And a client that is gone without a word is noticed.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Server:
    """Made by `make_server`. Add services, start, tell health when they can be used, stop."""

    def __init__(self, grpc_server: grpc.aio.Server, tls: TlsOptions | None, access: Access | None = None) -> None:
        self.grpc = grpc_server
        self.port = 0
        self.address = ""
        self._tls, self._access = tls, access
        self._names: list[str] = []
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, grpc_server)

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: Any, name: str) -> None:
        """add(prefill_pb2_grpc.add_PrefillServiceServicer_to_server, servicer, "epd.v1.PrefillService")"""
        add_to_server(servicer, self.grpc)
        self._names.append(name)

    async def start(self, bind: str) -> int:
        """Listens on host:port (port 0: a free one) and returns the port. All services are NOT_SERVING until told.

        Raises AddressTaken naming the address.
        """
        try:
            if self._tls is None:
                self.port = self.grpc.add_insecure_port(bind)
            else:
                told = (self._access.opened,) if self._access else ()
                self.port = self.grpc.add_secure_port(bind, self._tls.server_credentials(*told))
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise AddressTaken(f"cannot listen on {bind}: the port is taken, or this machine has no such address")
        self.address = f"{bind.rpartition(':')[0]}:{self.port}"
        await self.set_serving(False)
        names = (*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        await self.grpc.start()
        return self.port

    async def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Health of one service, or of all of them and of "" (the server as a whole)."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names) if service is None else (service,):
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Takes no new calls; those that run are cancelled after the grace time."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_seconds)


def make_server(
    *,
    telemetry: Telemetry | None = None,
    tls: TlsOptions | None = None,
    access: Access | None = None,
    receive_bytes: int = MAX_MESSAGE_BYTES,
) -> Server:
    """A server for this service's telemetry; without one, handlers use the current one.

    access: who may call what, for servers inside a mesh with TLS. receive_bytes: of a message at most; a larger one is
    refused by gRPC with RESOURCE_EXHAUSTED and both sizes.
    """
    options = (*_OPTIONS, ("grpc.max_receive_message_length", receive_bytes))
    inner = grpc.aio.server(interceptors=[ServerInterceptor(telemetry, access)], options=options)
    return Server(inner, tls, access)
