"""Workers that come, go, lose their lease or do not fit each other, as requests notice it."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cache.keys import KvLayout
from common.engine.settings import TimedModel
from common.rpc.channel import connect
from epd.v1 import decode_pb2, decode_pb2_grpc, generation_pb2, types_pb2
from services.worker import Worker
from tests.e2e.conftest import Meshes
from tests.etcd import etcd_server
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh, collect, request

session = pytest.mark.asyncio(loop_scope="session")

SERVING = health_pb2.HealthCheckResponse.SERVING
PROMPT = list(range(20, 60))
SLOW: dict[str, Any] = {
    "executor": "timed",
    "timed": TimedModel(base_seconds=0.03, num_layers=3, vocab_size=512, max_context=4096),
}
TTL = 3


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def health(worker: Worker) -> AsyncIterator[list[bool]]:
    """Whether the worker says it serves, one entry a change."""
    seen: list[bool] = []
    async with connect(worker.address) as channel:

        async def follow() -> None:
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                seen.append(answer.status == SERVING)

        task = asyncio.create_task(follow())
        try:
            await until(lambda: seen == [True])
            yield seen
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@session
async def test_b02_lost_lease_cuts_no_stream(meshes: Meshes, etcd: Any) -> None:
    """Not registered means not ready; what runs goes on; the worker comes back by itself and gets requests again."""
    async with meshes.make(worker={"lease_ttl_seconds": TTL}, **SLOW) as mesh:
        alone = (await mesh.generate(PROMPT, max_tokens=200, ignore_eos=True)).tokens
        async with health(mesh.workers[1]) as seen:
            call = mesh.stub.Generate(request(PROMPT, max_tokens=200, ignore_eos=True), timeout=PATIENCE_SECONDS)
            running = asyncio.create_task(collect(call))
            await until(lambda: mesh.workers[1].context.running_requests)
            await etcd.ctl("lease", "revoke", f"{mesh.workers[1]._registration._lease_id:x}")
            await until(lambda: not mesh.gateway.fleet.get("decode-1"))
            assert await mesh.routable_workers() == (0, 0)
            await until(lambda: seen == [True, False, True])
            answer = await running
        assert answer.tokens == alone
        assert answer.accounting.attempts == 1
        assert (await mesh.generate(PROMPT, max_tokens=3, ignore_eos=True)).tokens == alone[:3]
        await mesh.settled()


@session
async def test_b01_etcd_paused_beyond_the_ttl(checkpoint: Any, tmp_path: Path) -> None:
    """Requests go on without a registry; the workers say that they are not listed, and are again afterwards."""
    async with etcd_server(tmp_path / "etcd") as own:
        path = checkpoint("llama")
        made = LocalMesh(own.settings(), path, tmp_path / "run", worker={"lease_ttl_seconds": TTL})
        async with made as mesh, health(mesh.workers[0]) as prefill, health(mesh.workers[1]) as decode:
            expected = (await mesh.generate(PROMPT, max_tokens=6, ignore_eos=True)).tokens
            own.pause()
            try:
                await until(lambda: prefill[-1:] == decode[-1:] == [False])
                assert (await mesh.generate(PROMPT, max_tokens=6, ignore_eos=True)).tokens == expected
            finally:
                own.resume()
            await until(lambda: prefill == decode == [True, False, True])
            assert (await mesh.generate(PROMPT, max_tokens=6, ignore_eos=True)).tokens == expected
            await mesh.settled()


@session
@pytest.mark.parametrize("roles", [("prefill,decode",), ("prefill", "decode")], ids=["one", "two"])
async def test_b05_listed_means_routable(roles: tuple[str, ...], meshes: Meshes) -> None:
    """The very first request after the model shows up works, however early one looks."""
    mesh = meshes.make(roles=roles)
    try:
        await mesh.gateway.start()
        await mesh.connect(mesh.gateway.grpc_address)
        http = httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=PATIENCE_SECONDS)
        async with http:
            assert (await http.get("/ready")).status_code == 503

            async def ask_when_listed() -> Any:
                while not (await mesh.stub.ListModels(generation_pb2.ListModelsRequest())).models:
                    await asyncio.sleep(0)
                return await mesh.generate(PROMPT, max_tokens=4, ignore_eos=True)

            async def ask_when_listed_by_http() -> httpx.Response:
                while not (await http.get("/v1/models")).json()["data"]:
                    await asyncio.sleep(0)
                return await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 4})

            async def ask_when_ready() -> httpx.Response:
                while (await http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0)
                return await http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 4})

            async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
                asking = [group.create_task(ask()) for ask in (ask_when_listed_by_http, ask_when_ready)]
                first = group.create_task(ask_when_listed())
                for worker in mesh.workers:
                    await worker.start()
            assert first.result().accounting.attempts == 1
            assert len(first.result().tokens) == 4
            assert [task.result().status_code for task in asking] == [200, 200]
        await mesh.settled()
        await mesh.channel.close()
    finally:
        await mesh._stop()


def odd_worker(mesh: LocalMesh, number: int, **engine: Any) -> None:
    """Gives one worker of a mesh that has not started another engine than the others."""
    settings = mesh.workers[number].settings
    changed = msgspec.structs.replace(settings.engine, **engine)
    mesh.workers[number] = Worker(msgspec.structs.replace(settings, engine=changed))


@session
@pytest.mark.parametrize("engine", [{"block_size": 32}, {"dtype": "bfloat16"}], ids=["block size", "dtype"])
async def test_a17_layouts_that_differ_are_never_paired(engine: dict[str, Any], meshes: Meshes) -> None:
    mesh = meshes.make(roles=("prefill", "decode", "decode"))
    odd_worker(mesh, 2, **engine)
    async with mesh:
        await until(lambda: len(mesh.gateway.fleet.snapshot(MODEL)) == 3)
        prefill, fitting, odd = mesh.workers
        prompts = [[9 + i, *PROMPT] for i in range(6)]
        answers = [await mesh.generate(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts]
        assert {answer.accounting.decode_worker for answer in answers} == {"decode-1"}

        # Told to pull all the same, the odd one is refused by the owner, which names both layouts.
        async with connect(odd.address) as channel:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(
                pull_request(prefill, odd), timeout=PATIENCE_SECONDS
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [message async for message in call]
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert dict(refused.value.trailing_metadata())["epd-reason"] == "LAYOUT_MISMATCH"
        layouts: list[KvLayout] = [worker.context.record.layout for worker in (prefill, odd)]
        assert all(str(layout) in refused.value.details() for layout in layouts)
        await mesh.settled()

        # And with the fitting one gone there is no pair: not listed, and refused as a matter of workers.
        await fitting.stop()
        mesh.workers.remove(fitting)
        await until(lambda: len(mesh.gateway.fleet.snapshot(MODEL)) == 2)
        assert await mesh.routable_workers() == (0, 0)
        with pytest.raises(grpc.aio.AioRpcError) as unpaired:
            await mesh.generate(PROMPT, max_tokens=3)
        assert unpaired.value.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(unpaired.value.trailing_metadata())["epd-reason"] == "NO_WORKERS"


def pull_request(owner: Worker, puller: Worker) -> decode_pb2.DecodeRequest:
    def identity(worker: Worker) -> types_pb2.WorkerIdentity:
        found = worker.context.identity
        return types_pb2.WorkerIdentity(worker_id=found.worker_id, incarnation=found.incarnation)

    return decode_pb2.DecodeRequest(
        key=types_pb2.RequestKey(request_id=secrets.token_bytes(16), attempt=1),
        target=identity(puller),
        model=MODEL,
        prompt_token_ids=PROMPT,
        choices=[0],
        source=decode_pb2.KvSource(owner=identity(owner), address=owner.address, ticket=secrets.token_bytes(16)),
    )


@session
async def test_a12_same_id_twice_at_once(meshes: Meshes) -> None:
    """The second is refused, the first is not disturbed; afterwards the id is free again, and tenants do not meet."""
    mesh = await meshes.get(**SLOW)
    asked = request(PROMPT, max_tokens=60, ignore_eos=True)
    asked.request_id = "mine"
    first = asyncio.create_task(collect(mesh.stub.Generate(asked)))
    await until(lambda: mesh.gateway.admission.in_flight)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await collect(mesh.stub.Generate(asked))
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    asked.sampling.max_tokens = 2
    other = await collect(mesh.stub.Generate(asked, metadata=[("x-epd-tenant", "other")]))
    assert len(other.tokens) == 2
    assert not first.done()
    assert len((await first).tokens) == 60
    assert len((await collect(mesh.stub.Generate(asked))).tokens) == 2
    await mesh.settled()
