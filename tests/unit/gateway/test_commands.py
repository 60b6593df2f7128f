"""Commands against a gateway: health, status, trace."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from common import telemetry
from common.errors import InvalidArgument, Unavailable
from common.rpc.server import make_server
from services.commands import ask, inspect
from services.commands.health import health
from tests.fakes import MODEL
from tests.unit.gateway.conftest import Mesh

NO_ETCD = "127.0.0.1:1"


async def test_health_of_a_gateway_is_that_a_request_reaches_workers(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    address = mesh.gateway.grpc_address
    with pytest.raises(Unavailable, match="no worker can take requests"):
        await health(address, "")
    await health(address, "epd.v1.GenerationService")  # the process itself is well
    await mesh.add("p0", ["prefill"])
    with pytest.raises(Unavailable, match="no worker can take requests"):
        await health(address, "")
    await mesh.add("d0", ["decode"])
    capsys.readouterr()
    await health(address, "")
    assert capsys.readouterr().out == f"{address} SERVING: {MODEL}\n"
    await mesh.gateway.drain()
    with pytest.raises(Unavailable, match="NOT_SERVING"):
        await health(address, "")


async def test_health_of_a_server_that_is_no_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    server = make_server(telemetry=telemetry.setup("worker"))
    await server.start("127.0.0.1:0")
    try:
        with pytest.raises(Unavailable, match="NOT_SERVING"):
            await health(server.address, "")
        await server.set_serving(True)
        await health(server.address, "")
        assert capsys.readouterr().out == f"{server.address} SERVING\n"
    finally:
        await server.stop()


async def test_status_without_etcd_tells_what_the_gateway_knows(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unavailable, match=NO_ETCD):  # nothing to tell
        await inspect.status(mesh.gateway.grpc_address, NO_ETCD)
    await mesh.pair()
    capsys.readouterr()
    await inspect.status(mesh.gateway.grpc_address, NO_ETCD)
    told = capsys.readouterr().out
    for part in (MODEL, "1 prefill, 1 decode", NO_ETCD, "--etcd"):
        assert part in told


async def test_timing_ends_with_the_command_that_shows_the_trace(
    mesh: Mesh, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    await mesh.pair()
    address = mesh.gateway.grpc_address
    await ask.generate(address, "hi", ask.Question(raw=True, max_tokens=3), as_json=False, timing=True)
    command = capsys.readouterr().err.strip().splitlines()[-1].split()
    assert command[:2] == ["epd", "trace"]
    assert command[3:] == ["--address", address]
    picture = tmp_path / "trace.svg"
    await inspect.trace(address, command[2], picture=picture)
    assert "gateway.generate" in capsys.readouterr().out
    drawn = picture.read_text()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert "gateway.generate" in drawn
    assert "url(" not in drawn.replace("url(#", "")  # nothing is fetched by whoever looks at it
    with pytest.raises(InvalidArgument, match="cannot be written"):
        await inspect.trace(address, command[2], picture=tmp_path / "absent" / "trace.svg")
