"""What the embedding cache saves: time to first token of a picture that is new, known, known with its whole prompt.

A text before the picture, other in each question, keeps the prompt's blocks from being found where only the embeddings
should be. Another tenant, who sends the same, finds neither. The kinds take turns, so that all meet the same machine.

    python -m bench embeddings [--pictures 20]
"""

import argparse
import asyncio
import random
from typing import Any

from bench.mesh import BenchMesh
from bench.report import median, save, show
from common.models.catalog import DEFAULT_VISION_MODEL
from common.models.fetch import find_model
from common.models.pictures import draw
from epd.v1 import generation_pb2

TENANT_KEY = "x-epd-tenant"
TIMEOUT_SECONDS = 120.0
KINDS = ("new", "embeddings known", "prompt known", "another tenant")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pictures", type=int, default=20)


async def ask(mesh: BenchMesh, image: bytes, before: str, tenant: str = "") -> dict[str, float]:
    request = generation_pb2.GenerateRequest()
    message = request.chat.messages.add(role="user")
    message.content.add(text=before)
    message.content.add(image=generation_pb2.Image(data=image))
    message.content.add(text="What colour is the background?")
    request.sampling.max_tokens = 1
    metadata = [(TENANT_KEY, tenant)] if tenant else []
    call = mesh.stub.Generate(request, timeout=TIMEOUT_SECONDS, metadata=metadata)
    last = [each async for each in call][-1]
    hops = {hop.name: hop.duration.seconds + hop.duration.nanos / 1e9 for hop in last.accounting.ttft_hops}
    return {
        "ttft": sum(hops.values()),
        "encode": sum(seconds for name, seconds in hops.items() if name.startswith("encode.")),
        "cached_images": last.accounting.cached_images,
        "cached_tokens": last.usage.cached_tokens,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(5)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    model = str(find_model(DEFAULT_VISION_MODEL))
    async with BenchMesh(model, ("encode", "prefill", "decode")) as mesh:
        await ask(mesh, draw(rng.randrange(1 << 40)).png(), "warm up")
        for number in range(options.pictures):
            image = draw(rng.randrange(1 << 40)).png()
            found["new"].append(await ask(mesh, image, f"{2 * number}. Look at this."))
            found["embeddings known"].append(await ask(mesh, image, f"{2 * number + 1}. Look at this."))
            found["prompt known"].append(await ask(mesh, image, f"{2 * number + 1}. Look at this."))
            found["another tenant"].append(await ask(mesh, image, f"{2 * number + 1}. Look at this.", "another"))
    return {
        kind: {name: median([float(each[name]) for each in asked]) for name in asked[0]}
        for kind, asked in found.items()
    }


def run(options: argparse.Namespace) -> None:
    result = asyncio.run(measure(options))
    rows = [
        [
            kind,
            f"{1e3 * of['ttft']:.0f}",
            f"{of['ttft'] / result['new']['ttft']:.2f}",
            f"{1e3 * of['encode']:.0f}",
            f"{of['cached_images']:.0f}",
            f"{of['cached_tokens']:.0f}",
        ]
        for kind, of in result.items()
    ]
    show(
        "Time to first token of a picture and a question (medians)",
        ["picture", "TTFT ms", "of new", "of it encode ms", "images cached", "tokens cached"],
        rows,
        "aim: known pictures skip encoding; another tenant does not find them",
    )
    print(f"saved {save('embeddings', result)}")
