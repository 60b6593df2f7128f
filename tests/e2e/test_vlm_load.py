"""Many image requests on small pools: each is answered, or refused with a hint; nothing locks up, nothing is left."""

import asyncio
import random
from typing import Any

import grpc
import pytest

from common.engine.settings import TimedModel
from tests.e2e.conftest import Meshes
from tests.e2e.test_vlm_exact import image_request, picture
from tests.mesh import Answer, collect

session = pytest.mark.asyncio(loop_scope="session")

REQUESTS = 200
LONG_SECONDS = 300.0  # a bound for broken code; on busy cores it takes a minute and more
TIMED = TimedModel(image_hidden_size=64, base_seconds=0.001, seconds_per_prefill_token=0.00001)


async def one(mesh: Any, rng: random.Random) -> Answer | grpc.aio.AioRpcError:
    """1 to 8 pictures out of 60, at most half of them twice."""
    images = [picture(rng.randrange(60)) for _ in range(rng.randint(1, 8))]
    text = " and ".join(["<image>"] * len(images)) + " what?"
    try:
        return await collect(mesh.stub.Generate(image_request(text, images, max_tokens=4), timeout=LONG_SECONDS))
    except grpc.aio.AioRpcError as error:
        return error


@session
@pytest.mark.parametrize("hold_seconds", [LONG_SECONDS, 0.2], ids=["patient", "impatient"])
async def test_case_d12_more_images_than_room(meshes: Meshes, hold_seconds: float) -> None:
    rng = random.Random("d12")
    # A picture takes 16 rows here, so an encoder holds 10 pictures, a prefill worker 8: one request of the largest.
    async with meshes.make(
        "vlm-llava",
        roles=("encode", "encode", "prefill", "prefill", "decode"),
        executor="timed",
        timed=TIMED,
        num_blocks=32,
        embedding_rows=8 * 16,
        encoder={"rows": 10 * 16},
        gateway={
            "hold_seconds": hold_seconds,
            "refuse_by": "never",
            "max_in_flight": REQUESTS,
            "max_attempts": 100,
            # Two hundred requests and all services share this process: late is not lost here.
            "first_byte_seconds": LONG_SECONDS,
            "encode_hedge_seconds": LONG_SECONDS,
        },
    ) as mesh:
        ended = await asyncio.gather(*(one(mesh, rng) for _ in range(REQUESTS)))
        answers = [each for each in ended if isinstance(each, Answer)]
        refused = [each for each in ended if isinstance(each, grpc.aio.AioRpcError)]
        assert len(answers) + len(refused) == REQUESTS
        assert all(len(answer.tokens) == 4 for answer in answers)
        assert answers
        if hold_seconds > 1:
            assert not refused
        for error in refused:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(error.trailing_metadata() or ())["retry-after-ms"]) > 0
        await mesh.settled()
