"""API keys at both edges: who gets in, as whom, and what nobody gets to see."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import yaml

from common.errors import InvalidArgument, PermissionDenied, Unauthenticated
from common.metrics import Metrics
from epd.inference import inference_pb2, inference_pb2_grpc
from epd.v1 import generation_pb2, trace_pb2, trace_pb2_grpc
from services.commands import keys as commands
from services.gateway.identity.identity import Identity
from services.gateway.identity.keys import hash_key
from services.gateway.identity.settings import IdentitySettings
from services.gateway.service import done_for
from tests.etcd import eventually
from tests.fakes import MODEL
from tests.kserve import infer
from tests.unit.gateway.conftest import Mesh, ask, generate, refusal

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


class Keys:
    """A file with a key of alice and one of bob."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = commands.FileStore(path)
        self.alice = commands.create(self.store, "alice", "laptop")
        self.bob = commands.create(self.store, "bob", "")

    def settings(self) -> IdentitySettings:
        return IdentitySettings(source="file", file=str(self.path), reload_seconds=0.02)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.yaml")


@pytest.fixture
async def closed(model_dir: Path, keys: Keys) -> AsyncIterator[Mesh]:
    """A mesh that wants keys."""
    mesh = Mesh(model_dir)
    await mesh.start(identity=keys.settings(), salt_secret="secret", metrics_bind="127.0.0.1:0")
    await mesh.pair()
    yield mesh
    await mesh.stop()


def bearer(key: str, tenant: str = "") -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} | ({"x-epd-tenant": tenant} if tenant else {})


def as_metadata(key: str, tenant: str = "") -> tuple[tuple[str, str], ...]:
    return tuple(bearer(key, tenant).items())


async def test_case_e1_the_key_names_the_tenant(closed: Mesh, keys: Keys) -> None:
    for key in (keys.alice, keys.bob, keys.alice):
        await generate(closed, ask(max_tokens=1), metadata=as_metadata(key))
    await generate(closed, ask(max_tokens=1), metadata=as_metadata(keys.bob, "bob"))
    calls = [request for _, request in closed.workers["p0"].calls]
    assert [call.tenant for call in calls] == ["alice", "bob", "alice", "bob"]
    assert calls[0].salt == calls[2].salt != calls[1].salt == calls[3].salt


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer epd-wrong", "Basic {alice}", "{alice}", "Bearer " + "x" * 257]
)
async def test_without_a_good_key_nothing_is_answered(closed: Mesh, keys: Keys, authorization: str) -> None:
    header = {"authorization": authorization.format(alice=keys.alice)} if authorization else {}
    metadata = (*header.items(), ("x-epd-tenant", "alice"))
    code, trailing, _ = await refusal(closed, ask(max_tokens=1), metadata=metadata)
    assert (code, trailing["epd-reason"]) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    traces = trace_pb2_grpc.TraceServiceStub(closed.channel)
    kserve = inference_pb2_grpc.GRPCInferenceServiceStub(closed.channel)
    stream = kserve.ModelStreamInfer(iter([infer(max_tokens=1)]), metadata=metadata)
    for call in (
        kserve.ModelInfer(infer(max_tokens=1), metadata=metadata),
        stream.read(),
        kserve.ModelReady(inference_pb2.ModelReadyRequest(name=MODEL), metadata=metadata),
        kserve.ModelMetadata(inference_pb2.ModelMetadataRequest(name=MODEL), metadata=metadata),
        kserve.ServerMetadata(inference_pb2.ServerMetadataRequest(), metadata=metadata),
        closed.stub.ListModels(generation_pb2.ListModelsRequest(), metadata=metadata),
        traces.GetTrace(trace_pb2.GetTraceRequest(trace_id="0" * 32), metadata=metadata),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (await kserve.ServerReady(inference_pb2.ServerReadyRequest())).ready
    async with httpx.AsyncClient(base_url=f"http://{closed.gateway.http_address}", timeout=20) as http:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", f"/v1/models/{MODEL}"),
            ("GET", f"/debug/trace/{'0' * 32}"),
        ):
            response = await http.request(method, path, headers=header, json=CHAT if method == "POST" else None)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "unauthenticated"
            assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/live", "/ready"):
            assert (await http.get(path)).status_code == 200
    assert not closed.workers["p0"].calls


async def test_a_tenant_other_than_the_keys_is_refused(closed: Mesh, keys: Keys) -> None:
    code, trailing, _ = await refusal(closed, ask(max_tokens=1), metadata=as_metadata(keys.alice, "bob"))
    assert (code, trailing["epd-field"]) == (grpc.StatusCode.PERMISSION_DENIED, "x-epd-tenant")
    async with httpx.AsyncClient(base_url=f"http://{closed.gateway.http_address}", timeout=20) as http:
        response = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(keys.alice, "bob"))
        assert (response.status_code, response.json()["error"]["code"]) == (403, "permission_denied")
        # Their names are labels there.
        assert (await http.get("/metrics", headers=bearer(keys.alice))).status_code == 403
        there = await http.get(f"http://{closed.gateway.metrics_address}/metrics")
        assert b"epd_requests_total" in there.content
    assert not closed.workers["p0"].calls


async def test_openai_client(closed: Mesh, keys: Keys) -> None:
    url = f"http://{closed.gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=keys.alice, max_retries=0) as client:
        answer = await client.chat.completions.create(**CHAT)
        assert answer.choices[0].message.content == "ab"
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**CHAT)


async def test_a_tenant_sees_its_own_traces(closed: Mesh, keys: Keys) -> None:
    """Also when another continues the same trace, and by the request's id as by the trace's."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for key, label in ((keys.alice, "of-alice"), (keys.bob, "of-bob")):
        request = ask(max_tokens=1, request_id=label)
        await generate(closed, request, metadata=(*as_metadata(key), ("traceparent", parent)))
    stub = trace_pb2_grpc.TraceServiceStub(closed.channel)
    by_trace = trace_pb2.GetTraceRequest(trace_id=parent.split("-")[1])
    names: dict[str, set[str]] = {}
    for key, tenant in ((keys.alice, "alice"), (keys.bob, "bob")):
        spans = (await stub.GetTrace(by_trace, metadata=as_metadata(key))).spans
        roots = [span for span in spans if span.name == "gateway.generate"]
        assert [span.attributes["epd.tenant"] for span in roots] == [tenant]
        names[tenant] = {span.span_id for span in spans}
        assert {"gateway.admit", "gateway.preprocess", "prefill.run"} <= {span.name for span in spans}
        own = (
            await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=f"of-{tenant}"), metadata=as_metadata(key))
        ).spans
        assert {span.span_id for span in own} == names[tenant]
    assert not names["alice"] & names["bob"]
    await generate(closed, ask(max_tokens=1, request_id="apart"), metadata=as_metadata(keys.alice))
    details = set()
    for label in ("apart", "unknown"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=label), metadata=as_metadata(keys.bob))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        details.add(caught.value.details())
    assert len(details) == 1


def test_spans_in_a_circle_or_without_an_owner_are_nobodys() -> None:
    def span(name: str, parent: str, tenant: str = "") -> trace_pb2.Span:
        return trace_pb2.Span(span_id=name, parent_span_id=parent, attributes={"epd.tenant": tenant} if tenant else {})

    spans = [span("a", "b"), span("b", "a"), span("c", "gone"), span("d", "e"), span("e", "", "t"), span("f", "d", "u")]
    assert set(done_for("t", {each.span_id: each for each in spans})) == {"d", "e"}


async def test_keys_come_and_go_with_the_file(closed: Mesh, keys: Keys) -> None:
    identity = closed.gateway.identity
    carol = commands.create(keys.store, "carol", "")
    await eventually(lambda: known(identity, carol))
    revoked = commands.revoke(keys.store, hash_key(keys.alice)[:12])
    assert revoked.tenant == "alice"
    await eventually(lambda: not known(identity, keys.alice))
    good = keys.path.read_bytes()
    keys.path.write_text("keys: [}")
    bad = 'epd_registry_bad_values_total{cause="identity_file"}'
    await eventually(lambda: f"{bad} 1.0" in closed.gateway.telemetry.metrics.exposition().decode())
    assert known(identity, carol)
    twice = yaml.safe_load(good)
    twice["keys"] *= 2
    keys.path.write_text(yaml.safe_dump(twice))
    await eventually(lambda: f"{bad} 2.0" in closed.gateway.telemetry.metrics.exposition().decode())
    keys.path.write_bytes(good.replace(b"tenants: {}", b"tenants: {bob: {weight: 3}}"))
    await eventually(lambda: identity.weight("bob") == 3)
    assert identity.weight("alice") == 1
    keys.path.unlink()
    await eventually(lambda: f"{bad} 3.0" in closed.gateway.telemetry.metrics.exposition().decode())
    assert known(identity, carol)


def known(identity: Identity, key: str) -> bool:
    try:
        identity.tenant_of(bearer(key))
    except Unauthenticated:
        return False
    return True


async def test_keys_are_in_no_log_span_error_or_metric(
    closed: Mesh, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = keys.alice[:-4] + "AAAA"
    texts = []
    for key, tenant in ((keys.alice, ""), (keys.alice, "bob"), (wrong, "")):
        try:
            await generate(closed, ask(max_tokens=1), metadata=as_metadata(key, tenant))
        except grpc.aio.AioRpcError as error:
            texts.append(f"{error.details()} {error.trailing_metadata()}")
        async with httpx.AsyncClient(base_url=f"http://{closed.gateway.http_address}", timeout=20) as http:
            response = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(key, tenant))
            texts.append(f"{response.headers} {response.text}")
    store = closed.gateway.store
    texts += [str(store.trace(trace_id)) for trace_id in list(store._traces)]
    texts += [caplog.text, closed.gateway.telemetry.metrics.exposition().decode(), keys.path.read_text()]
    assert len(texts) > 8
    for secret in (keys.alice, wrong):
        assert not [text for text in texts if secret in text or secret[4:30] in text]
    assert not [text for text in texts[:-1] if hash_key(keys.alice)[:12] in text]


# --- the file and its commands --------------------------------------------------------------------------------------


def test_commands_keep_what_they_do_not_know(keys: Keys) -> None:
    assert keys.path.stat().st_mode & 0o777 == 0o600
    text = keys.path.read_text().replace("tenants: {}", "tenants: {alice: {requests_per_minute: 5, max_priority: 2}}")
    keys.path.write_text(text)
    assert [(key.tenant, key.name) for key in keys.store.all()] == [("alice", "laptop"), ("bob", "")]
    commands.revoke(keys.store, hash_key(keys.bob)[:6])
    text = keys.path.read_text()
    assert "requests_per_minute: 5" in text
    assert "bob" not in text
    assert len({keys.alice, keys.bob, commands.create(keys.store, "alice", "")}) == 3


def test_bad_commands(keys: Keys, tmp_path: Path) -> None:
    for tenant in ("", "x" * 65, "a\nb"):
        with pytest.raises(InvalidArgument, match="no key was made"):
            commands.create(keys.store, tenant, "")
    with pytest.raises(InvalidArgument, match="at least 6"):
        commands.revoke(keys.store, "a")
    with pytest.raises(InvalidArgument, match="--file"):
        commands.store("", "")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        commands.FileStore(tmp_path / "none").all()


@pytest.mark.parametrize(
    "content",
    [
        "keys: [",
        "keys: 1",
        "other: {}",
        "keys: [{hash: abc, tenant: a}]",
        "tenants: {a: {requests: 1}}",
        "tenants: {a: {requests_per_minute: -1}}",
        "- 1",
        "!!python/object/apply:os.getcwd []",
    ],
)
async def test_a_bad_file_is_refused_at_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=str(path)):
        await Identity(IdentitySettings(source="file", file=str(path)), Metrics()).start()


@pytest.mark.parametrize("settings", [IdentitySettings(source="file"), IdentitySettings(source="etcd")])
def test_a_source_needs_its_setting(settings: IdentitySettings) -> None:
    with pytest.raises(InvalidArgument, match=r"identity\."):
        Identity(settings, Metrics())


def test_without_keys_the_header_is_believed() -> None:
    identity = Identity(IdentitySettings(), Metrics())
    assert identity.tenant_of({}) == "default"
    assert identity.tenant_of({"x-epd-tenant": "a", "authorization": "Bearer anything"}) == "a"
    for name in ("x" * 65, "a\nb"):
        with pytest.raises(InvalidArgument, match="64 printable"):
            identity.tenant_of({"x-epd-tenant": name})


async def test_equal_names_are_no_refusal(keys: Keys) -> None:
    identity = Identity(keys.settings(), Metrics())
    await identity.start()
    try:
        headers: Any = bearer(keys.alice, "alice")
        assert identity.tenant_of(headers) == "alice"
        assert identity.tenant_of({"authorization": f"bearer   {keys.alice} "}) == "alice"
        with pytest.raises(PermissionDenied):
            identity.tenant_of(bearer(keys.alice, "default"))
    finally:
        await identity.stop()
        assert len(asyncio.all_tasks()) == 1
