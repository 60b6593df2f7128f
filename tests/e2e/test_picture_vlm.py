"""The default vision-language model in processes: right answers, exact tokens, one set of weights for two names."""

import asyncio
import io
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image
from safetensors import safe_open

from common.models.catalog import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from common.models.fetch import get_model
from common.models.pictures import Picture, Question, heldout
from common.models.tokenizer import Tokenizer
from epd.v1 import generation_pb2
from tests import oracle
from tests.mesh import Answer, collect
from tests.processes import ProcessMesh, process_mesh

session = pytest.mark.asyncio(loop_scope="session")

PICTURES = 40
# Well below what `python -m bench accuracy` shows on many pictures, so that chance fails nothing.
LEAST = {"background": 0.8, "shape": 0.6, "count": 0.55}
MAX_TOKENS = 8


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessMesh]:
    model, text_model = get_model(DEFAULT_VISION_MODEL), get_model(DEFAULT_MODEL)
    names = {DEFAULT_VISION_MODEL: str(model), DEFAULT_MODEL: str(text_model)}
    async with process_mesh(
        model,
        tmp_path_factory.mktemp("picture"),
        roles=("encode", "prefill", "decode"),
        model=DEFAULT_VISION_MODEL,
        worker={"aliases": [DEFAULT_MODEL]},
        gateway={"models": names, "route_wait_seconds": 60.0},
    ) as made:
        yield made


def asking(image: bytes, question: str) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(model=DEFAULT_VISION_MODEL)
    message = request.chat.messages.add(role="user")
    message.content.add(image=generation_pb2.Image(data=image))
    message.content.add(text=question)
    request.sampling.temperature = 0
    request.sampling.max_tokens = MAX_TOKENS
    return request


async def ask(mesh: ProcessMesh, image: bytes, question: str) -> Answer:
    return await collect(mesh.stub.Generate(asking(image, question), timeout=300))


@session
async def test_it_answers_about_pictures_it_never_saw(mesh: ProcessMesh) -> None:
    right: defaultdict[str, list[bool]] = defaultdict(list)

    async def about(picture: Picture) -> None:
        chosen = {question.kind: question for question in picture.questions() if question.kind in LEAST}
        for question in chosen.values():
            answer = await ask(mesh, picture.png(), question.text)
            right[question.kind].append(answer.choices[0].text.strip() == question.answer)

    pictures = heldout(PICTURES, seed=7)
    for first in range(0, PICTURES, 8):
        await asyncio.gather(*(about(picture) for picture in pictures[first : first + 8]))
    shares = {kind: sum(found) / len(found) for kind, found in right.items()}
    assert {kind: share for kind, share in shares.items() if share < LEAST[kind]} == {}
    await mesh.settled()


@session
async def test_tokens_equal_generate(mesh: ProcessMesh) -> None:
    model = get_model(DEFAULT_VISION_MODEL)
    tokenizer = Tokenizer(str(model))
    compared = 0
    for picture in heldout(6, seed=8):
        question: Question = picture.questions()[-1]
        prompt = tokenizer.render_chat(question.messages())
        image = Image.open(io.BytesIO(picture.png())).convert("RGB")
        try:
            expected = oracle.generate_with_images(model, prompt, [image], MAX_TOKENS)
        except oracle.NearTie:
            continue
        request = asking(picture.png(), question.text)
        request.sampling.ignore_eos = True
        assert (await collect(mesh.stub.Generate(request, timeout=300))).tokens == expected
        compared += 1
    assert compared


@session
async def test_one_set_of_weights_answers_under_both_names(mesh: ProcessMesh) -> None:
    request = generation_pb2.GenerateRequest(model=DEFAULT_MODEL)
    request.chat.messages.add(role="user").content.add(text="What is the capital of France?")
    request.sampling.temperature = 0
    request.sampling.max_tokens = MAX_TOKENS
    assert "Paris" in (await collect(mesh.stub.Generate(request, timeout=300))).choices[0].text

    language = elements(get_model(DEFAULT_MODEL) / "model.safetensors")
    vision = elements(get_model(DEFAULT_VISION_MODEL), but="language")
    for worker in mesh.workers.values():
        weights = {part: size for part, size in (await mesh.status(worker)).weight_bytes.items() if size}
        expected = {"vision": 4 * vision} if worker.name.startswith("encode") else {"language": 4 * language}
        assert weights == {part: pytest.approx(size, rel=0.01) for part, size in expected.items()}


def elements(path: Path, but: str = "-") -> int:
    """Numbers in the safetensors files there, except those whose name contains `but`."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    total = 0
    for each in files:
        if but not in each.name:
            with safe_open(each, "pt") as file:
                total += sum(file.get_tensor(name).numel() for name in sorted(file.keys()))
    return total
