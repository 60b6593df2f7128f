"""Pulls in a mesh with TLS: by encrypted channels, between those whom the certificates name, and nobody else."""

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common import telemetry
from common.errors import InvalidArgument, PermissionDenied, TransferFailed, TransferRefused
from common.policies.handoff.terms import HandoffLimits, Span
from common.rpc import wire
from common.rpc.access import Access
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from common.rpc.server import make_server
from common.transfer.channel_grpc import span_to_proto
from common.transfer.channel_shm import ShmServer
from common.transfer.channels import CHANNELS, allowed_channels
from common.transfer.key import Identity, TransferKey
from common.transfer.pool_memory import PoolMemory
from common.transfer.puller import Puller
from common.transfer.service import TransferService
from common.transfer.tables import PublicationTables
from epd.v1 import transfer_pb2 as pb
from epd.v1 import transfer_pb2_grpc
from tests.certificates import mesh_certificates, tls_of
from tests.unit.transfer.mesh import (
    LAYERS,
    LAYOUT,
    POOL_BLOCKS,
    PULLER,
    TICKET,
    OwnerSide,
    PullerSide,
    new_key,
)

PULL, READ = "/epd.v1.TransferService/Pull", "/epd.v1.TransferService/Read"
ENCRYPTED = allowed_channels(encrypted=True)


class SecureMesh:
    """An owner, prefill-0, that still has a socket for shm, and pullers with whatever certificate."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.authority = mesh_certificates(folder / "certs", ("prefill-0", PULLER.worker_id, "decode-1"))
        self.telemetry = telemetry.setup("prefill")
        self.metrics = self.telemetry.metrics
        self.owner = OwnerSide(None, HandoffLimits(create_wait_seconds=0.3), LAYOUT, "prefill-0", "p1")
        tables = PublicationTables(kv=self.owner.table)
        self.shm = ShmServer(self.run_dir, tables)
        self.owner.service = TransferService(tables, channels=ENCRYPTED, nonce=self.shm.nonce)
        self.pullers: list[Puller] = []

    async def start(self) -> None:
        tls = tls_of(self.authority, "prefill-0")
        self.server = make_server(telemetry=self.telemetry, tls=tls, access=Access(self.metrics))
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self.owner.service, self.server.grpc)
        await self.server.start("127.0.0.1:0")
        self.owner.address = self.server.address
        await self.shm.start()

    async def stop(self) -> None:
        for puller in self.pullers:
            await puller.close()
        self.owner.table.shut_down()
        await self.shm.stop()
        await self.server.stop()

    def puller(
        self, certificate: str = PULLER.worker_id, identity: Identity = PULLER, channels: tuple[str, ...] = ENCRYPTED
    ) -> PullerSide:
        pool = PoolMemory.create(LAYERS, POOL_BLOCKS, LAYOUT.unit_bytes)
        dial = functools.partial(connect, tls=tls_of(self.authority, certificate), metrics=self.metrics)
        puller = Puller(identity, pool, LAYOUT, dial, channels=channels, run_dir=str(self.run_dir))
        self.pullers.append(puller)
        return PullerSide(puller, pool)

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(metric, labels) or 0.0

    async def refused(self, side: PullerSide, key: TransferKey, **changes: Any) -> BaseException:
        """The error of a pull that must fail, and proof that it got and held nothing."""
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await side.pull(self.owner, key, **changes)
        assert not side.reserved_for
        assert not side.pool.data.any()
        return caught.value


@pytest.fixture
async def mesh() -> AsyncIterator[SecureMesh]:
    with tempfile.TemporaryDirectory(prefix="epd") as directory:
        made = SecureMesh(Path(directory))
        await made.start()
        yield made
        await made.stop()


async def test_bytes_travel_by_an_encrypted_channel(mesh: SecureMesh) -> None:
    key = new_key()
    mesh.owner.compute_all(mesh.owner.publish(key))
    side = mesh.puller()
    result = await side.pull(mesh.owner, key)
    assert (result.moved, result.channel) == (True, "grpc")
    assert side.has(mesh.owner)
    assert CHANNELS[result.channel].encrypted


async def test_owner_and_puller_each_insist_on_encryption(mesh: SecureMesh) -> None:
    """A puller that offers shm alone, and an owner that chooses it although it was not offered."""
    key = new_key()
    mesh.owner.compute_all(mesh.owner.publish(key))
    careless = mesh.puller(channels=("shm",))
    error = await mesh.refused(careless, key)
    assert isinstance(error, InvalidArgument)
    assert "the owner has grpc" in error.message
    mesh.owner.service._choose = lambda opening: "shm"  # type: ignore[method-assign]
    careful = mesh.puller()
    assert "not offered" in str(await mesh.refused(careful, new_key_of(mesh)))


def new_key_of(mesh: SecureMesh) -> TransferKey:
    key = new_key()
    mesh.owner.compute_all(mesh.owner.publish(key))
    return key


async def test_a_forged_or_replayed_ticket_and_another_tenant(mesh: SecureMesh) -> None:
    key = new_key()
    publication = mesh.owner.publish(key)
    mesh.owner.compute_all(publication)
    assert isinstance(await mesh.refused(mesh.puller(), key, ticket=b"x" * 16), TransferRefused)
    assert isinstance(await mesh.refused(mesh.puller(), key, tenant="other"), TransferRefused)
    another_life = mesh.puller(identity=Identity(PULLER.worker_id, "another life"))
    assert isinstance(await mesh.refused(another_life, key), TransferRefused)
    assert mesh.count("epd_call_errors_total", method=PULL, reason="TRANSFER_REFUSED") == 3
    side = mesh.puller()
    assert (await side.pull(mesh.owner, key)).moved
    assert isinstance(await mesh.refused(mesh.puller(), key), TransferFailed)  # replayed
    assert mesh.count("epd_call_errors_total", method=PULL, reason="TRANSFER_FAILED") == 1
    assert isinstance(await mesh.refused(mesh.puller(), new_key()), TransferFailed)  # an id that nobody has
    async with asyncio.timeout(10):
        await publication.released.wait()
    assert (mesh.owner.table.open_publications, mesh.owner.table.open_pulls, mesh.owner.releases) == (0, 0, 1)


async def test_a_stolen_ticket_is_worth_nothing_to_another_worker(mesh: SecureMesh) -> None:
    """decode-1 knows all that decode-0 knows, and says that it is decode-0: its certificate says otherwise."""
    key = new_key()
    publication = mesh.owner.publish(key)
    mesh.owner.compute_all(publication)
    assert isinstance(await mesh.refused(mesh.puller("decode-1"), key), PermissionDenied)
    assert mesh.count("epd_call_errors_total", method=PULL, reason="PERMISSION_DENIED") == 1
    side = mesh.puller()
    side.room.clear()
    pulling = side.pull(mesh.owner, key)
    await mesh.owner.table.until(lambda: mesh.owner.table.state(key).streaming)
    # The lease is open, so whoever has the ticket could read.
    request = pb.ReadRequest(key=wire.key_to_proto(key), ticket=TICKET, spans=[span_to_proto(Span(0, 1, 0, 1))])
    async with connect(mesh.owner.address, "prefill-0", tls=tls_of(mesh.authority, "decode-1")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in transfer_pb2_grpc.TransferServiceStub(channel).Read(request, timeout=10):
                pass
    assert isinstance(from_rpc(raised.value), PermissionDenied)
    assert mesh.count("epd_call_errors_total", method=READ, reason="PERMISSION_DENIED") == 1
    side.room.set()
    assert (await pulling).moved


@pytest.mark.parametrize("certificate", ["gateway", "operator", "etcd"])
async def test_only_workers_pull(mesh: SecureMesh, certificate: str) -> None:
    key = new_key()
    mesh.owner.compute_all(mesh.owner.publish(key))
    assert isinstance(await mesh.refused(mesh.puller(certificate), key), PermissionDenied)
    role = {"operator": "client"}.get(certificate, certificate)
    assert mesh.count("epd_access_refusals_total", method=PULL, role=role) == 1
    assert (await mesh.puller().pull(mesh.owner, key)).moved


async def test_an_owner_that_is_not_the_one_it_is_said_to_be(mesh: SecureMesh) -> None:
    """Whoever sits at another's address gets no ticket."""
    mesh.owner.identity = Identity("prefill-1", "p1")
    assert isinstance(await mesh.refused(mesh.puller(), new_key()), TransferFailed)
    assert mesh.count("epd_peer_refusals_total", reason="name") == 1
    assert mesh.count("epd_call_errors_total", method=PULL, reason="TRANSFER_FAILED") == 0  # it heard of nothing


def test_forcing_an_unencrypted_channel_is_a_configuration_error() -> None:
    assert allowed_channels(encrypted=False) == ("shm", "grpc")
    assert allowed_channels(("grpc", "shm"), encrypted=False) == ("grpc", "shm")
    assert ENCRYPTED == ("grpc",)
    with pytest.raises(InvalidArgument, match=r"shm does not encrypt, .* channels that do: grpc"):
        allowed_channels(("shm", "grpc"), encrypted=True)
    with pytest.raises(InvalidArgument, match="'pigeon' is none of shm, grpc"):
        allowed_channels(("pigeon",), encrypted=False)
