"""Several models behind one gateway: each request stays among its model's workers, and errors say what there is."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import pytest

from common.errors import InvalidArgument
from epd.inference import inference_pb2, inference_pb2_grpc
from epd.v1 import generation_pb2
from services.gateway.names import Names
from tests.fakes import LAYOUT, MODEL, FakeWorker, spell
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal

OTHER = "other"
OTHER_LAYOUT = msgspec.structs.replace(LAYOUT, model=OTHER)


@pytest.fixture
async def two(model_dir: Path) -> AsyncIterator[Mesh]:
    """A gateway of two models; `fake` has workers, of the second nothing has come yet."""
    mesh = Mesh(model_dir)
    models = {MODEL: str(model_dir), OTHER: str(model_dir)}
    await mesh.start(models=models, aliases={"gpt": OTHER}, route_wait_seconds=0.2)
    await mesh.pair(script=spell("one"))
    yield mesh
    await mesh.stop()


async def other_pair(mesh: Mesh) -> tuple[FakeWorker, FakeWorker]:
    options: dict[str, Any] = {"layout": OTHER_LAYOUT, "script": spell("two")}
    return await mesh.add("p9", ["prefill"], **options), await mesh.add("d9", ["decode"], **options)


async def listed(mesh: Mesh) -> dict[str, str]:
    answer = await mesh.stub.ListModels(generation_pb2.ListModelsRequest())
    return {model.id: model.root for model in answer.models}


async def test_each_request_stays_in_its_models_pool(two: Mesh) -> None:
    await other_pair(two)
    for _ in range(3):
        assert (await generate(two, ask(model=MODEL))).texts == {0: "one"}
        assert (await generate(two, ask(model=OTHER))).texts == {0: "two"}
    assert (await generate(two, ask())).texts == {0: "one"}  # the first is the default
    for name, worker in two.workers.items():
        assert {request.model for _, request in worker.calls} == {OTHER if "9" in name else MODEL}


async def test_an_alias_is_another_name_of_the_same_model(two: Mesh) -> None:
    await other_pair(two)
    result = await generate(two, ask(model="gpt"))
    assert result.texts == {0: "two"}
    assert {response.model for response in result.responses} == {OTHER}
    assert await listed(two) == {MODEL: MODEL, OTHER: OTHER, "gpt": OTHER}


async def test_http_and_kserve_list_all_of_them(two: Mesh) -> None:
    await other_pair(two)
    async with httpx.AsyncClient(base_url=f"http://{two.gateway.http_address}", timeout=20) as http:
        data = (await http.get("/v1/models")).json()["data"]
        assert {model["id"]: model["root"] for model in data} == {MODEL: MODEL, OTHER: OTHER, "gpt": OTHER}
        assert (await http.get("/v1/models/gpt")).json()["root"] == OTHER
        body = {"model": "gpt", "prompt": "x", "max_tokens": 9}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (OTHER, "two")
    stub = inference_pb2_grpc.GRPCInferenceServiceStub(two.channel)
    for name in (MODEL, OTHER, "gpt"):
        assert (await stub.ModelReady(inference_pb2.ModelReadyRequest(name=name))).ready


async def test_an_unknown_model_is_refused_with_the_names_there_are(two: Mesh) -> None:
    code, metadata, details = await refusal(two, ask(model="nobody"))
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    assert details == "model 'nobody' is not served here; served: fake, gpt, other"


async def test_a_pool_without_a_role_is_named(two: Mesh) -> None:
    """Not even a worker of the role in another model's pool helps."""
    code, metadata, details = await refusal(two, ask(model=OTHER))
    assert (code, metadata["epd-reason"]) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKERS")
    assert details.endswith("other now: none has registered")
    await two.add("p9", ["prefill"], layout=OTHER_LAYOUT)
    _, _, details = await refusal(two, ask(model="gpt"))
    assert details.endswith("other now: it has no decode worker")
    assert set(await listed(two)) == {MODEL}
    async with httpx.AsyncClient(base_url=f"http://{two.gateway.http_address}", timeout=20) as http:
        answer = await http.get(f"/v1/models/{OTHER}")
        assert answer.status_code == 404
        assert "no decode worker" in answer.json()["error"]["message"]
    await two.add("d9", ["decode"], layout=msgspec.structs.replace(OTHER_LAYOUT, revision="r2"))
    _, _, details = await refusal(two, ask(model=OTHER))
    assert details.endswith("its prefill and decode workers differ in revision, dtype or block size")


async def test_a_pool_whose_workers_are_away_says_so(two: Mesh) -> None:
    _, decode = await other_pair(two)
    await decode.kill()
    worker = two.gateway.fleet.get("d9")
    assert worker is not None
    worker.mark_down("test")
    _, _, details = await refusal(two, ask(model=OTHER))
    assert details.endswith("other now: none of its 1 decode workers can be reached")


@pytest.mark.parametrize("aliases", [{"a": "nothing"}, {"m": "m"}, {"": "m"}, {"x" * 257: "m"}])
def test_an_alias_that_means_nothing_new_is_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Names(["m"], [], aliases)
    assert caught.value.field == "aliases"
