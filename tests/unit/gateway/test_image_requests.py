"""Images through both edges: OpenAI's content parts, URLs, sizes, and what nobody may see of them; cases D3, D7."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from common.media.limits import MediaLimits
from common.media.remote import RemoteSettings
from epd.v1 import generation_pb2
from tests.fakes import MODEL
from tests.unit.gateway.conftest import Mesh, generate, refusal
from tests.unit.gateway.test_images import TALL, WIDE, chat, in_chat, picture
from tests.unit.media.files import data_uri, encoded, noise
from tests.unit.media.test_remote import Site, ok
from tests.vlm_files import qwen_files

PATH = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
CANARY = "zebra-canary-7391"


@pytest.fixture(scope="module")
def vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_files(tmp_path_factory.mktemp("vlm"))


async def started(vlm_dir: Path, **settings: Any) -> Mesh:
    mesh = Mesh(vlm_dir)
    await mesh.start(**settings)
    await mesh.pair()
    await mesh.add("e0", ["encode"])
    return mesh


@pytest.fixture
async def mesh(vlm_dir: Path) -> AsyncIterator[Mesh]:
    found = await started(vlm_dir)
    yield found
    await found.stop()


@pytest.fixture
async def http(mesh: Mesh) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as client:
        yield client


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | fields}


def body(*parts: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], "max_tokens": 3} | fields


async def test_openai_client(mesh: Mesh) -> None:
    client = openai.AsyncOpenAI(base_url=f"http://{mesh.gateway.http_address}/v1", api_key="none", max_retries=0)
    parts: Any = [text("a"), image(data_uri(WIDE), detail="high"), text("b"), image(data_uri(TALL, "webp")), text("c")]
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], max_tokens=3
    )
    await client.close()
    assert answer.choices[0].message.content == "abc"
    assert list(mesh.workers["p0"].calls[-1][1].prompt_token_ids) == in_chat("a", 2, "b", 3, "c")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 5


async def test_case_d3_whitespace_in_base64(mesh: Mesh, http: httpx.AsyncClient) -> None:
    plain = base64.b64encode(WIDE).decode()
    broken = "\n".join(plain[i : i + 76] for i in range(0, len(plain), 76))
    response = await http.post(PATH, json=body(image(f"data:image/png;base64,{broken}\n")))
    assert response.status_code == 200, response.text
    assert list(mesh.workers["p0"].calls[-1][1].prompt_token_ids) == in_chat(2)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image("data:image/png;base64,@@@@"), "not base64"),
        (image("data:image/png;base64," + base64.b64encode(WIDE).decode()[:-2]), "cut off"),
        (image("data:image/png,abc"), ";base64"),
        (image("data:audio/wav;base64,QUJD"), "must be image/"),
        (image(data_uri(b"GIF89a")), "GIF header is damaged or truncated"),
        (image("https://pictures.example/a.png"), "off at this gateway"),
        (image("x"), "off at this gateway"),
        (image(data_uri(WIDE), detail="huge"), "huge"),
        (image(data_uri(WIDE), size=3), "unknown parameter 'size'"),
        ({"type": "image_url"}, "image_url is required"),
        ({"type": "image_url", "image_url": data_uri(WIDE)}, "Expected `object`"),
        ({"type": "input_image", "image_url": data_uri(WIDE)}, "input_image"),
        ({"type": "text"}, "text is required"),
        ({"type": data_uri(WIDE)}, "Invalid value"),
        (image(data_uri(WIDE), detail=data_uri(WIDE)), "Invalid enum value"),
    ],
)
async def test_case_d3_a_bad_part_is_named(mesh: Mesh, http: httpx.AsyncClient, part: Any, words: str) -> None:
    response = await http.post(PATH, json=body(text("look"), image(data_uri(WIDE)), part))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (
        400,
        "invalid_request_error",
        "messages[0].content[2]",
    )
    assert words in error["message"]
    assert "data:image" not in error["message"]
    assert not any(worker.calls for worker in mesh.workers.values())


async def test_models(http: httpx.AsyncClient) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["images"] is True


async def test_case_d7_listed_hosts(vlm_dir: Path) -> None:
    site = Site({"/a.png": ok(WIDE), "/b.png": ok(TALL), "/none": ok(b"<html>")})
    await site.start()
    remote = RemoteSettings(hosts=(f"localhost:{site.port}",), allow_http=True, allow_private=True)
    mesh = await started(vlm_dir, remote=remote)
    try:
        urls = [generation_pb2.Image(url=f"http://localhost:{site.port}/{name}") for name in ("a.png", "b.png", "none")]
        await generate(mesh, chat("x", urls[0], TALL, urls[1]))
        (call,) = [request for _, request in mesh.workers["e0"].calls]
        assert [each.data for each in call.images] == [WIDE, TALL, TALL]
        by_bytes = await mesh.gateway.generator.preprocessor.prepare(chat(WIDE), "default")
        assert call.images[0].media_key == by_bytes.media[0].key  # never the URL
        code, metadata, details = await refusal(mesh, chat(urls[0], urls[2]))
        assert (code, metadata["epd-field"]) == (grpc.StatusCode.INVALID_ARGUMENT, "messages[0].content[1]")
        assert "localhost" not in details
    finally:
        await mesh.stop()
        await site.stop()


async def test_case_d7_a_listed_name_with_a_private_address(vlm_dir: Path) -> None:
    site = Site({"/a.png": ok(WIDE)})
    await site.start()
    mesh = await started(vlm_dir, remote=RemoteSettings(hosts=(f"localhost:{site.port}",), allow_http=True))
    try:
        asked = chat(generation_pb2.Image(url=f"http://localhost:{site.port}/a.png"))
        assert "address" in (await refusal(mesh, asked))[2]
        assert not site.connections
    finally:
        await mesh.stop()
        await site.stop()


@pytest.mark.parametrize(
    ("limits", "images", "numbers"),
    [
        (MediaLimits(max_images=2), [WIDE, WIDE, WIDE], ("3 images", "at most 2")),
        (MediaLimits(max_file_bytes=len(WIDE)), [TALL], (f"{len(TALL)} bytes", f"at most {len(WIDE)}")),
        (MediaLimits(max_request_bytes=2 * len(TALL)), [TALL, TALL, TALL], (str(3 * len(TALL)), str(2 * len(TALL)))),
        (MediaLimits(max_pixels=1000), [WIDE], ("56 × 28", "at most 1000")),
        (MediaLimits(min_side=30), [WIDE], ("56 × 28", "at least 30")),
        (MediaLimits(max_aspect=1.5), [WIDE], ("56 × 28", "1.5 times")),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
async def test_limits_are_settings(
    vlm_dir: Path, limits: MediaLimits, images: list[bytes], numbers: tuple[str, ...]
) -> None:
    assert len(WIDE) < len(TALL)
    mesh = await started(vlm_dir, media=limits)
    try:
        for parts in (images, [generation_pb2.Image(url=data_uri(each)) for each in images]):
            code, _, details = await refusal(mesh, chat(*parts))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert all(number in details for number in numbers), details
    finally:
        await mesh.stop()


async def test_large_images_fit_and_larger_messages_are_refused(vlm_dir: Path) -> None:
    limits = MediaLimits(max_request_bytes=12 * 2**20)
    large = encoded(noise(1900, 1800), compress_level=0)
    assert 9 * 2**20 < len(large) < 12 * 2**20  # more than other services of the mesh take
    mesh = await started(vlm_dir, media=limits)
    try:
        preprocessor = mesh.gateway.generator.preprocessor
        seen: list[int] = []
        prepare = preprocessor.prepare

        async def watched(request: generation_pb2.GenerateRequest, tenant: str) -> Any:
            prepared = await prepare(request, tenant)
            seen.append(len(prepared.media[0].data))
            raise asyncio.CancelledError

        preprocessor.prepare = watched  # type: ignore[method-assign]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(mesh, chat(large))
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert seen == [len(large)]
        code, _, details = await refusal(mesh, chat(large, large, large))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(limits.message_bytes) in details
        async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as client:
            response = await client.post(PATH, content=b" " * (limits.message_bytes + 1), headers=JSON)
            assert response.status_code == 413
            assert str(limits.message_bytes) in response.json()["error"]["message"]
    finally:
        await mesh.stop()


async def test_bytes_in_flight_are_bounded(vlm_dir: Path) -> None:
    image = encoded(noise(56, 56))
    mesh = await started(vlm_dir, max_in_flight_bytes=3 * len(image) // 2)
    try:
        p = mesh.workers["p0"]
        p.prefill_gate.clear()
        running = asyncio.create_task(generate(mesh, chat(image)))
        await p.until(lambda: bool(p.calls))
        code, metadata, _ = await refusal(mesh, chat(image))
        assert (code, metadata["epd-reason"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert int(metadata["retry-after-ms"]) > 0
        p.prefill_gate.set()
        assert (await running).texts == {0: "a"}
        assert (await generate(mesh, chat(image))).texts == {0: "a"}
    finally:
        await mesh.stop()


async def test_nothing_of_an_image_is_in_logs_spans_or_errors(vlm_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither bytes nor URL nor key, in whatever way it is sent and whether it is any good."""
    caplog.set_level(logging.DEBUG)
    site = Site({f"/{CANARY}.png": ok(WIDE)})
    await site.start()
    remote = RemoteSettings(hosts=(f"localhost:{site.port}",), allow_http=True, allow_private=True)
    mesh = await started(vlm_dir, remote=remote)
    try:
        secret = CANARY.encode()
        address = f"http://localhost:{site.port}/{CANARY}.png"
        fine = await generate(mesh, chat("x", WIDE + secret, generation_pb2.Image(url=address)))
        keys = [each.media_key for each in mesh.workers["p0"].calls[-1][1].embeddings]
        told = []
        for bad in (
            secret,
            WIDE[:20] + secret,
            generation_pb2.Image(url=f"https://{CANARY}.example/{CANARY}"),
            generation_pb2.Image(url=f"http://localhost:{site.port}@{CANARY}/"),
            generation_pb2.Image(url=f"data:{CANARY};base64,{CANARY}"),
            generation_pb2.Image(url=f"data:image/png;base64,{CANARY}"),
        ):
            _, metadata, details = await refusal(mesh, chat("x", picture(bad)))
            told.append(f"{metadata} {details}")
        spans = mesh.gateway.store.trace(fine.accounting.trace_id)
        assert any(span.name == "gateway.generate" for span in spans)
        shown = "\n".join(
            [*told, *(f"{record.getMessage()} {record.exc_text}" for record in caplog.records), *map(repr, spans)]
        )
        for hidden in (CANARY, address, *(key.hex() for key in keys), *(repr(key)[2:-1] for key in keys)):
            assert hidden not in shown
        assert base64.b64encode(WIDE).decode()[:16] not in shown
    finally:
        await mesh.stop()
        await site.stop()
