"""Who may call what, over real connections; what is refused is counted, and strangers are told nothing."""

import asyncio
import ssl
import urllib.request
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from common import telemetry
from common.errors import PermissionDenied
from common.rpc.access import Access, allowed_roles
from common.rpc.certificates import Authority
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from common.rpc.peer_name import CLIENT, ETCD, GATEWAY, ROLES, WORKER, PeerName, caller
from common.rpc.server import Server, make_server
from common.rpc.tls import TlsOptions
from tests.certificates import mesh_certificates, tls_of

SERVICES = {
    "epd.v1.EncodeService/Encode": {GATEWAY},
    "epd.v1.PrefillService/Prefill": {GATEWAY},
    "epd.v1.DecodeService/Decode": {GATEWAY},
    "epd.v1.DecodeService/Subscribe": {GATEWAY},
    "epd.v1.DecodeService/Finish": {GATEWAY},
    "epd.v1.DecodeService/Hold": {GATEWAY},
    "epd.v1.TransferService/Pull": {WORKER},
    "epd.v1.TransferService/Read": {WORKER},
    "epd.v1.WorkerService/Watch": {GATEWAY},
    "epd.v1.WorkerService/GetStatus": {GATEWAY, CLIENT},
    "epd.v1.WorkerService/ServeAdapter": {GATEWAY},
    "epd.v1.WorkerService/DropAdapter": {GATEWAY},
    "epd.v1.TraceService/GetTrace": {GATEWAY, CLIENT},
    "grpc.health.v1.Health/Check": {GATEWAY, WORKER, CLIENT},
    "epd.v1.UnheardOf/Do": set(),
}
CALLERS = {GATEWAY: "gateway", WORKER: "decode-0", CLIENT: "operator", ETCD: "etcd"}
METHOD = "/epd.v1.PrefillService/Prefill"


class _AnyMethod(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every method with the caller's name."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: Any) -> bytes:
            return str(caller()).encode()

        return grpc.unary_unary_rpc_method_handler(answer)


class Mesh:
    """A worker's server, prefill-0, and whatever certificates a test needs."""

    def __init__(self, folder: Path) -> None:
        self.authority = mesh_certificates(folder / "certs")
        self.telemetry = telemetry.setup("worker")
        self.metrics = self.telemetry.metrics
        self.server: Server

    async def serve(self, tls: TlsOptions) -> None:
        self.server = make_server(telemetry=self.telemetry, tls=tls, access=Access(self.metrics))
        self.server.grpc.add_generic_rpc_handlers((_AnyMethod(),))
        await self.server.start("127.0.0.1:0")

    async def call(self, tls: TlsOptions | None, name: str = "prefill-0", method: str = METHOD) -> bytes:
        async with connect(self.server.address, name, tls=tls, metrics=self.metrics) as channel:
            return bytes(await channel.unary_unary(method)(b"", timeout=10))

    async def refusal(self, tls: TlsOptions | None, name: str = "prefill-0", method: str = METHOD) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call(tls, name, method)
        return raised.value.code()

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(metric, labels) or 0.0


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(tmp_path)
    await made.serve(tls_of(made.authority, "prefill-0"))
    yield made
    await made.server.stop()


def test_the_table_is_what_the_design_says() -> None:
    for method, allowed in SERVICES.items():
        assert set(allowed_roles(f"/{method}")) == allowed, method


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_reaches_what_it_may_and_nothing_else(mesh: Mesh, role: str) -> None:
    tls = tls_of(mesh.authority, CALLERS[role])
    for service, allowed in SERVICES.items():
        method = f"/{service}"
        if service.startswith("grpc.health"):
            continue  # the server's own, by protobuf
        if role in allowed:
            assert await mesh.call(tls, method=method) == f"{role} {CALLERS[role]}".encode()
        else:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await mesh.call(tls, method=method)
            assert isinstance(from_rpc(raised.value), PermissionDenied)
            assert mesh.count("epd_access_refusals_total", method=method, role=role) == 1
            assert mesh.count("epd_call_errors_total", method=method, reason="PERMISSION_DENIED") == 1


async def test_a_certificate_of_no_role_reaches_nothing(mesh: Mesh, tmp_path: Path) -> None:
    """Of the mesh's own authority, but without a name of the mesh: as a public server's may be."""
    mesh.authority._check = lambda name, hosts: None  # type: ignore[method-assign]
    mesh.authority.issue(PeerName("king", "king"))
    assert await mesh.refusal(tls_of(mesh.authority, "king")) is grpc.StatusCode.PERMISSION_DENIED
    assert mesh.count("epd_access_refusals_total", method=METHOD, role="none") == 1


async def test_untrusted_certificate_none_and_plain_text(mesh: Mesh, tmp_path: Path) -> None:
    """They come to no call: the difference of two counters."""
    stranger = mesh_certificates(tmp_path / "stranger")
    trusting = TlsOptions(ca_file=tls_of(mesh.authority, "gateway").ca_file)
    forged = TlsOptions(
        ca_file=trusting.ca_file,
        cert_file=tls_of(stranger, "gateway").cert_file,
        key_file=tls_of(stranger, "gateway").key_file,
    )
    for tls in (forged, trusting, None):
        assert await mesh.refusal(tls) is grpc.StatusCode.UNAVAILABLE
    assert mesh.count("epd_tls_connections_total", state="opened") >= 3
    assert mesh.count("epd_tls_connections_total", state="authenticated") == 0
    before = mesh.count("epd_tls_connections_total", state="opened")
    async with connect(mesh.server.address, "prefill-0", tls=tls_of(mesh.authority, "gateway")) as channel:
        for _ in range(3):
            await channel.unary_unary(METHOD)(b"", timeout=10)
    assert mesh.count("epd_tls_connections_total", state="opened") == before + 1
    assert mesh.count("epd_tls_connections_total", state="authenticated") == 1


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)]
)
async def test_plain_talk_gets_at_most_an_alert(mesh: Mesh, words: bytes) -> None:
    host, _, port = mesh.server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(words)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    # A TLS alert is type 21, two bytes of version, two of length, and two more: no word of ours.
    assert answer == b"" or (answer[0] == 21 and len(answer) <= 7)


async def test_another_than_expected_is_refused_and_counted(mesh: Mesh, tmp_path: Path) -> None:
    tls = tls_of(mesh.authority, "gateway")
    assert await mesh.refusal(tls, "prefill-1") is grpc.StatusCode.UNAVAILABLE
    assert mesh.count("epd_peer_refusals_total", reason="name") == 1
    # Known by its id: not even its own address will do.
    assert await mesh.refusal(tls, "") is grpc.StatusCode.UNAVAILABLE
    assert mesh.count("epd_peer_refusals_total", reason="name") == 2
    assert await mesh.call(tls) == b"gateway gateway"
    trusts_others = TlsOptions(
        ca_file=str(mesh_certificates(tmp_path / "others").directory / "ca.pem"),
        cert_file=tls.cert_file,
        key_file=tls.key_file,
    )
    assert await mesh.refusal(trusts_others) is grpc.StatusCode.UNAVAILABLE
    assert mesh.count("epd_peer_refusals_total", reason="untrusted") == 1


def _reissue(authority: Authority, begin: timedelta) -> TlsOptions:
    authority.issue(PeerName(WORKER, "prefill-0"), begin=datetime.now(UTC) + begin, days=1)
    return tls_of(authority, "prefill-0")


@pytest.mark.parametrize(("begin", "reason"), [(-2, "expired"), (2, "not_yet_valid")])
async def test_a_server_whose_certificate_is_out_of_date(tmp_path: Path, begin: int, reason: str) -> None:
    mesh = Mesh(tmp_path)
    await mesh.serve(_reissue(mesh.authority, timedelta(days=begin)))
    assert await mesh.refusal(tls_of(mesh.authority, "gateway")) is grpc.StatusCode.UNAVAILABLE
    assert mesh.count("epd_peer_refusals_total", reason=reason) == 1
    await mesh.server.stop()


async def test_a_server_without_tls(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    mesh.server = make_server(telemetry=mesh.telemetry)
    await mesh.server.start("127.0.0.1:0")
    assert await mesh.refusal(tls_of(mesh.authority, "gateway")) is grpc.StatusCode.UNAVAILABLE
    assert mesh.count("epd_peer_refusals_total", reason="no_tls") == 1
    await mesh.server.stop()


def test_metrics_are_for_those_who_have_a_certificate(tmp_path: Path) -> None:
    authority = mesh_certificates(tmp_path / "certs")
    tls = tls_of(authority, "gateway")  # its certificate names 127.0.0.1, too
    server, _ = telemetry.setup("gateway").metrics.serve("127.0.0.1", 0, **tls.prometheus_options())
    address = f"127.0.0.1:{server.server_port}"
    trusting = ssl.create_default_context(cafile=tls.ca_file)
    try:
        for url, context in ((f"http://{address}", None), (f"https://{address}", trusting)):
            with pytest.raises(OSError):  # noqa: PT011
                urllib.request.urlopen(f"{url}/metrics", timeout=10, context=context).read()
        trusting.load_cert_chain(tls_of(authority, "operator").cert_file, tls_of(authority, "operator").key_file)
        with urllib.request.urlopen(f"https://{address}/metrics", timeout=10, context=trusting) as answer:
            assert b"epd_tls_connections_total" in answer.read()
    finally:
        server.shutdown()
        server.server_close()
