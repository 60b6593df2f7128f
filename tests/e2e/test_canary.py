"""What must never be told: prompt, image, key, answer and secret, looked for wherever a mesh says anything."""

import asyncio
import base64
import contextlib
import json
import random
import signal
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import yaml
from tokenizers import Tokenizer

from common.registry.local_etcd import free_port
from common.rpc.channel import connect
from epd.v1 import generation_pb2, trace_pb2, trace_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from services.gateway.identity.keys import hash_key, make_key
from tests.canary import PROMPT, SECRET, Canary
from tests.mesh import MODEL, PATIENCE_SECONDS, Answer, collect
from tests.otlp import Collector
from tests.processes import ProcessMesh, process_mesh

session = pytest.mark.asyncio(loop_scope="session")

MARKER = "<|vision_start|><|image_pad|><|vision_end|>"


class Spans(Collector):
    """Keeps what arrives as it arrives, with events and messages of statuses."""

    def __init__(self) -> None:
        super().__init__()
        self.raw: list[bytes] = []

    async def Export(self, request: Any, context: Any) -> Any:
        self.raw.append(request.SerializeToString())
        return await super().Export(request, context)


class Told:
    """Everything that the mesh says to others than the client of a good answer."""

    def __init__(self) -> None:
        self.places: dict[str, bytes] = {}

    def add(self, place: str, said: bytes | str) -> None:
        said = said.encode(errors="replace") if isinstance(said, str) else said
        self.places[place] = self.places.get(place, b"") + said + b"\n"

    def check(self, canary: Canary) -> None:
        leaks = {place: found for place, said in self.places.items() if (found := canary.told_in(said))}
        assert not leaks, leaks


def chat(canary: Canary, kind: str, **sampling: Any) -> generation_pb2.GenerateRequest:
    asked = generation_pb2.GenerateRequest(model=MODEL)
    content = asked.chat.messages.add(role="user").content
    content.add().image.data = canary.files[kind]
    content.add(text=PROMPT)
    sampling = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    asked.sampling.CopyFrom(types_pb2.SamplingParams(**sampling))
    return asked


def wrong_grpc(canary: Canary) -> list[generation_pb2.GenerateRequest]:
    """Requests with the canary that are refused, each for another reason."""
    found = [chat(canary, "PNG", temperature=9.0), chat(canary, "PNG", top_p=7.0)]
    made = generation_pb2.GenerateRequest
    found += [
        made(text=PROMPT * 400),
        made(text=f"{MARKER}{PROMPT}"),
        made(text=PROMPT, stop=[PROMPT * 10]),
        made(text=PROMPT, request_id=PROMPT * 10),
        made(text=PROMPT, n=99),
        made(text=PROMPT, images=[generation_pb2.Image(data=canary.files["PNG"][:60] + PROMPT.encode())]),
        made(text=f"{MARKER}{PROMPT}", images=[generation_pb2.Image(data=PROMPT.encode())]),
        made(text=f"{MARKER}{PROMPT}", images=[generation_pb2.Image(url="data:image/png;base64," + PROMPT)]),
        made(text=f"{MARKER}{PROMPT}", images=[generation_pb2.Image(url=f"https://{PROMPT}/")]),
    ]
    damaged = canary.files["PNG"]
    broken = chat(canary, "PNG")
    broken.chat.messages[0].content[0].image.data = damaged[: len(damaged) // 2]  # its header is good
    return [*found, broken]


def wrong_http(canary: Canary) -> list[bytes]:
    """Bodies with the canary where it does not belong."""
    message = {"role": "user", "content": PROMPT}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": canary.uri("PNG")[:200]}}]}
    bodies: list[Any] = [
        {"messages": PROMPT},
        {"messages": [PROMPT]},
        {"messages": [message], "max_tokens": PROMPT},
        {"messages": [message], "temperature": [PROMPT]},
        {"messages": [message], "service_tier": PROMPT},
        {"messages": [message], "response_format": {"type": PROMPT}},
        {"messages": [message | {"content": [{"type": PROMPT}]}]},
        {"messages": [message | {"content": [{"type": "text", "text": PROMPT, "more": PROMPT}]}]},
        {"messages": [image]},
        {"messages": [message], "logit_bias": {PROMPT: 1}},
        {"messages": [message], "max_tokens": 10**9},
    ]
    return [*(json.dumps(body).encode() for body in bodies), json.dumps(bodies[0]).encode()[:-5], PROMPT.encode() * 50]


async def refused_calls(mesh: ProcessMesh, canary: Canary, told: Told) -> None:
    """Makes requests fail in many ways; keeps what their clients are told."""
    for number, asked in enumerate(wrong_grpc(canary)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(mesh.stub.Generate(asked, metadata=mesh.metadata, timeout=PATIENCE_SECONDS))
        error = caught.value
        told.add(f"gRPC error {number}", f"{error.details()} {error.trailing_metadata()} {error.debug_error_string()}")
    for metadata in ((("authorization", f"Bearer {canary.key}x"),), (("authorization", canary.key),), ()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(mesh.stub.Generate(chat(canary, "PNG"), metadata=metadata, timeout=PATIENCE_SECONDS))
        told.add("gRPC without a good key", f"{caught.value.details()} {caught.value.trailing_metadata()}")
    with pytest.raises(grpc.aio.AioRpcError):  # in mid-stream
        await collect(mesh.stub.Generate(chat(canary, "PNG", seed=1), metadata=mesh.metadata, timeout=0.05))
    left = mesh.stub.Generate(chat(canary, "JPEG"), metadata=mesh.metadata, timeout=PATIENCE_SECONDS)
    await left.read()
    left.cancel()
    headers = {"authorization": f"Bearer {canary.key}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=mesh.http, timeout=PATIENCE_SECONDS, headers=headers) as client:
        for number, body in enumerate(wrong_http(canary)):
            response = await client.post("/v1/chat/completions", content=body)
            assert response.status_code in (400, 413), (number, response.text)
            told.add(f"HTTP error {number}", response.content)
        response = await client.get(f"/v1/models/{urllib.parse.quote(MODEL)}", headers={"authorization": canary.key})
        assert response.status_code == 401
        told.add("HTTP without a good key", response.content)


async def good_answers(mesh: ProcessMesh, canary: Canary) -> list[Answer]:
    answers = [
        await collect(mesh.stub.Generate(chat(canary, kind), metadata=mesh.metadata, timeout=PATIENCE_SECONDS))
        for kind in canary.files
    ]
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": PROMPT},
                    {"type": "image_url", "image_url": {"url": canary.uri("TIFF")}},
                ],
            }
        ],
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    headers = {"authorization": f"Bearer {canary.key}"}
    async with httpx.AsyncClient(base_url=mesh.http, timeout=PATIENCE_SECONDS, headers=headers) as client:
        for stream in (False, True):
            response = await client.post("/v1/chat/completions", json=body | {"stream": stream})
            assert response.status_code == 200, response.text
    for answer in answers:
        canary.answered(answer)
    return answers


async def ask_around(mesh: ProcessMesh, answers: list[Answer], told: Told, ports: list[int]) -> None:
    """Span stores, block events, loads, states, metrics, etcd, files, processes."""
    traces = trace_pb2_grpc.TraceServiceStub(mesh.channel)
    for answer in answers:
        asked = trace_pb2.GetTraceRequest(trace_id=answer.accounting.trace_id)
        found = await traces.GetTrace(asked, metadata=mesh.metadata, timeout=PATIENCE_SECONDS)
        told.add("span store", found.SerializeToString())
        told.add("span store", str(found))
    for worker in mesh.workers.values():
        async with connect(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            told.add("state", str(await stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=PATIENCE_SECONDS)))
            watch = stub.Watch(worker_pb2.WatchRequest(), timeout=PATIENCE_SECONDS)
            for _ in range(2):
                message = await watch.read()
                told.add("watch", message.SerializeToString())
                told.add("watch", str(message))
            watch.cancel()
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
        for port in ports:
            response = await client.get(f"http://127.0.0.1:{port}/metrics")
            assert response.status_code == 200
            told.add("metrics", response.content)
    told.add("etcd", await mesh.etcd.ctl("get", "", "--prefix"))


def look_at_processes(mesh: ProcessMesh, told: Told) -> None:
    for role in mesh.roles:
        for process in role.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                told.add("processes", " ".join([process.name(), *process.cmdline()]))
                told.add("environments", json.dumps(process.environ()))


def look_at_files(mesh: ProcessMesh, directory: Path, told: Told) -> None:
    """All but what the operator wrote: settings and keys."""
    for path in directory.rglob("*"):
        if path.is_file() and path.suffix not in (".toml", ".yaml"):
            told.add(f"file {path.relative_to(directory)}", path.read_bytes())
    for role in mesh.roles:
        assert role.log.stat().st_size, f"{role.name} has logged nothing"


@session
async def test_nothing_is_told(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_LOG_LEVEL", "DEBUG")
    model = checkpoint("vlm-qwen2_vl")
    key = make_key()
    canary = Canary(Tokenizer.from_file(str(model / "tokenizer.json")), key)
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"hash": hash_key(key), "tenant": "acme"}]}))
    keys.chmod(0o600)
    ports = [free_port() for _ in range(4)]
    told = Told()
    directory = tmp_path / "mesh"
    async with Spans() as spans:
        otlp = {"otlp_endpoint": spans.address}
        async with process_mesh(
            model,
            directory,
            roles=("encode", "prefill", "decode"),
            by_role={
                role: {"metrics_port": port} for role, port in zip(("encode", "prefill", "decode"), ports, strict=False)
            },
            worker=otlp,
            key=key,
            gateway={
                **otlp,
                "salt_secret": SECRET,
                "identity": {"source": "file", "file": str(keys)},
                "metrics_bind": f"127.0.0.1:{ports[3]}",
            },
        ) as mesh:
            answers = await good_answers(mesh, canary)
            await refused_calls(mesh, canary, told)
            await mesh.settled()
            await ask_around(mesh, answers, told, ports)
            look_at_processes(mesh, told)
            for role in mesh.roles:  # their last words count, too
                role.signal(signal.SIGTERM)
            await asyncio.gather(*(role.ended(60) for role in mesh.roles))
            look_at_files(mesh, directory, told)
        for sent in spans.raw:
            told.add("exported spans", sent)
        assert {"gateway", "encode", "prefill", "decode"} <= {span.service for span in spans.spans}
    told.check(canary)


def test_what_is_told_is_found(checkpoint: Callable[..., Path]) -> None:
    """The search itself: every secret is seen in whatever form it stands."""
    tokenizer = Tokenizer.from_file(str(checkpoint("vlm-qwen2_vl") / "tokenizer.json"))
    canary = Canary(tokenizer, make_key())
    ids = tokenizer.encode(PROMPT, add_special_tokens=False).ids
    rng = random.Random(0)
    for form in (PROMPT, json.dumps(PROMPT), urllib.parse.quote(PROMPT), PROMPT.encode().hex()):
        assert canary.told_in(f"x {form} y".encode()) == ["prompt"]
    for before in range(3):
        assert canary.told_in(base64.b64encode(rng.randbytes(before) + PROMPT.encode())) == ["prompt"]
        assert "PNG file" in canary.told_in(base64.b64encode(rng.randbytes(before) + canary.files["PNG"]))
    assert canary.told_in(str(ids).encode()) == ["prompt's tokens"]
    assert canary.told_in(generation_pb2.TokenIds(ids=ids).SerializeToString()) == ["prompt's tokens"]
    assert "TIFF file" in canary.told_in(repr(canary.files["TIFF"]).encode())
    assert canary.told_in(f"Bearer {canary.key}".encode()) == ["key"]
    assert canary.told_in(b"nothing of it") == []
