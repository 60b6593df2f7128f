"""Sharing: all of one gateway's part in keeping limits together: ledger, server, links, its entry in the registry."""

import contextlib
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import grpc

from common.metrics import Metrics
from common.policies.limits import TenantLimits
from common.registry.etcd import EtcdRegistry
from common.registry.record import GatewayRecord
from common.registry.settings import EtcdSettings
from common.rpc.access import Access
from common.rpc.channel import connect
from common.rpc.server import make_server
from common.rpc.tls import TlsOptions
from common.telemetry import Telemetry
from epd.v1 import quota_pb2_grpc
from services.gateway.quota.ledger import Ledger
from services.gateway.quota.members import Members
from services.gateway.quota.quota import Quota
from services.gateway.quota.service import QUOTA_SERVICE, QuotaService
from services.gateway.quota.settings import QuotaSettings

_FOLDER = "gateways"
_KEEPALIVE_SECONDS = 5.0  # an owner that hangs is noticed by its answers; one that nobody asks, by this


def default_gateway_id() -> str:
    return f"gateway-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


class Sharing:
    def __init__(
        self,
        gateway_id: str,
        settings: QuotaSettings,
        limits: Callable[[str], TenantLimits],
        tel: Telemetry,
        tls: TlsOptions | None,
    ) -> None:
        """tls: of this gateway towards others, at both ends of the stream."""
        self._id = gateway_id or _certified_id(tls) or default_gateway_id()
        self._settings, self._limits, self._telemetry, self._tls = settings, limits, tel, tls
        self._exit = contextlib.AsyncExitStack()
        self.members: Members
        self.quota: Quota

    async def start(self) -> None:
        """Counts for itself until it joins others. Raises AddressTaken, InvalidArgument."""
        access = Access(self._telemetry.metrics) if self._tls is not None else None
        server = make_server(telemetry=self._telemetry, tls=self._tls, access=access)
        self.members = Members(GatewayRecord(gateway_id=self._id, incarnation=secrets.token_hex(8), address=""))
        ledger = Ledger(self.members, self._limits)
        server.add(quota_pb2_grpc.add_QuotaServiceServicer_to_server, QuotaService(ledger), QUOTA_SERVICE)
        port = await server.start(self._settings.bind)
        self._exit.push_async_callback(server.stop)
        host = self._settings.advertise or self._settings.bind.rpartition(":")[0]
        self.members.mine = GatewayRecord(
            gateway_id=self._id, incarnation=self.members.mine.incarnation, address=f"{host}:{port}"
        )
        self.members.update({})
        self.quota = Quota(ledger, self._connect, self._settings.answer_seconds)
        self._exit.push_async_callback(self.quota.close)
        await server.set_serving(True)

    async def join(self, etcd: EtcdSettings, metrics: Metrics) -> None:
        """Registers this gateway, and follows the others. Raises Unavailable, RegistryRefused."""
        registry = EtcdRegistry(etcd, metrics)
        self._exit.push_async_callback(registry.close)
        prefix = etcd.folder(_FOLDER)
        await registry.watch(self.members.update, prefix=prefix, kind=GatewayRecord, grace_seconds=self._grace)
        await registry.register(self.members.mine, self._settings.lease_ttl_seconds, prefix=prefix)

    async def stop(self) -> None:
        await self._exit.aclose()

    @property
    def _grace(self) -> float:
        """An etcd that has lost its memory hears of every gateway again within its lease's time."""
        return float(self._settings.lease_ttl_seconds)

    def _connect(self, record: GatewayRecord) -> grpc.aio.Channel:
        name = record.gateway_id if self._tls is not None else ""  # whom the certificate must be of
        return connect(record.address, tls=self._tls, name=name, keepalive_seconds=_KEEPALIVE_SECONDS)


def _certified_id(tls: TlsOptions | None) -> str:
    """The id in this gateway's own certificate, empty without one."""
    if tls is None or not tls.cert_file:
        return ""
    from cryptography import x509  # not before TLS is used: it takes a while to load

    from common.rpc.certificates import name_in

    name = name_in(x509.load_pem_x509_certificate(Path(tls.cert_file).read_bytes()))
    return name.id if name is not None else ""
