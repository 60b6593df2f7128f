"""`epd bench`'s two ways into a gateway."""

import asyncio
from typing import Any

import pytest

from common.errors import ModelNotFound, NoWorkers, Unavailable
from common.registry.local_etcd import free_port
from services.bench.grpc_target import GrpcTarget
from services.bench.http_target import HttpTarget
from services.bench.load import closed_loop
from services.bench.outcome import Outcome
from services.bench.workload import Lengths, Shape, synthetic
from tests.fakes import MODEL

SHAPE = Shape(prompt=Lengths(20, 20), output=Lengths(6, 6))


@pytest.fixture
async def targets(mesh: Any):
    """Both, by name."""
    await mesh.pair()
    options: dict[str, Any] = {"timeout_seconds": 30.0, "ignore_eos": True}
    http = HttpTarget(f"http://{mesh.gateway.http_address}/v1", key="", chat=False, **options)
    chat = HttpTarget(f"http://{mesh.gateway.http_address}", key="", chat=True, **options)
    found = {
        "grpc": await GrpcTarget.find(mesh.channel, "", images=False, **options),
        "http": await http.find("", images=False),
        "chat": await chat.find(MODEL, images=False),
    }
    yield found
    await http.close()
    await chat.close()


async def ask(target: Any, count: int = 4) -> list[Outcome]:
    return await closed_loop(target, synthetic(SHAPE, count, None, seed=1), 2, asyncio.Event())


@pytest.mark.parametrize("name", ["grpc", "http", "chat"])
async def test_a_load_is_answered_and_counted(name: str, targets: dict[str, Any]) -> None:
    target = targets[name]
    assert target.model == MODEL
    assert target.context > 0
    for outcome in await ask(target):
        assert outcome.reason == "", outcome.message
        assert outcome.output_tokens == 6
        assert outcome.prompt_tokens == 20 or name == "chat"
        assert 1 <= len(outcome.arrivals) <= 6
        assert outcome.sent <= outcome.arrivals[0] <= outcome.arrivals[-1] <= outcome.ended


@pytest.mark.parametrize("name", ["grpc", "http", "chat"])
async def test_errors_keep_the_servers_reason(name: str, targets: dict[str, Any], mesh: Any) -> None:
    mesh.gateway.admission.draining = True
    outcomes = await ask(targets[name])
    assert [outcome.reason for outcome in outcomes] == ["DRAINING"] * 4
    assert "shutting down" in outcomes[0].message


async def test_who_is_not_there_is_named(mesh: Any) -> None:
    await mesh.pair()
    options: dict[str, Any] = {"timeout_seconds": 30.0, "ignore_eos": True}
    with pytest.raises(NoWorkers, match=MODEL):
        await GrpcTarget.find(mesh.channel, "other", images=False, **options)
    http = HttpTarget(f"http://{mesh.gateway.http_address}", key="", chat=False, **options)
    with pytest.raises(ModelNotFound, match=MODEL):
        await http.find("other", images=False)
    await http.close()
    nowhere = HttpTarget(f"http://127.0.0.1:{free_port()}", key="", chat=False, **options)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await nowhere.find("", images=False)
    await nowhere.close()
