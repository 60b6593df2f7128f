"""KServe v2 through real workers: the native service's tokens, typed and raw, whole and streamed, with an image."""

import asyncio
from typing import Any

import pytest

from epd.inference import inference_pb2_grpc
from tests.e2e.conftest import Meshes
from tests.fuzz.world import picture
from tests.kserve import infer, parameters, read
from tests.mesh import MODEL, LocalMesh, collect, request

session = pytest.mark.asyncio(loop_scope="session")
PROMPT = [33, 34, 35, 30, 31]
LOOK = "<|vision_start|><|image_pad|><|vision_end|>what is it?"


def stub(mesh: LocalMesh) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(mesh.channel)


@session
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
async def test_tokens_equal_the_native_services(meshes: Meshes, sampling: dict[str, Any]) -> None:
    mesh = await meshes.get()
    native = await mesh.generate(PROMPT, max_tokens=8, ignore_eos=True, **sampling)
    options = {
        "model": MODEL,
        "max_tokens": 8,
        "ignore_eos": True,
        "outputs": ["output_ids", "text_output"],
        **sampling,
    }
    tokens = {"input_ids": ("INT32", PROMPT)}
    for raw in (False, True):
        answer = await stub(mesh).ModelInfer(infer(None, raw=raw, tensors=tokens, **options), timeout=60)
        assert read(answer) == {"output_ids": native.tokens, "text_output": [native.choices[0].text.encode()]}
        assert parameters(answer)["completion_tokens"] == 8

    streamed: dict[str, list[int]] = {}
    asked = [infer(None, id=name, tensors=tokens, streaming=name != "whole", **options) for name in ("a", "b", "whole")]
    async with asyncio.timeout(60):
        async for each in stub(mesh).ModelStreamInfer(iter(asked)):
            assert not each.error_message
            streamed.setdefault(each.infer_response.id, []).extend(read(each.infer_response)["output_ids"])
    assert streamed == dict.fromkeys(("a", "b", "whole"), native.tokens)
    await mesh.settled()


@session
async def test_an_image_beside_the_text(meshes: Meshes) -> None:
    mesh = await meshes.get("vlm-qwen2_vl", roles=("encode", "prefill", "decode"))
    file = picture()
    asked = request(LOOK, max_tokens=6, ignore_eos=True)
    asked.images.add().data = file
    native = await collect(mesh.stub.Generate(asked, timeout=60))
    sent = infer(
        LOOK,
        raw=True,
        model=MODEL,
        tensors={"image": ("BYTES", [file])},
        temperature=0.0,
        max_tokens=6,
        ignore_eos=True,
        outputs=["output_ids"],
    )
    answer = await stub(mesh).ModelInfer(sent, timeout=60)
    assert read(answer)["output_ids"] == native.tokens
    assert parameters(answer)["image_tokens"] == native.usage.image_tokens > 0
    await mesh.settled()
