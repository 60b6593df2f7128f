"""LoRA adapters at the gateway: loaded on all workers or on none, and requests that reach only those that have them."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest

from common.errors import ModelNotFound
from common.registry.record import AdapterRecord, BadRecord, decode, encode
from epd.v1 import generation_pb2, worker_pb2
from services.gateway.identity.file import IdentityFile, write
from services.gateway.identity.keys import KeyRecord, hash_key, make_key
from services.gateway.identity.settings import IdentitySettings
from services.gateway.names import Adapter, Names, Served
from tests.fakes import MODEL, FakeWorker
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal

SQL, POEMS = "a" * 32, "b" * 32


def have(worker: FakeWorker, path: str = "sql", checksum: str = SQL) -> None:
    worker.adapter_files[path] = checksum


async def load(mesh: Mesh, name: str = "sql", path: str = "sql", **fields: Any) -> Any:
    return await mesh.stub.LoadAdapter(generation_pb2.LoadAdapterRequest(name=name, path=path, **fields), timeout=20)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def until(mesh: Mesh, done: Any) -> None:
    async with asyncio.timeout(10):
        while not done():
            await mesh.gateway.fleet.changed()


def names(worker: FakeWorker) -> set[str]:
    return {adapter.name for adapter in worker.adapters.adapters}


async def test_loading_reaches_every_worker_and_unloading_too(mesh: Mesh) -> None:
    workers = [*await mesh.pair(), await mesh.add("d1", ["decode"]), await mesh.add("e0", ["encode"])]
    for worker in workers:
        have(worker)
    answer = await load(mesh)
    assert (answer.checksum, answer.model) == (SQL, MODEL)
    assert [names(worker) for worker in workers] == [{"sql"}, {"sql"}, {"sql"}, set()]  # encoders need none
    result = await generate(mesh, ask(model="sql", max_tokens=3))
    assert {response.model for response in result.responses} == {"sql"}
    calls = {method: request for worker in workers for method, request in worker.calls}
    assert {(calls[method].model, calls[method].adapter) for method in ("prefill", "decode")} == {(MODEL, SQL)}
    await generate(mesh, ask(model=MODEL, max_tokens=3))
    assert workers[0].calls[-1][1].adapter == ""

    await mesh.stub.UnloadAdapter(generation_pb2.UnloadAdapterRequest(name="sql"))
    assert [names(worker) for worker in workers[:3]] == [set()] * 3
    code, metadata, details = await refusal(mesh, ask(model="sql"))
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert details.endswith("served: fake")
    code, _ = await refused(mesh.stub.UnloadAdapter(generation_pb2.UnloadAdapterRequest(name="sql")))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_one_workers_refusal_is_everybodys(mesh: Mesh) -> None:
    prefill, decode = await mesh.pair()
    have(prefill)
    code, details = await refused(load(mesh))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "d0: no such directory")
    assert names(prefill) == names(decode) == set()
    have(decode, checksum=POEMS)
    code, details = await refused(load(mesh))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "different files" in details
    assert names(prefill) == names(decode) == set()


async def test_without_a_role_nothing_is_loaded(mesh: Mesh) -> None:
    prefill = await mesh.add("p0", ["prefill"])
    have(prefill)
    code, details = await refused(load(mesh))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details.endswith("it has no decode worker")
    assert not prefill.adapter_calls


async def test_another_adapter_takes_a_name_only_when_asked_to(mesh: Mesh) -> None:
    workers = await mesh.pair()
    for worker in workers:
        have(worker)
        have(worker, "poems", POEMS)
    await load(mesh)
    code, details = await refused(load(mesh, path="poems"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "already been loaded" in details
    await load(mesh, path="poems", replace=True)
    await generate(mesh, ask(model="sql", max_tokens=3))
    assert workers[0].calls[-1][1].adapter == POEMS


async def test_requests_go_where_the_adapter_is(mesh: Mesh) -> None:
    """A prefill worker without it is left out, however idle; without any decode worker the error says so."""
    _, decode = await mesh.pair()
    other = await mesh.add("p1", ["prefill"])
    held = worker_pb2.Adapter(checksum=SQL, name="sql", model=MODEL)
    fleet = mesh.gateway.fleet
    await other.hold([held])
    await until(mesh, lambda: "sql" in fleet.adapters())
    code, metadata, details = await refusal(mesh, ask(model="sql"))
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
    assert details == "no worker can take requests for fake with this adapter now: it has no decode worker"
    listed = await mesh.stub.ListModels(generation_pb2.ListModelsRequest())
    assert [model.id for model in listed.models] == [MODEL]
    await decode.hold([worker_pb2.Adapter(checksum=SQL)])  # let go there, yet held for what runs
    await until(mesh, lambda: fleet.get("d0").adapters)  # type: ignore[union-attr]
    for _ in range(4):
        result = await generate(mesh, ask(model="sql", max_tokens=3))
        assert result.accounting.prefill_worker == "p1"


async def test_what_a_worker_says_of_other_models_adapters_counts_for_nothing(mesh: Mesh) -> None:
    prefill, _ = await mesh.pair()
    bad = [("x", "other"), ("no/name", MODEL), (MODEL, MODEL), ("good", MODEL)]
    await prefill.hold([worker_pb2.Adapter(checksum=SQL, name=name, model=model) for name, model in bad])
    await until(mesh, lambda: mesh.gateway.fleet.adapters())
    assert mesh.gateway.generator.preprocessor.names.all() == [MODEL, "good"]
    result = await generate(mesh, ask(model=MODEL, max_tokens=3))
    assert {request.adapter for _, request in prefill.calls} == {""}
    assert result.texts


async def test_only_admins_load_where_keys_are_needed(model_dir: Path, tmp_path: Path) -> None:
    keys = {tenant: make_key() for tenant in ("boss", "guest")}
    file = tmp_path / "keys.yaml"
    write(file, IdentityFile(keys=[KeyRecord(hash=hash_key(key), tenant=tenant) for tenant, key in keys.items()]))
    mesh = Mesh(model_dir)
    await mesh.start(identity=IdentitySettings(source="file", file=str(file), admins=("boss",)))
    try:
        for worker in await mesh.pair():
            have(worker)
        body = {"lora_name": "sql", "lora_path": "sql"}
        async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as http:
            statuses = []
            for tenant in ("", "guest", "boss"):
                headers = {"authorization": f"Bearer {keys[tenant]}"} if tenant else {}
                for path, asked in (("load", body), ("unload", {"lora_name": "sql"})):
                    answer = await http.post(f"/v1/{path}_lora_adapter", json=asked, headers=headers)
                    statuses.append(answer.status_code)
        assert statuses == [401, 401, 403, 403, 200, 200]
        request = generation_pb2.LoadAdapterRequest(name="sql", path="sql")
        metadata = (("authorization", f"Bearer {keys['guest']}"),)
        code, details = await refused(mesh.stub.LoadAdapter(request, metadata=metadata))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "identity.admins" in details
    finally:
        await mesh.stop()


def test_names_of_adapters_come_last() -> None:
    adapters = {"m": Adapter(SQL, "m"), "short": Adapter(SQL, "m"), "sql": Adapter(SQL, "m"), "x": Adapter(SQL, "gone")}
    found = Names(["m"], [], {"short": "m"}, lambda: adapters)
    assert found.find("m") == found.find("short") == Served("m", "m")
    assert found.find("sql") == Served("sql", "m", SQL)
    assert found.all() == ["m", "short", "sql"]
    for name in ("x", "sql"):
        with pytest.raises(ModelNotFound):
            found.find_model(name)


@pytest.mark.parametrize(
    "change",
    [{"name": "a/b"}, {"name": ""}, {"checksum": "A" * 32}, {"path": "x" * 1025}, {"model": ""}, {"more": 1}],
    ids=str,
)
def test_an_entry_of_the_registry_is_strict(change: dict[str, Any]) -> None:
    good = AdapterRecord(name="sql", model=MODEL, path="of/sql", checksum=SQL)
    assert decode(encode(good), AdapterRecord) == good
    fields = {name: getattr(good, name) for name in AdapterRecord.__struct_fields__}
    with pytest.raises(BadRecord):
        decode(msgspec.json.encode(fields | change), AdapterRecord)
