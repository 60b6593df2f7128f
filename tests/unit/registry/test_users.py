"""Users of a real etcd: what each role can write there, and what it cannot."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from common.errors import EpdError, RegistryRefused, Unavailable
from common.registry.adapter import Entry, EtcdConnection
from common.registry.etcd import EtcdRegistry
from common.registry.settings import EtcdSettings, etcd_settings
from common.registry.users import make_users, turn_on
from common.rpc.certificates import Authority, issued_names
from common.rpc.peer_name import WORKER, PeerName
from tests.certificates import mesh_certificates, tls_of
from tests.etcd import EtcdForTests, eventually
from tests.unit.registry.helpers import TTL, record, registry

OWN, OTHER = "/epd/workers/prefill-0", "/epd/workers/decode-0"
GATEWAY_ENTRY, KEY_ENTRY, TENANT_ENTRY = "/epd/gateways/gateway", "/epd/keys/k1", "/epd/tenants/t1"
ADAPTER_ENTRY = "/epd/adapters/a1"
EVERYTHING = {OWN, OTHER, GATEWAY_ENTRY, KEY_ENTRY, TENANT_ENTRY, ADAPTER_ENTRY, "/elsewhere"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return mesh_certificates(tmp_path / "certs")


@pytest.fixture
async def secured(authority: Authority, tmp_path: Path) -> AsyncIterator[EtcdForTests]:
    """By certificates alone: each names its user."""
    server = EtcdForTests(tmp_path / "etcd", tls=tls_of(authority, "etcd"))
    await server.start()
    try:
        await _secure(server, authority)
        yield server
    finally:
        await server.kill()


async def _secure(server: EtcdForTests, authority: Authority) -> None:
    settings = etcd_settings((server.endpoint,), tls_of(authority, "etcd"))
    connection = EtcdConnection(settings)
    await make_users(connection, settings, issued_names(authority.directory))
    await turn_on(connection)
    await connection.close()


def settings_of(server: EtcdForTests, authority: Authority, peer_id: str) -> EtcdSettings:
    return etcd_settings((server.endpoint,), tls_of(authority, peer_id))


async def writable(settings: EtcdSettings) -> set[str]:
    """Where this user can write. Entries are left there."""
    connection, found = EtcdConnection(settings), set()
    for key in EVERYTHING:
        try:
            for _ in range(2):  # an entry that is not there, then one that is
                entry = await connection.get(key)
                assert await connection.put_if_version(Entry(key, b"x", entry.version, 0))
            found.add(key)
        except RegistryRefused:
            pass
    await connection.close()
    return found


async def readable(settings: EtcdSettings) -> set[str]:
    """Kinds of entries that this user can list."""
    connection, found = EtcdConnection(settings), set()
    for kind in ("workers", "gateways", "keys", "tenants", "adapters"):
        try:
            await connection.entries(settings.folder(kind))
            found.add(kind)
        except RegistryRefused:
            pass
    await connection.close()
    return found


async def test_each_certificate_writes_what_is_its_own(secured: EtcdForTests, authority: Authority) -> None:
    worker, gateway, people = (settings_of(secured, authority, name) for name in ("prefill-0", "gateway", "operator"))
    assert await writable(worker) == {OWN}
    assert await readable(worker) == {"workers", "adapters"}
    assert await writable(gateway) == {GATEWAY_ENTRY, ADAPTER_ENTRY}
    assert await readable(gateway) == {"workers", "gateways", "keys", "tenants", "adapters"}
    assert await writable(people) == {KEY_ENTRY, TENANT_ENTRY}
    assert await readable(people) == {"workers", "gateways", "keys", "tenants", "adapters"}


async def test_a_worker_registers_and_cannot_take_anothers_place(secured: EtcdForTests, authority: Authority) -> None:
    mine = settings_of(secured, authority, "prefill-0")
    async with registry(settings_of(secured, authority, "gateway")) as gateway, registry(mine) as worker:
        watch = await gateway.watch(lambda workers: None)
        registration = await worker.register(record("prefill-0"), TTL)
        await eventually(lambda: set(watch.workers) == {"prefill-0"})
        with pytest.raises(RegistryRefused, match="permission"):
            await worker.register(record("decode-0"), TTL)
        # Nor can another end it: a lease is its keys'.
        thief = EtcdConnection(settings_of(secured, authority, "decode-0"))
        with pytest.raises(EpdError, match="permission"):
            await thief.revoke(registration._lease_id)
        await thief.close()
        assert set(watch.workers) == {"prefill-0"}


async def test_etcds_own_certificate_administers_it(secured: EtcdForTests, authority: Authority) -> None:
    """A worker that comes later gets its user."""
    authority.issue(PeerName(WORKER, "prefill-1"))
    await _secure(secured, authority)
    assert await writable(settings_of(secured, authority, "prefill-1")) == set()  # of the keys that are asked for
    assert await readable(settings_of(secured, authority, "prefill-1")) == {"workers", "adapters"}
    connection = EtcdConnection(settings_of(secured, authority, "gateway"))
    with pytest.raises(RegistryRefused):
        await turn_on(connection)
    await connection.close()


async def test_rights_outlive_a_restart(secured: EtcdForTests, authority: Authority) -> None:
    await secured.restart(wipe=False)
    assert await writable(settings_of(secured, authority, "prefill-0")) == {OWN}


async def test_strangers_get_no_connection(secured: EtcdForTests, authority: Authority, tmp_path: Path) -> None:
    stranger = mesh_certificates(tmp_path / "stranger")
    authority.issue(PeerName(WORKER, "unknown-0"))
    trusted = etcd_settings((secured.endpoint,), tls_of(authority, "gateway"))
    forged = tls_of(stranger, "gateway")
    for settings, error in (
        ({"ca_file": ""}, Unavailable),  # plain text
        ({"cert_file": "", "key_file": ""}, Unavailable),
        ({"cert_file": forged.cert_file, "key_file": forged.key_file}, Unavailable),
        ({"ca_file": forged.ca_file}, Unavailable),  # we do not trust it
        ({"server_name": "gateway"}, Unavailable),  # another than we asked for
    ):
        with pytest.raises(error):
            await EtcdRegistry(_changed(trusted, connect_timeout_seconds=0.5, **settings)).start()
    with pytest.raises(EpdError):  # of the authority, but no user of etcd
        await EtcdRegistry(_changed(settings_of(secured, authority, "unknown-0"), connect_timeout_seconds=0.5)).start()


def _changed(settings: EtcdSettings, **changes: object) -> EtcdSettings:
    return msgspec.structs.replace(settings, **changes)


async def test_passwords_for_an_etcd_without_certificates(etcd: EtcdForTests) -> None:
    passwords = {"worker": "w", "gateway": "g", "client": "c"}
    connection = EtcdConnection(etcd.settings())
    await make_users(connection, etcd.settings(), passwords=passwords)
    await make_users(connection, etcd.settings(), passwords={**passwords, "worker": "new"})  # again: it is changed
    await turn_on(connection, "r")
    await connection.close()
    worker = etcd.settings(user="worker", password="new")
    assert await writable(worker) == {OWN, OTHER}
    assert await readable(worker) == {"workers", "adapters"}
    assert await writable(etcd.settings(user="gateway", password="g")) == {GATEWAY_ENTRY, ADAPTER_ENTRY}
    assert await writable(etcd.settings(user="client", password="c")) == {KEY_ENTRY, TENANT_ENTRY}
    with pytest.raises(RegistryRefused):
        await EtcdRegistry(etcd.settings(user="worker", password="w")).start()
    root = EtcdConnection(etcd.settings(user="root", password="r"))
    await make_users(root, etcd.settings(), passwords={"worker": "newer"})  # by root, once rights are on
    await root.close()
    assert await readable(etcd.settings(user="worker", password="newer")) == {"workers", "adapters"}
