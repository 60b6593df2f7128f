"""A mesh of separate processes under TLS: exact tokens by encrypted channels, and whoever is not who it should be."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
import pytest_asyncio

from common import telemetry
from common.errors import PermissionDenied
from common.registry.adapter import EtcdConnection
from common.registry.etcd import EtcdRegistry
from common.registry.settings import EtcdSettings, etcd_settings
from common.registry.users import make_users, turn_on
from common.rpc.certificates import Authority, issued_names
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from common.rpc.peer_name import WORKER, PeerName
from common.rpc.tls import TlsOptions
from epd.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    generation_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    trace_pb2,
    trace_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.certificates import mesh_certificates, tls_of
from tests.e2e.test_vlm_exact import Asked
from tests.etcd import EtcdForTests
from tests.processes import ProcessMesh, Role

session = pytest.mark.asyncio(loop_scope="session")


def files(tls: TlsOptions, **more: Any) -> dict[str, Any]:
    return {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file, **more}


class TlsMesh(ProcessMesh):
    """Every process with its own certificate; etcd with a user for each of them."""

    def __init__(self, etcd: EtcdForTests, checkpoint: Path, directory: Path, authority: Authority) -> None:
        super().__init__(etcd, checkpoint, directory, ("encode", "prefill", "decode"))
        self.authority = authority
        for role in self.roles:
            mine = files(tls_of(authority, role.name))
            role.settings["etcd"] = {**role.settings["etcd"], **mine, "server_name": "etcd"}
            if role is self.gateway:
                role.settings |= {"tls": {**mine, "require_client_cert": False}, "worker_tls": mine}
            else:
                role.settings["tls"] = mine
        self.http = self.http.replace("http:", "https:")
        self.ca = tls_of(authority, "gateway").ca_file

    async def connect(self, address: str) -> None:
        self.channel = connect(address, tls=TlsOptions(ca_file=self.ca))  # a client: no certificate of its own
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    def dial(self, worker: Role, certificate: str = "operator") -> grpc.aio.Channel:
        return connect(worker.address, worker.name, tls=tls_of(self.authority, certificate))

    async def status(self, worker: Role, *, timeout: float = 10.0) -> worker_pb2.GetStatusResponse:
        async with self.dial(worker) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=timeout)

    def registry_of(self, peer_id: str) -> EtcdSettings:
        settings = etcd_settings((self.etcd.endpoint,), tls_of(self.authority, peer_id))
        return msgspec.structs.replace(settings, prefix=self.gateway.settings["etcd"]["prefix"])

    async def metrics(self) -> str:
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=self.ca)) as client:
            return (await client.get(f"{self.http}/metrics")).text

    async def check_answers(self, checkpoint: Path, seed: str, count: int = 1) -> list[Any]:
        """Of requests with an image each, so that all channels between the workers are used."""
        found, rng = [], random.Random(seed)
        for _ in range(count):
            asked = Asked(checkpoint, "one", rng)
            answer = await asked.ask(self)
            assert answer.tokens == asked.tokens
            found.append(answer)
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TlsMesh]:
    directory = tmp_path_factory.mktemp("tls")
    authority = mesh_certificates(directory / "certs", ("encode-0", "prefill-0", "decode-0", "decode-1"))
    etcd = EtcdForTests(directory / "etcd", tls=tls_of(authority, "etcd"))
    await etcd.start()
    made = TlsMesh(etcd, checkpoint("vlm-llava"), directory, authority)
    try:
        connection = EtcdConnection(made.registry_of("etcd"))
        await make_users(connection, made.registry_of("etcd"), issued_names(authority.directory))
        await turn_on(connection)
        await connection.close()
        async with made:
            yield made
    finally:
        await etcd.kill()
    left = [process for role in made.roles for process in role.left()]
    assert not left, left


@session
async def test_exact_tokens_and_bytes_by_an_encrypted_channel(mesh: TlsMesh, checkpoint: Callable[..., Path]) -> None:
    for answer in await mesh.check_answers(checkpoint("vlm-llava"), "tls", 2):
        stub = trace_pb2_grpc.TraceServiceStub(mesh.channel)
        spans = (await stub.GetTrace(trace_pb2.GetTraceRequest(trace_id=answer.accounting.trace_id))).spans
        for name in (telemetry.TRANSFER_PULL, telemetry.EMBEDDING_PULL):
            pulls = [span for span in spans if span.name == name]
            assert [span.attributes[telemetry.TRANSFER_CHANNEL] for span in pulls] == ["grpc"]
            assert int(pulls[0].attributes[telemetry.TRANSFER_BYTES]) > 0
    await mesh.settled()


@session
async def test_public_servers_speak_tls_only(mesh: TlsMesh) -> None:
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=mesh.ca)) as client:
        assert (await client.get(f"{mesh.http}/v1/models")).status_code == 200
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{mesh.http}/v1/models")  # an authority that it does not know
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{mesh.http.replace('https:', 'http:')}/v1/models")
    async with connect(mesh.gateway.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/epd.v1.GenerationService/ListModels")(b"", timeout=10)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def _internal(channel: grpc.aio.Channel) -> Sequence[Any]:
    return (
        prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(), timeout=10),
        encode_pb2_grpc.EncodeServiceStub(channel).Encode(encode_pb2.EncodeRequest(), timeout=10),
        decode_pb2_grpc.DecodeServiceStub(channel).Decode(decode_pb2.DecodeRequest(), timeout=10),
        transfer_pb2_grpc.TransferServiceStub(channel).Read(transfer_pb2.ReadRequest(), timeout=10),
        worker_pb2_grpc.WorkerServiceStub(channel).Watch(worker_pb2.WatchRequest(), timeout=10),
    )


@session
async def test_a_clients_certificate_opens_no_internal_service(mesh: TlsMesh, checkpoint: Callable[..., Path]) -> None:
    for worker in mesh.workers.values():
        async with mesh.dial(worker) as channel:
            for call in _internal(channel):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    async for _ in call:
                        pass
                if raised.value.code() is not grpc.StatusCode.UNIMPLEMENTED:  # of another role's service
                    assert isinstance(from_rpc(raised.value), PermissionDenied)
    await mesh.check_answers(checkpoint("vlm-llava"), "clients")
    await mesh.settled()


@session
async def test_registered_under_anothers_name(mesh: TlsMesh, checkpoint: Callable[..., Path]) -> None:
    """decode-1 lists decode-0's address as its own, as if it had stolen the place of one: no request goes there."""
    registry = EtcdRegistry(mesh.registry_of("gateway"))
    watch = await registry.watch(lambda workers: None)
    record = msgspec.structs.replace(watch.workers["decode-0"], worker_id="decode-1", incarnation="f" * 16)
    thief = EtcdRegistry(mesh.registry_of("decode-1"))
    await thief.register(record)
    async with asyncio.timeout(30):
        while 'epd_peer_refusals_total{reason="name"}' not in await mesh.metrics():
            await asyncio.sleep(0.05)
    assert await mesh.routable_workers() == (1, 1)
    await mesh.check_answers(checkpoint("vlm-llava"), "thief", 2)
    assert "registered as worker decode-1, is refused: its certificate is another's" in mesh.gateway.log.read_text()
    await thief.close()
    await registry.close()
    await mesh.settled()


async def _refuses_to_start(mesh: TlsMesh, **changes: Any) -> str:
    settings = {**mesh.workers["decode-0"].settings, "worker_id": "decode-1", "port": 0}
    settings["tls"] = files(tls_of(mesh.authority, "decode-1"))
    role = Role("worker", "refused", "", mesh.workers["decode-0"].log.parent, {**settings, **changes})
    await role.start()
    try:
        assert await role.ended(60) == 2
        return role.log.read_text()
    finally:
        await role.destroy()
        role.log.unlink()


@session
async def test_what_a_worker_does_not_start_with(mesh: TlsMesh) -> None:
    assert "shm does not encrypt" in await _refuses_to_start(mesh, channels=["shm", "grpc"])
    others = files(tls_of(mesh.authority, "prefill-0"))
    assert "is of worker prefill-0, but this is worker decode-1" in await _refuses_to_start(mesh, tls=others)
    mesh.authority.issue(PeerName(WORKER, "decode-1"), begin=datetime.now(UTC) - timedelta(days=2), days=1)
    assert "`epd certs issue worker decode-1`" in await _refuses_to_start(mesh)
