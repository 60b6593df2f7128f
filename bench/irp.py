"""Images of one request on several encode workers: how much sooner the last is ready (EPDServe's IRP).

Timed encoders, so that the figure shows the mesh and not two cores that all encoders share: n equal images on k of them
should take ⌈n/k⌉ times one image instead of n times. With `--executor modules` the real encoders, as they are.

    python -m bench irp [--executor timed] [--encoders 1,2,4] [--images 1,2,4,8] [--rounds 5]
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

IMAGE_SECONDS = 0.5  # of one image on a timed encoder
TIMEOUT_SECONDS = 120.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--executor", choices=("timed", "modules"), default="timed")
    parser.add_argument("--encoders", default="1,2,4")
    parser.add_argument("--images", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=5)


async def encode_seconds(mesh: BenchMesh, count: int, rng: random.Random) -> float:
    """From the first encode call to the last embedding, of pictures that nobody has seen."""
    request = generation_pb2.GenerateRequest()
    message = request.chat.messages.add(role="user")
    for _ in range(count):
        message.content.add(image=generation_pb2.Image(data=draw(rng.randrange(1 << 40)).png()))
    message.content.add(text="What is in the pictures?")
    request.sampling.max_tokens = 1
    response = [each async for each in mesh.stub.Generate(request, timeout=TIMEOUT_SECONDS)][-1]
    hops = response.accounting.ttft_hops
    return sum(hop.duration.seconds + hop.duration.nanos / 1e9 for hop in hops if hop.name.startswith("encode."))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = str(find_model(DEFAULT_VISION_MODEL))
    counts = [int(count) for count in options.images.split(",")]
    worker: dict[str, Any] = {"engine.executor": options.executor, "encoder.batch_images": 1}
    if options.executor == "timed":
        worker |= {
            "engine.timed.image_hidden_size": 64,
            "encoder.timed.base_seconds": IMAGE_SECONDS,
            "encoder.timed.seconds_per_row": 0.0,
        }
    rng = random.Random(3)
    seconds: dict[int, dict[int, float]] = {}
    for encoders in (int(count) for count in options.encoders.split(",")):
        async with BenchMesh(model, (*["encode"] * encoders, "prefill,decode"), worker=worker) as mesh:
            await encode_seconds(mesh, encoders, rng)  # warms up
            seconds[encoders] = {
                count: median([await encode_seconds(mesh, count, rng) for _ in range(options.rounds)])
                for count in counts
            }
    return {"encode_seconds": seconds, "executor": options.executor}


def run(options: argparse.Namespace) -> None:
    result = asyncio.run(measure(options))
    seconds = result["encode_seconds"]
    alone = seconds[min(seconds)]
    rows = []
    for encoders, times in seconds.items():
        for count, taken in times.items():
            bound = count / -(-count // encoders)
            speedup = alone[count] / taken
            figures = [f"{1e3 * taken:.0f}", f"{speedup:.2f}", f"{bound:.2f}", f"{speedup / bound:.2f}"]
            rows.append([str(encoders), str(count), *figures])
    show(
        f"Encoding one request's images ({result['executor']} encoders, medians)",
        ["encoders", "images", "ms", "speed-up", "n/⌈n/k⌉", "of it"],
        rows,
        "speed-up: against the fewest encoders; aim: within 10 % of n/⌈n/k⌉",
    )
    print(f"saved {save('irp-' + result['executor'], result)}")
