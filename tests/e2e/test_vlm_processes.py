"""LLaVA in separate processes: exact tokens, one trace over all stages, whose weights are where, kill -9 under load."""

import asyncio
import io
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image
from safetensors import safe_open

from epd.v1 import trace_pb2, trace_pb2_grpc
from tests.e2e.running import at_stage, struck
from tests.e2e.test_vlm_exact import MAX_TOKENS, Asked
from tests.mesh import Answer
from tests.processes import ProcessMesh, Role, process_mesh

session = pytest.mark.asyncio(loop_scope="session")

# An image's rows, a block of 4 kB, take longer to move than to make; and a dozen pulls at once all show progress.
BYTES_PER_SECOND = 24_000
LARGE = 1800  # pixels a side: such a file takes a while to decode


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessMesh]:
    """Two workers of each role; whole again before each test."""
    async with process_mesh(
        checkpoint("vlm-llava"),
        tmp_path_factory.mktemp("llava"),
        roles=("encode", "encode", "prefill", "prefill", "decode"),
        by_role={"prefill": {"throttle_bytes_per_second": BYTES_PER_SECOND}},
    ) as made:
        yield made


async def answered(mesh: Any, asked: list[Asked]) -> list[Answer]:
    """Every answer, each with `generate`'s tokens."""
    answers = await asyncio.gather(*(each.ask(mesh) for each in asked))
    for each, answer in zip(asked, answers, strict=True):
        assert answer.tokens == each.tokens
    return answers


def large(seed: int) -> bytes:
    """A big file of few colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (LARGE // 100, LARGE // 100, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((LARGE, LARGE), Image.Resampling.NEAREST).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


@session
async def test_exact_tokens_and_one_trace(mesh: ProcessMesh, checkpoint: Callable[..., Path]) -> None:
    path, rng = checkpoint("vlm-llava"), random.Random("processes")
    await mesh.whole()
    answers = await answered(mesh, [Asked(path, kind, rng) for kind in ("one", "three", "adjacent", "same twice")])
    assert all(answer.accounting.attempts == 1 for answer in answers)

    accounting = answers[1].accounting
    assert len(accounting.encode_workers) == 2
    hops = [hop.name for hop in accounting.ttft_hops]
    for name in ("encode.preprocess", "encode.forward", "encode.rpc", "transfer.pull.embeddings", "prefill.forward"):
        assert name in hops
    assert hops.index("encode.forward") < hops.index("transfer.pull.embeddings") < hops.index("prefill.forward")
    total = sum(hop.duration.seconds + hop.duration.nanos / 1e9 for hop in accounting.ttft_hops)
    assert total == pytest.approx(accounting.ttft_seconds, rel=1e-3, abs=1e-4)

    stub = trace_pb2_grpc.TraceServiceStub(mesh.channel)
    spans = (await stub.GetTrace(trace_pb2.GetTraceRequest(trace_id=accounting.trace_id))).spans
    assert {span.trace_id for span in spans} == {accounting.trace_id}
    known = {span.span_id for span in spans}
    roots = [span.name for span in spans if span.parent_span_id not in known]
    assert len(roots) == 1
    names = [span.name for span in spans]
    assert names.count("encode.run") == 2
    assert names.count("encode.images") == names.count("prefill.run") == names.count("decode.run") == 1
    by_id = {span.span_id: span for span in spans}

    def above(name: str) -> set[str]:
        """Names of everything over the spans of this name."""
        found = set()
        for span in spans:
            if span.name == name:
                while span.parent_span_id in by_id:
                    span = by_id[span.parent_span_id]
                    found.add(span.name)
        return found

    assert "encode.images" in above("encode.run")
    assert {"encode.run", "encode.images"} <= above("encode.forward")
    assert "prefill.run" in above("transfer.pull.embeddings")
    assert "decode.run" in above("transfer.pull")
    await mesh.settled()


@session
async def test_whose_weights_are_where(mesh: ProcessMesh, checkpoint: Callable[..., Path]) -> None:
    """Encode holds no language bytes, prefill and decode no vision bytes; together they are the whole model."""
    await mesh.whole()
    sizes = {"vision": 0, "language": 0}
    with safe_open(next(checkpoint("vlm-llava").glob("*.safetensors")), "pt") as file:
        for name in sorted(file.keys()):
            part = "vision" if "vision_tower" in name or "multi_modal_projector" in name else "language"
            sizes[part] += file.get_tensor(name).nbytes
    for worker in mesh.workers.values():
        part = "vision" if worker.name.startswith("encode") else "language"
        weights = dict((await mesh.status(worker)).weight_bytes)
        assert {name: size for name, size in weights.items() if size} == {part: pytest.approx(sizes[part], rel=0.02)}


async def killed(
    mesh: ProcessMesh, asked: list[Asked], role: str, stage: Callable[[Role], Awaitable[bool]]
) -> list[Answer]:
    running = asyncio.create_task(answered(mesh, asked))
    try:
        victim = await at_stage(mesh.of(role), stage, over=running.done)
        await victim.kill()
    finally:
        answers = await running
        await mesh.settled()
    return answers


@session
async def test_case_d11_an_encoder_is_killed_while_it_encodes(
    mesh: ProcessMesh, checkpoint: Callable[..., Path]
) -> None:
    path, rng = checkpoint("vlm-llava"), random.Random("d11")
    await mesh.whole()
    asked = [Asked(path, "three", rng) for _ in range(4)]
    # Large files of their own, so that the encoders are seen at work: the answers to these count only as answers.
    heavy = [Asked(path, "three", rng) for _ in range(4)]
    for number, each in enumerate(heavy):
        each.images = [large(3 * number + image) for image in range(3)]
    extra = asyncio.gather(*(each.ask(mesh) for each in heavy))

    async def encoding(worker: Role) -> bool:
        return (await mesh.status(worker)).load.pending_images > 0

    await killed(mesh, asked, "encode", encoding)
    assert all(len(answer.tokens) == MAX_TOKENS for answer in await extra)
    await mesh.settled()


@session
async def test_an_encoder_is_killed_while_prefill_pulls(mesh: ProcessMesh, checkpoint: Callable[..., Path]) -> None:
    path, rng = checkpoint("vlm-llava"), random.Random("published")

    async def published(worker: Role) -> bool:
        status = await mesh.status(worker)
        return bool(status.load.held_rows and status.open_publications and not status.load.pending_images)

    async def disturb(attempt: int) -> list[Answer]:
        await mesh.whole()
        return await killed(mesh, [Asked(path, "three", rng) for _ in range(6)], "encode", published)

    await struck(disturb)


@session
async def test_prefill_is_killed_while_it_pulls_embeddings(mesh: ProcessMesh, checkpoint: Callable[..., Path]) -> None:
    path, rng = checkpoint("vlm-llava"), random.Random("prefill")

    async def pulling(worker: Role) -> bool:
        return (await mesh.status(worker)).open_pulls > 0

    async def disturb(attempt: int) -> list[Answer]:
        await mesh.whole()
        return await killed(mesh, [Asked(path, "three", rng) for _ in range(6)], "prefill", pulling)

    answers = await struck(disturb)
    encoded = [answer for answer in answers if answer.accounting.attempts >= 2]
    assert any(answer.accounting.cached_images for answer in encoded)  # the retry found them at the encoders
    assert max(len(answer.tokens) for answer in answers) == MAX_TOKENS
