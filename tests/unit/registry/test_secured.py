"""etcd with users and with TLS."""

import subprocess
from pathlib import Path

import pytest

from common import errors
from common.registry.etcd import EtcdRegistry
from tests.etcd import EtcdForTests, etcd_server, eventually
from tests.unit.registry.helpers import TTL, record, registry


async def test_user_and_password(etcd: EtcdForTests) -> None:
    for command in (
        ("user", "add", "root:secret"),
        ("user", "grant-role", "root", "root"),
        ("role", "add", "mesh"),
        ("role", "grant-permission", "--prefix=true", "mesh", "readwrite", "/epd/"),
        ("user", "add", "mesh:word"),
        ("user", "grant-role", "mesh", "mesh"),
        ("auth", "enable"),
    ):
        await etcd.ctl(*command)
    async with registry(etcd.settings(user="mesh", password="word")) as opened:
        watch = await opened.watch(lambda workers: None)
        registration = await opened.register(record(), TTL)
        await eventually(lambda: set(watch.workers) == {"worker-1"})
        # Tokens live in the server's memory: after a restart they are worth nothing.
        await etcd.restart(wipe=False)
        await opened.register(record("worker-2"), TTL)
        await eventually(lambda: set(watch.workers) == {"worker-1", "worker-2"} and registration.alive)

    with pytest.raises(errors.RegistryRefused, match="mesh"):
        await EtcdRegistry(etcd.settings(user="mesh", password="wrong")).start()
    with pytest.raises(errors.RegistryRefused, match="permission"):
        await EtcdRegistry(etcd.settings(user="mesh", password="word", prefix="/other")).start()
    with pytest.raises(errors.EpdError) as raised:
        await EtcdRegistry(etcd.settings(connect_timeout_seconds=0.5)).start()
    assert "word" not in str(raised.value)


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make_certificates(folder: Path) -> None:
    """ca.pem, and node.pem with node.key signed by it for `localhost` alone."""
    ca, ca_key, key, request, cert = (
        str(folder / name) for name in ("ca.pem", "ca.key", "node.key", "req", "node.pem")
    )
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test authority")
    openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=node")
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=DNS:localhost\n")
    signer = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", str(extensions))
    openssl("x509", "-req", "-in", request, "-out", cert, *signer)


async def test_mutual_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "node.pem", "node.key"))
    flags = ("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", ca)
    files = {"ca_file": ca, "cert_file": cert, "key_file": key}
    async with etcd_server(tmp_path / "etcd", scheme="https", arguments=flags) as etcd:
        by_name = (f"localhost:{etcd.client_port}",)
        async with registry(etcd.settings(endpoints=by_name, **files)) as opened:
            watch = await opened.watch(lambda workers: None)
            await opened.register(record(), TTL)
            await eventually(lambda: set(watch.workers) == {"worker-1"})
        async with registry(etcd.settings(server_name="localhost", **files)):
            pass  # by address, with the name to expect

        refused = [
            {"endpoints": by_name},  # plain text
            {"endpoints": by_name, "ca_file": ca},  # no certificate of our own
            {"server_name": "other", **files},  # not the server we asked for
        ]
        for settings in refused:
            with pytest.raises(errors.Unavailable):
                await EtcdRegistry(etcd.settings(connect_timeout_seconds=0.5, **settings)).start()
        with pytest.raises(errors.InvalidArgument, match=r"gone\.pem"):
            await EtcdRegistry(etcd.settings(ca_file=str(tmp_path / "gone.pem"))).start()
