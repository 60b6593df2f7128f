"""Images in a prompt: their places, their keys, and what is refused before any worker is called; cases D1, D3 to D8,
D10, D14."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from common.cache.keys import block_keys, root_key
from common.errors import EpdError, InvalidArgument, ModelNotFound
from epd.v1 import generation_pb2
from services.gateway.names import Names
from services.gateway.preprocess import Prepared
from tests.fakes import LAYOUT, MODEL
from tests.tokenizer_files import CHAT_TEMPLATE
from tests.unit.gateway.conftest import Mesh, generate, refusal
from tests.unit.media.files import data_uri, encoded, noise, png_of_size, with_orientation
from tests.vlm_files import FACTOR, IMAGE, MARKER, qwen_files

INVALID = grpc.StatusCode.INVALID_ARGUMENT
WIDE = encoded(noise(2 * FACTOR, FACTOR))  # 2 tokens
TALL = encoded(noise(FACTOR, 3 * FACTOR, 1))  # 3 tokens
Part = str | bytes | generation_pb2.Image


@pytest.fixture(scope="module")
def vlm_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_files(tmp_path_factory.mktemp("vlm"))


@pytest.fixture
async def mesh(vlm_dir: Path) -> AsyncIterator[Mesh]:
    found = Mesh(vlm_dir)
    await found.start()
    await found.pair()
    await found.add("e0", ["encode"])
    yield found
    await found.stop()


def picture(part: bytes | generation_pb2.Image) -> generation_pb2.Image:
    return generation_pb2.Image(data=part) if isinstance(part, bytes) else part


def chat(*parts: Part, max_tokens: int = 1) -> generation_pb2.GenerateRequest:
    """One message: strings are text, all else images."""
    request = generation_pb2.GenerateRequest()
    request.sampling.max_tokens = max_tokens
    message = request.chat.messages.add(role="user")
    for part in parts:
        if isinstance(part, str):
            message.content.add(text=part)
        else:
            message.content.add(image=picture(part))
    return request


def prompt(text: str | list[int], *images: bytes, max_tokens: int = 1) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(images=[picture(image) for image in images])
    request.sampling.max_tokens = max_tokens
    if isinstance(text, str):
        request.text = text
    else:
        request.token_ids.ids.extend(text)
    return request


async def prepare(mesh: Mesh, request: generation_pb2.GenerateRequest, tenant: str = "t") -> Prepared:
    return await mesh.gateway.generator.preprocessor.prepare(request, tenant)


def in_chat(*content: str | int) -> list[int]:
    """Token ids of a chat of one message: text as bytes, numbers as so many image tokens."""
    ids = [i for part in content for i in ([IMAGE] * part if isinstance(part, int) else part.encode())]
    return [257, *b"user\n", *ids, 256, *b"\n", 257, *b"assistant\n"]


async def test_images_among_text(mesh: Mesh) -> None:
    p, d, e = (mesh.workers[name] for name in ("p0", "d0", "e0"))
    result = await generate(mesh, chat("a", WIDE, "bc", TALL, "d", max_tokens=3))
    assert result.texts == {0: "abc"}
    request = p.calls[-1][1]
    assert list(request.prompt_token_ids) == in_chat("a", 2, "bc", 3, "d") == list(d.calls[-1][1].prompt_token_ids)
    assert [(r.position, r.length, r.rows, list(r.grid)) for r in request.embeddings] == [
        (7, 2, 2, [1, 1, 2]),
        (11, 3, 3, [1, 3, 1]),
    ]
    (encode,) = [request for _, request in e.calls]
    assert [image.data for image in encode.images] == [WIDE, TALL]
    assert [image.media_key for image in encode.images] == [r.media_key for r in request.embeddings]
    assert (result.usage.prompt_tokens, result.usage.image_tokens) == (len(request.prompt_token_ids), 5)


async def test_every_way_to_ask_gives_the_same_prompt(mesh: Mesh) -> None:
    asked = f"a{MARKER}b{MARKER}"
    expected = [*b"a", IMAGE, IMAGE, *b"b", IMAGE, IMAGE, IMAGE]
    by_text = await prepare(mesh, prompt(asked, WIDE, TALL))
    by_ids = await prepare(mesh, prompt([*b"a", IMAGE, *b"b", IMAGE], WIDE, TALL))
    assert by_text.prompt == by_ids.prompt == expected
    assert by_text.media == by_ids.media
    assert [(item.start, item.length) for item in by_text.media] == [(1, 2), (4, 3)]
    by_data = await prepare(mesh, chat("a", WIDE))
    by_uri = await prepare(mesh, chat("a", generation_pb2.Image(url=data_uri(WIDE))))
    assert (by_data.prompt, by_data.media) == (by_uri.prompt, by_uri.media)


async def test_case_d10_adjacent_images(mesh: Mesh) -> None:
    for request in (chat("x", WIDE, TALL, WIDE), prompt("x" + 3 * MARKER, WIDE, TALL, WIDE)):
        prepared = await prepare(mesh, request)
        first = prepared.prompt.index(IMAGE)
        spans = [(item.start - first, item.length, item.index) for item in prepared.media]
        assert spans == [(0, 2, 0), (2, 3, 1), (5, 2, 2)]
        assert prepared.media[0].key == prepared.media[2].key != prepared.media[1].key


async def test_text_alone_and_no_content_at_all(mesh: Mesh) -> None:
    assert (await prepare(mesh, chat("hello"))).prompt == in_chat("hello")
    assert (await prepare(mesh, chat())).prompt == in_chat()
    assert (await prepare(mesh, prompt("hello"))).media == ()


async def test_a_template_that_takes_strings_only(tmp_path: Path) -> None:
    mesh = Mesh(qwen_files(tmp_path / "strings", CHAT_TEMPLATE))
    await mesh.start()
    try:
        await mesh.pair()
        prepared = await prepare(mesh, chat("a", WIDE, "b", TALL))
        assert prepared.prompt == in_chat("a", 2, "b", 3)
    finally:
        await mesh.stop()


async def test_case_d1_d14_keys_follow_content_options_and_tenant(vlm_dir: Path, tmp_path: Path) -> None:
    other_dir = qwen_files(tmp_path / "other")
    file = other_dir / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"min_pixels": 784', '"min_pixels": 785'))
    found: list[bytes] = []
    blocks: list[bytes] = []
    red, blue = (encoded(Image.new("RGB", (56, 28), colour)) for colour in ("red", "blue"))
    for directory in (vlm_dir, other_dir):
        mesh = Mesh(directory)
        await mesh.start(salt_secret="secret")
        try:
            await mesh.pair()
            for image, tenant in ((red, "a"), (blue, "a"), (red, "b")):
                prepared = await prepare(mesh, chat("what is the colour of this picture?", image), tenant)
                again = await prepare(mesh, chat("what is the colour of this picture?", image), tenant)
                assert prepared.media == again.media
                found.append(prepared.media[0].key)
                blocks.append(next(iter(prepared.block_keys.values()))[-1])
        finally:
            await mesh.stop()
    assert len(set(found)) == 6
    assert len(set(blocks)) == 6
    assert {len(key) for key in found} == {32}


async def test_an_image_enters_the_keys_of_its_blocks_and_those_after(mesh: Mesh) -> None:
    text = "x" * 40
    one, two = [
        await prepare(mesh, prompt(f"{text}{MARKER}{text}", image)) for image in (WIDE, encoded(noise(56, 28, 7)))
    ]
    (keys,), (other,) = one.block_keys.values(), two.block_keys.values()
    assert [a == b for a, b in zip(keys, other, strict=True)] == [True, True, False, False, False]
    item = one.media[0]
    root = root_key(LAYOUT.model, LAYOUT.revision, one.salt)
    assert list(keys) == block_keys(root, one.prompt, LAYOUT.block_size, media=[item.span])


@pytest.mark.parametrize("value", [1, 6])
async def test_case_d4_the_place_is_that_of_the_turned_image(mesh: Mesh, value: int) -> None:
    data = with_orientation(value, image=noise(2 * FACTOR, FACTOR))
    (item,) = (await prepare(mesh, chat(data))).media
    assert item.grid == ((1, 1, 2) if value == 1 else (1, 2, 1))


MISMATCHES = {
    "more markers": (prompt(f"{MARKER} and {MARKER}", WIDE), ("2", "1")),
    "markers alone": (prompt(f"{MARKER}{MARKER}{MARKER}"), ("3", "0")),
    "more images": (prompt(f"one {MARKER}", WIDE, TALL), ("1", "2")),
    "images alone": (prompt("none", WIDE, TALL), ("0", "2")),
    "token ids": (prompt([65, IMAGE], WIDE, TALL), ("1", "2")),
    "expanded token ids": (prompt([65, IMAGE, IMAGE], WIDE), ("2", "1")),
    "marker in a chat's text": (chat(f"what is {MARKER}?", WIDE), ("2", "1")),
    "marker in a chat without images": (chat(f"what is {MARKER}?"), ("1", "0")),
}


@pytest.mark.parametrize("name", MISMATCHES)
async def test_case_d8_as_many_markers_as_images(mesh: Mesh, name: str) -> None:
    request, counts = MISMATCHES[name]
    code, metadata, details = await refusal(mesh, request)
    assert (code, metadata["epd-reason"]) == (INVALID, "INVALID_ARGUMENT")
    assert [word for word in details.replace(",", " ").split() if word.isdigit()] == list(counts)
    assert not any(worker.calls for worker in mesh.workers.values())


def url(value: str) -> generation_pb2.Image:
    return generation_pb2.Image(url=value)


BAD = {
    "D3 base64": (url("data:image/png;base64,%%%"), "not base64"),
    "D3 no base64": (url("data:image/png,xyz"), ";base64"),
    "D3 type": (url("data:text/plain;base64,QUJD"), "must be image/"),
    "D3 no picture": (url(data_uri(b"hello there")), "known: PNG"),
    "D3 cut header": (WIDE[:20], "PNG header is damaged"),
    "D3 empty": (generation_pb2.Image(data=b""), "empty"),
    "D3 nothing": (generation_pb2.Image(), "data or a url"),
    "D6 pixels": (png_of_size(9000, 9000), "at most 67108864"),
    "D6 bomb": (png_of_size(100_000, 100_000), "67108864 pixels"),
    "D6 bytes": (encoded(kind="BMP") + bytes(20 * 2**20), "at most 20971520"),
    "sides": (encoded(Image.new("RGB", (2, 50))), "at least 4"),
    "aspect": (encoded(Image.new("RGB", (4, 900))), "200 times"),
    "D7 off": (url("https://pictures.example/x.png"), "off at this gateway"),
    "D7 metadata": (url("http://169.254.169.254/latest/"), "off at this gateway"),
}


@pytest.mark.parametrize("name", BAD)
async def test_case_d3_d6_d7_a_bad_image_is_named_and_reaches_no_worker(mesh: Mesh, name: str) -> None:
    image, words = BAD[name]
    code, metadata, details = await refusal(mesh, chat("look", WIDE, image))
    assert (code, metadata["epd-field"]) == (INVALID, "messages[0].content[2]")
    assert words in details
    assert details.startswith("messages[0].content[2]: ")
    assert not any(worker.calls for worker in mesh.workers.values())
    assert (await generate(mesh, chat("look", WIDE))).texts == {0: "a"}


async def test_case_d5_every_mode_is_taken(mesh: Mesh) -> None:
    files = [
        encoded(Image.new(mode, (56, 28)), kind) for mode, kind in (("RGBA", "PNG"), ("CMYK", "JPEG"), ("P", "GIF"))
    ]
    assert [item.rows for item in (await prepare(mesh, chat(*files))).media] == [2, 2, 2]


async def test_images_of_a_prompt_are_named_by_their_number(mesh: Mesh) -> None:
    code, metadata, _ = await refusal(mesh, prompt(MARKER * 2, WIDE, b"no picture"))
    assert (code, metadata["epd-field"]) == (INVALID, "images[1]")


async def test_images_beside_a_chat_are_refused(mesh: Mesh) -> None:
    request = chat("look", WIDE)
    request.images.add(data=WIDE)
    code, metadata, _ = await refusal(mesh, request)
    assert (code, metadata["epd-field"]) == (INVALID, "images")


async def test_image_tokens_count_for_the_context(vlm_dir: Path) -> None:
    mesh = Mesh(vlm_dir)
    await mesh.start()
    try:
        await mesh.pair(max_context=32)
        large = encoded(noise(6 * FACTOR, 5 * FACTOR))
        code, metadata, details = await refusal(mesh, prompt(MARKER + "abc", large))
        assert (code, metadata["epd-reason"]) == (INVALID, "CONTEXT_TOO_LONG")
        assert "33 tokens" in details
    finally:
        await mesh.stop()


async def test_a_text_model_takes_no_images(model_dir: Path) -> None:
    mesh = Mesh(model_dir)
    await mesh.start()
    try:
        p, _ = await mesh.pair()
        for request, field in ((chat("look", WIDE), "messages[0].content[1]"), (prompt("look", WIDE), "images[0]")):
            code, metadata, details = await refusal(mesh, request)
            assert (code, metadata["epd-field"]) == (INVALID, field)
            assert f"model {MODEL} takes no images" in details
        assert not p.calls
        with pytest.raises(InvalidArgument):
            await prepare(mesh, chat(WIDE))
    finally:
        await mesh.stop()


async def test_an_encoder_alone_sets_no_limits(vlm_dir: Path) -> None:
    mesh = Mesh(vlm_dir)
    await mesh.start(route_wait_seconds=0.05)
    try:
        await mesh.add("e0", ["encode"])
        with pytest.raises(EpdError, match="no worker"):
            await prepare(mesh, chat("look", WIDE))
    finally:
        await mesh.stop()


async def test_models_say_whether_they_take_images(mesh: Mesh) -> None:
    answer: Any = await mesh.stub.ListModels(generation_pb2.ListModelsRequest())
    (model,) = answer.models
    assert (model.images, model.encode_workers, model.prefill_workers, model.decode_workers) == (True, 1, 1, 1)


@pytest.mark.parametrize(
    ("name", "images", "found"),
    [("", False, "text"), ("", True, "vision"), ("vision", False, "vision"), ("text", True, "text")],
)
def test_without_a_name_the_first_that_fits_is_asked(name: str, images: bool, found: str) -> None:
    names = Names(["text", "vision", "other"], {"vision", "other"}, {})
    assert names.find(name, images=images).model == found
    with pytest.raises(ModelNotFound, match="served: other, text, vision"):
        names.find("unknown", images=images)


async def test_case_d9_more_images_than_a_worker_has_room_for(vlm_dir: Path) -> None:
    mesh = Mesh(vlm_dir)
    await mesh.start()
    prefill, _ = await mesh.pair(prompt_rows=4)
    await mesh.add("e0", ["encode"])
    try:
        code, metadata, details = await refusal(mesh, chat(WIDE, TALL, "?"))
        assert (code, metadata["epd-reason"]) == (INVALID, "NEVER_FITS")
        assert "5 rows" in details
        assert "is 4" in details
        assert not prefill.calls
        await generate(mesh, chat(WIDE, WIDE, "?"))  # exactly as many
    finally:
        await mesh.stop()
