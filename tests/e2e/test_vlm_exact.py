"""With images, the mesh's greedy tokens equal `generate`'s, whatever the model, form, chunks, caches, encoders."""

import asyncio
import io
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.models.vision.spec import VisionSpec
from epd.v1 import generation_pb2
from tests import oracle
from tests.checkpoints import VLM_ARCHITECTURES
from tests.covering import pairwise
from tests.e2e.conftest import Meshes
from tests.mesh import Answer, LocalMesh, collect, request

session = pytest.mark.asyncio(loop_scope="session")

ARCHITECTURES = [f"vlm-{name}" for name in VLM_ARCHITECTURES]
MAX_TOKENS = 10
OTHERS = 8
SIZES = ((70, 90), (56, 120), (112, 56))
FORMS: dict[str, dict[str, Any]] = {
    "one worker": {"separate": False},
    "shm": {"separate": True},
    "grpc": {"separate": True, "channels": ("grpc",)},
}
FACTORS: dict[str, list[Any]] = {
    "architecture": ARCHITECTURES,
    "images": ["one", "three", "adjacent", "same twice"],
    "cache": ["cold", "text", "embeddings", "both"],
    "budget": [7, 512],
    "form": list(FORMS),
    "encoders": [1, 2],
    "company": ["alone", "among others"],
}
CASES = pairwise(FACTORS, lambda case: case["form"] != "one worker" or case["encoders"] == 1)


@cache
def picture(seed: int) -> bytes:
    """A PNG of noise; its size depends on the seed."""
    width, height = SIZES[seed % len(SIZES)]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("red", "look", "what", "is", "here", "two", "of", "them")) for _ in range(count))


def prompt_text(kind: str, marker: str, rng: random.Random) -> str:
    """Text with one marker an image."""
    image = marker if marker != "<|image_pad|>" else f"<|vision_start|>{marker}<|vision_end|>"
    before, between, after = words(rng, 24), words(rng, 6), words(rng, 6)
    match kind:
        case "one":
            return f"{before} {image} {after}"
        case "three":
            return f"{before} {image} {between} {image}\n{after} {image} {after}"
        case "adjacent":
            return f"{before} {image}{image} {after}"
        case _:
            return f"{before} {image} {between} {image} {after}"


class Asked:
    """One request with its right answer."""

    def __init__(self, checkpoint: Path, kind: str, rng: random.Random) -> None:
        spec = VisionSpec.read(checkpoint)
        assert spec is not None
        count = {"one": 1, "three": 3}.get(kind, 2)
        for _ in range(30):
            first = rng.randrange(10_000)
            self.images = [picture(first + (0 if kind == "same twice" else number)) for number in range(count)]
            self.text = prompt_text(kind, spec.marker, rng)
            try:
                self.tokens = reference(checkpoint, self.text, self.images)
                return
            except oracle.NearTie:
                continue
        raise AssertionError("no prompt without near ties")

    @property
    def beginning(self) -> str:
        """The words before the first picture."""
        return self.text[: self.text.index("<")]

    async def ask(self, mesh: LocalMesh, **options: Any) -> Answer:
        return await collect(mesh.stub.Generate(image_request(self.text, self.images, **options), timeout=60))


def reference(checkpoint: Path, text: str, images: Sequence[bytes]) -> list[int]:
    opened = [Image.open(io.BytesIO(data)).convert("RGB") for data in images]
    return oracle.generate_with_images(checkpoint, text, opened, MAX_TOKENS)


def image_request(text: str, images: Sequence[bytes], **options: Any) -> generation_pb2.GenerateRequest:
    options = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | options
    made: generation_pb2.GenerateRequest = request(text, **options)
    made.add_special_tokens = False
    for data in images:
        made.images.add(data=data)
    return made


async def mesh_for(meshes: Meshes, architecture: str, form: str, encoders: int, budget: int) -> LocalMesh:
    options = dict(FORMS[form])
    separate = options.pop("separate")
    roles = (*["encode"] * encoders, "prefill", "decode") if separate else ("encode,prefill,decode",)
    return await meshes.get(architecture, roles=roles, token_budget=budget, **options)


@session
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(level) for level in case.values()))
async def test_tokens_equal_generate(case: dict[str, Any], meshes: Meshes, checkpoint: Any) -> None:
    path = checkpoint(case["architecture"])
    mesh = await mesh_for(meshes, case["architecture"], case["form"], case["encoders"], case["budget"])
    rng = random.Random(str(case))
    asked = Asked(path, case["images"], rng)
    if case["cache"] == "both":
        await asked.ask(mesh, max_tokens=2)
    elif case["cache"] == "text":  # what comes before the first picture, and another picture
        other = Asked(path, "one", rng)
        other.text = asked.beginning + other.text
        await other.ask(mesh, max_tokens=2)
    elif case["cache"] == "embeddings":  # the same pictures after other words
        again = Asked(path, case["images"], rng)
        again.images = asked.images
        await again.ask(mesh, max_tokens=2)
    others = [Asked(path, "one", rng) for _ in range(OTHERS)] if case["company"] == "among others" else []

    answers = await asyncio.gather(*(each.ask(mesh) for each in [asked, *others]))

    for each, answer in zip([asked, *others], answers, strict=True):
        assert answer.tokens == each.tokens
        assert answer.accounting.attempts == 1
    if case["cache"] in ("embeddings", "both"):
        assert answers[0].accounting.cached_images == len(asked.images)
    if case["cache"] in ("text", "both"):
        assert answers[0].usage.cached_tokens > 0
    await mesh.settled()


@session
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_case_d1_swapped_pictures_are_another_prompt(meshes: Meshes, checkpoint: Any, architecture: str) -> None:
    path = checkpoint(architecture)
    mesh = await mesh_for(meshes, architecture, "shm", 1, 512)
    rng = random.Random(architecture)
    spec = VisionSpec.read(path)
    assert spec is not None
    for _ in range(30):
        text = prompt_text("two", spec.marker, rng)
        images = [picture(3 * rng.randrange(1000)) for _ in range(2)]  # of one size, so that the tokens are the same
        try:
            expected = [reference(path, text, images), reference(path, text, images[::-1])]
        except oracle.NearTie:
            continue
        if expected[0] != expected[1]:
            break
    else:
        raise AssertionError("no two pictures that make a difference")
    first = await collect(mesh.stub.Generate(image_request(text, images), timeout=60))
    swapped = await collect(mesh.stub.Generate(image_request(text, images[::-1]), timeout=60))
    assert [first.tokens, swapped.tokens] == expected
    assert swapped.accounting.cached_images == 2
    assert swapped.usage.cached_tokens <= len(text.split(spec.marker)[0])  # nothing from the first picture on


@session
async def test_case_d2_the_same_again_is_cached_twice(meshes: Meshes, checkpoint: Any) -> None:
    """The second request hits the embedding cache and the prefix cache; another tenant hits neither."""
    path = checkpoint("vlm-llava")
    mesh = await mesh_for(meshes, "vlm-llava", "shm", 2, 512)
    asked = Asked(path, "three", random.Random("d2"))

    async def ask(tenant: str) -> Answer:
        made = image_request(asked.text, asked.images)
        return await collect(mesh.stub.Generate(made, timeout=60, metadata=(("x-epd-tenant", tenant),)))

    cold, warm, other = await ask("one"), await ask("one"), await ask("two")
    assert cold.tokens == warm.tokens == other.tokens == asked.tokens
    assert [answer.accounting.cached_images for answer in (cold, warm, other)] == [0, 3, 0]
    assert warm.usage.cached_tokens > 0
    assert cold.usage.cached_tokens == other.usage.cached_tokens == 0
    assert warm.usage.image_tokens == cold.usage.image_tokens > 0


def test_the_array_covers_every_pair() -> None:
    assert len(CASES) <= 60
    for a in FACTORS:
        for b in FACTORS:
            if a < b:
                pairs = {(case[a], case[b]) for case in CASES}
                impossible = {a, b} == {"form", "encoders"}  # one worker is one encoder
                assert len(pairs) == len(FACTORS[a]) * len(FACTORS[b]) - impossible
