"""A gateway in this process with fake workers on loopback."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from common.rpc.channel import connect
from epd.v1 import generation_pb2, generation_pb2_grpc
from services.gateway.main import Gateway
from services.gateway.settings import GatewaySettings
from tests.fakes import MODEL, FakeWorker, Network
from tests.tokenizer_files import byte_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("model"))


class Mesh:
    """Gateway, fake workers, and a client."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.network = Network()
        self.workers: dict[str, FakeWorker] = {}

    async def start(self, **settings: Any) -> None:
        fast = {
            "first_byte_seconds": 3.0,
            "route_wait_seconds": 2.0,
            "recovery_seconds": 2.0,
            "retry_backoff_seconds": 0.001,
        }
        config = {"grpc_bind": "127.0.0.1:0", "http_bind": "127.0.0.1:0", "etcd": None}
        config["models"] = {MODEL: str(self.model_dir)}
        self.gateway = Gateway(GatewaySettings(**config | fast | settings))
        await self.gateway.start()
        self.channel = connect(self.gateway.grpc_address)
        self.stub = generation_pb2_grpc.GenerationServiceStub(self.channel)

    async def add(self, worker_id: str, roles: Sequence[str], **options: Any) -> FakeWorker:
        """A worker that the gateway can route to when this returns."""
        worker = self.workers[worker_id] = FakeWorker(self.network, worker_id, roles, **options)
        await worker.start()
        await self.publish()
        return worker

    async def publish(self, wait: bool = True) -> None:
        """Tells the gateway of all workers, as the registry would."""
        fleet = self.gateway.fleet
        fleet.update({worker_id: worker.record for worker_id, worker in self.workers.items()})
        async with asyncio.timeout(10):
            while wait and not all(worker.routable for worker in fleet.all()):
                await fleet.changed()

    async def pair(self, **options: Any) -> tuple[FakeWorker, FakeWorker]:
        return await self.add("p0", ["prefill"], **options), await self.add("d0", ["decode"], **options)

    async def stop(self) -> None:
        await self.channel.close()
        await self.gateway.stop()
        for worker in self.workers.values():
            await worker.kill()


@pytest.fixture
async def mesh(model_dir: Path) -> AsyncIterator[Mesh]:
    found = Mesh(model_dir)
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
async def http(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as client:
        yield client


class Result:
    """A whole answer."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.reasons: dict[int, str] = {}
        self.deltas: dict[int, Any] = {}  # each choice's last
        self.responses: list[generation_pb2.GenerateResponse] = []

    def add(self, response: generation_pb2.GenerateResponse) -> None:
        self.responses.append(response)
        for choice in response.choices:
            i = choice.index
            self.texts[i] = self.texts.get(i, "") + choice.text
            self.token_ids.setdefault(i, []).extend(choice.token_ids)
            self.logprobs.setdefault(i, []).extend(choice.logprobs)
            if choice.finish_reason:
                assert i not in self.reasons, "a choice ended twice"
                self.reasons[i] = "stop" if choice.finish_reason == 1 else "length"
                self.deltas[i] = choice

    @property
    def usage(self) -> Any:
        return self.responses[-1].usage

    @property
    def accounting(self) -> Any:
        return self.responses[-1].accounting


def ask(text: str = "hello", *, max_tokens: int | None = None, n: int | None = None, **fields: Any) -> Any:
    """A request; keyword arguments of SamplingParams go there."""
    request = generation_pb2.GenerateRequest(text=text)
    if max_tokens is not None:
        request.sampling.max_tokens = max_tokens
    if n is not None:
        request.n = n
    for name, value in fields.items():
        target = request.sampling if name in request.sampling.DESCRIPTOR.fields_by_name else request
        if isinstance(value, list | tuple):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return request


async def generate(mesh: Mesh, request: Any, **call: Any) -> Result:
    result = Result()
    async with asyncio.timeout(20):
        async for response in mesh.stub.Generate(request, **call):
            result.add(response)
    return result


async def refusal(mesh: Mesh, request: Any, **call: Any) -> tuple[grpc.StatusCode, dict[str, str], str]:
    """Status, trailing metadata and details of a request that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(mesh, request, **call)
    error = caught.value
    return error.code(), dict(error.trailing_metadata() or ()), error.details() or ""
