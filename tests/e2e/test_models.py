"""Two models in one mesh: each request's tokens are those of its own model, whatever runs beside it."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker import Worker
from tests import oracle
from tests.e2e.conftest import Meshes
from tests.mesh import MODEL, PATIENCE_SECONDS
from tests.mesh import LocalMesh as Mesh

session = pytest.mark.asyncio(loop_scope="session")

MAX_TOKENS = 12
OTHER = "other"


def clear_prompt(rng: random.Random, checkpoints: list[Path], length: int) -> tuple[list[int], list[list[int]]]:
    """A prompt without near ties on any checkpoint, and each one's tokens."""
    for _ in range(100):
        prompt = [rng.randrange(10, 500) for _ in range(length)]
        try:
            return prompt, [oracle.generate(each, prompt, MAX_TOKENS) for each in checkpoints]
        except oracle.NearTie:
            continue
    raise AssertionError("no prompt without near ties")


async def join(mesh: Mesh, like: Worker, worker_id: str, **changes: Any) -> Worker:
    """One more worker, as another but for its id and settings; in the mesh when this returns."""
    settings = msgspec.structs.replace(like.settings, worker_id=worker_id, **changes)
    worker = Worker(settings)
    await worker.start()
    mesh.workers.append(worker)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (found := mesh.gateway.fleet.get(worker_id)) is None or not found.routable:
            await mesh.gateway.fleet.changed()
    return worker


@session
async def test_two_models_share_a_mesh_and_nothing_else(meshes: Meshes, checkpoint: Callable[..., Path]) -> None:
    paths = [checkpoint("llama"), checkpoint("qwen2")]
    models = dict(zip((MODEL, OTHER), map(str, paths), strict=True))
    async with meshes.make(gateway={"models": models, "aliases": {"gpt": OTHER}}) as mesh:
        for like in list(mesh.workers):
            engine = msgspec.structs.replace(like.settings.engine, model_dir=models[OTHER], served_name=OTHER)
            await join(mesh, like, f"other-{like.settings.worker_id}", engine=engine)
        rng = random.Random("two models")
        for length in (9, 50):
            prompt, expected = clear_prompt(rng, paths, length)
            for _ in range(2):  # the second time from the caches
                names = (MODEL, OTHER, "gpt")
                answers = await asyncio.gather(
                    *(mesh.generate(prompt, model=name, max_tokens=MAX_TOKENS, ignore_eos=True) for name in names)
                )
                assert [answer.tokens for answer in answers] == [expected[0], expected[1], expected[1]]
                workers = [(answer.accounting.prefill_worker, answer.accounting.decode_worker) for answer in answers]
                assert workers == [
                    ("prefill-0", "decode-1"),
                    ("other-prefill-0", "other-decode-1"),
                    ("other-prefill-0", "other-decode-1"),
                ]
        await mesh.settled()
