"""LoRA adapters through the whole mesh: each request's tokens are those of its adapter's merged weights."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import pytest_asyncio

from common.engine.settings import LoraSettings
from common.rpc.errors import reason_of
from epd.v1 import generation_pb2
from tests.adapters import make_adapter, merged
from tests.e2e.conftest import Meshes
from tests.e2e.test_models import MAX_TOKENS, clear_prompt, join
from tests.mesh import MODEL, PATIENCE_SECONDS, LocalMesh, collect

session = pytest.mark.asyncio(loop_scope="session")

BYTES_PER_SECOND = 60_000.0


class Adapters:
    """A directory of adapters, and the merged checkpoints that say what is right."""

    def __init__(self, base: Path, root: Path) -> None:
        self.base, self.root = base, root / "adapters"
        self.root.mkdir()
        self.merged = {"": base}
        for number, name in enumerate(("sql", "poems")):
            path = make_adapter(base, self.root / "of" / name, seed=number, r=3 + number, use_rslora=bool(number))
            self.merged[name] = merged(base, path, root / name)

    def case(self, seed: str, length: int = 40) -> tuple[list[int], dict[str, list[int]]]:
        """A prompt, and its tokens by adapter."""
        prompt, expected = clear_prompt(random.Random(seed), list(self.merged.values()), length)
        found = dict(zip(self.merged, expected, strict=True))
        assert len({tuple(tokens) for tokens in expected}) == 3
        return prompt, found


@pytest.fixture(scope="module")
def adapters(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(checkpoint("llama"), tmp_path_factory.mktemp("lora"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(meshes: Meshes, adapters: Adapters) -> AsyncIterator[LocalMesh]:
    lora = LoraSettings(directory=str(adapters.root), max_rank=8)
    async with meshes.make(roles=("prefill", "decode", "decode"), worker={"lora": lora}) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def http(mesh: LocalMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=PATIENCE_SECONDS) as made:
        yield made


async def load(mesh: LocalMesh, name: str, path: str = "", **fields: Any) -> None:
    request = generation_pb2.LoadAdapterRequest(name=name, path=path or f"of/{name}", **fields)
    await mesh.stub.LoadAdapter(request, timeout=PATIENCE_SECONDS)


async def unload(mesh: LocalMesh, name: str) -> None:
    await mesh.stub.UnloadAdapter(generation_pb2.UnloadAdapterRequest(name=name), timeout=PATIENCE_SECONDS)


async def listed(mesh: LocalMesh) -> dict[str, str]:
    answer = await mesh.stub.ListModels(generation_pb2.ListModelsRequest())
    return {model.id: model.parent for model in answer.models}


async def refused(call: Any) -> tuple[str, str]:
    """(reason, message)"""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return reason_of(caught.value.trailing_metadata() or ()), caught.value.details() or ""


@session
async def test_base_and_adapters_beside_each_other(mesh: LocalMesh, adapters: Adapters) -> None:
    for name in ("sql", "poems"):
        await load(mesh, name)
    assert await listed(mesh) == {MODEL: "", "sql": MODEL, "poems": MODEL}
    prompt, expected = adapters.case("mixed")
    order = ["", "sql", "poems"] * 2
    answers = await asyncio.gather(
        *(mesh.generate(prompt, model=name or MODEL, max_tokens=MAX_TOKENS, ignore_eos=True) for name in order)
    )
    assert [answer.tokens for answer in answers] == [expected[name] for name in order]
    # Again, now from the caches: an adapter's blocks are its own, and the gateway's index knows that.
    for name in ("", "sql", "poems"):
        answer = await mesh.generate(prompt, model=name or MODEL, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert (answer.tokens, answer.usage.cached_tokens) == (expected[name], 32)
    await mesh.settled()
    for name in ("sql", "poems"):
        await unload(mesh, name)
    assert await listed(mesh) == {MODEL: ""}


@session
async def test_a_cache_never_serves_another_adapter(mesh: LocalMesh, adapters: Adapters) -> None:
    await load(mesh, "sql")
    prompt, expected = adapters.case("cold")
    cached = []
    for name in ("sql", MODEL, "sql", MODEL):
        answer = await mesh.generate(prompt, model=name, max_tokens=MAX_TOKENS, ignore_eos=True)
        assert answer.tokens == expected["" if name == MODEL else name]
        cached.append(answer.usage.cached_tokens)
    assert cached == [0, 0, 32, 32]
    await unload(mesh, "sql")


@session
async def test_load_and_unload_as_vllm_has_them(mesh: LocalMesh, adapters: Adapters, http: httpx.AsyncClient) -> None:
    body = {"lora_name": "sql", "lora_path": str(adapters.root / "of" / "sql")}
    done = await http.post("/v1/load_lora_adapter", json=body)
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    again = await http.post("/v1/load_lora_adapter", json=body)
    assert again.status_code == 400
    assert "has already been loaded" in again.json()["error"]["message"]
    prompt, expected = adapters.case("http")
    url = f"http://{mesh.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        cards = {card.id: card.model_dump() for card in (await client.models.list()).data}
        assert (cards["sql"]["parent"], cards["sql"]["root"], cards[MODEL]["parent"]) == (MODEL, MODEL, None)
        extra = {"ignore_eos": True}
        answer = await client.completions.create(
            model="sql", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, extra_body=extra
        )
        assert answer.model == "sql"
    twin = await mesh.generate(prompt, model="sql", max_tokens=MAX_TOKENS, ignore_eos=True)
    assert (twin.tokens, answer.choices[0].text) == (expected["sql"], twin.choices[0].text)
    other = body | {"lora_path": "of/poems", "load_inplace": True}  # a new one takes the name
    assert (await http.post("/v1/load_lora_adapter", json=other)).status_code == 200
    assert (await mesh.generate(prompt, model="sql", max_tokens=MAX_TOKENS, ignore_eos=True)).tokens == expected[
        "poems"
    ]
    gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    missing = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert (missing.status_code, missing.json()["error"]["message"]) == (404, "The lora adapter 'sql' cannot be found.")
    asked = await http.post("/v1/completions", json={"model": "sql", "prompt": "x"})
    assert (asked.status_code, asked.json()["error"]["message"]) == (
        404,
        "model 'sql' is not served here; served: tiny",
    )
    lacking = await http.post("/v1/load_lora_adapter", json={"lora_name": "sql"})
    assert (lacking.status_code, lacking.json()["error"]["param"]) == (400, "lora_path")


@session
async def test_what_cannot_be_loaded_is_on_no_worker(mesh: LocalMesh, adapters: Adapters) -> None:
    make_adapter(adapters.base, adapters.root / "dora", seed=9, use_dora=True)
    make_adapter(adapters.base, adapters.root / "wide", seed=9, r=9)
    (adapters.root / "link").symlink_to("/")
    for name, path, words in (
        ("x", "dora", "DoRA is not supported"),
        ("x", "wide", "r must be 1 to 8"),
        ("x", "nothing", "below the workers' lora.directory"),
        ("x", "../adapters", "below the workers' lora.directory"),
        ("x", "..", "below the workers' lora.directory"),
        ("x", "/etc", "below the workers' lora.directory"),
        ("x", "link/etc", "below the workers' lora.directory"),
        ("x", "of/sql\0", "below the workers' lora.directory"),
        ("x", ".", "below the workers' lora.directory"),
        ("no/name", "of/sql", "lora_name must be"),
        (MODEL, "of/sql", "is the name of a model"),
    ):
        reason, message = await refused(load(mesh, name, path))
        assert reason == "INVALID_ARGUMENT", path
        assert words in message, path
    assert (await refused(load(mesh, "x", "of/sql", model="nobody")))[0] == "MODEL_NOT_FOUND"
    assert await listed(mesh) == {MODEL: ""}
    for worker in mesh.workers:
        assert all(not adapter.name for adapter in (await mesh.status(worker)).adapters)


@session
async def test_requests_that_run_outlive_the_unloading(mesh: LocalMesh, adapters: Adapters) -> None:
    await load(mesh, "poems")
    prompt, expected = adapters.case("outlive", 30)
    stream = mesh.open(prompt, model="poems", max_tokens=MAX_TOKENS, ignore_eos=True)
    running = asyncio.create_task(collect(stream))
    await stream.initial_metadata()
    await unload(mesh, "poems")
    assert (await running).tokens == expected["poems"]
    assert (await refused(mesh.generate(prompt, model="poems")))[0] == "MODEL_NOT_FOUND"


@session
async def test_an_adapter_survives_its_workers(meshes: Meshes, adapters: Adapters) -> None:
    """A stream goes on when its decode worker dies; a worker that starts later has the adapter from the registry."""
    lora = LoraSettings(directory=str(adapters.root))
    worker = {"lora": lora, "throttle_bytes_per_second": BYTES_PER_SECOND}
    async with meshes.make(roles=("prefill", "decode", "decode"), worker=worker) as mesh:
        await load(mesh, "sql")
        prompt, expected = adapters.case("dies", 100)
        stream = mesh.open(prompt, model="sql", max_tokens=MAX_TOKENS, ignore_eos=True)
        running = asyncio.create_task(collect(stream))
        decodes = mesh.workers[1:]
        async with asyncio.timeout(PATIENCE_SECONDS):  # its prompt is being pulled for more than a second
            while not (busy := [each for each in decodes if each.transfers.open_pulls]):
                await asyncio.sleep(0.01)
        await busy[0]._server.stop(0)  # as abrupt as it gets in one process
        await busy[0].stop()
        mesh.workers.remove(busy[0])
        answer = await running
        assert answer.tokens == expected["sql"]
        assert answer.accounting.attempts > 1

        late = await join(mesh, mesh.workers[1], "late")
        old = mesh.workers.pop(1)
        await old.drain()
        await old.stop()
        answer = await mesh.generate(prompt, model="sql", max_tokens=MAX_TOKENS, ignore_eos=True)
        assert (answer.tokens, answer.accounting.decode_worker) == (expected["sql"], "late")
        await unload(mesh, "sql")
        assert await listed(mesh) == {MODEL: ""}
        after = await join(mesh, late, "after")  # finds nothing in the registry
        assert not (await mesh.status(after)).adapters
        await mesh.settled()


@session
async def test_adapters_of_the_settings_are_there_from_the_start(meshes: Meshes, adapters: Adapters) -> None:
    lora = LoraSettings(directory=str(adapters.root), adapters={"fixed": "of/sql"})
    async with meshes.make(worker={"lora": lora}) as mesh:
        prompt, expected = adapters.case("start")
        assert await listed(mesh) == {MODEL: "", "fixed": MODEL}
        answer = await mesh.generate(prompt, model="fixed", max_tokens=MAX_TOKENS, ignore_eos=True)
        assert answer.tokens == expected["sql"]
