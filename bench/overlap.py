"""How much of a KV transfer shows: time from the end of prefill until decode can start, over prompt length.

Two meshes of one prefill and one decode worker, asked in turn: one pulls while prefill computes, one only afterwards.
On a channel throttled to 100 MB/s the slope of the first should be at most a tenth of the second's; on `shm`
unthrottled the absolute figure counts.

    python -m bench overlap [--lengths 256,512,1024,2048] [--rounds 3] [--dtype bfloat16]
"""

import argparse
import asyncio
import random
from typing import Any

import numpy as np

from bench.mesh import BenchMesh
from bench.report import line_plot, median, save, show
from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import find_model
from epd.v1 import generation_pb2

THROTTLE = 100e6  # bytes per second


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", default="256,512,1024,2048")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")


async def exposed(mesh: BenchMesh, length: int, rng: random.Random) -> float:
    """Seconds of the transfer.pull hop of one request with a prompt that no cache knows."""
    request = generation_pb2.GenerateRequest()
    request.token_ids.ids.extend(rng.randrange(100, 40000) for _ in range(length))
    request.sampling.max_tokens, request.sampling.temperature, request.sampling.ignore_eos = 4, 0.0, True
    async for message in mesh.stub.Generate(request, timeout=120):
        if message.HasField("accounting"):
            return sum(
                hop.duration.ToNanoseconds() / 1e9
                for hop in message.accounting.total_hops
                if hop.name == "transfer.pull"
            )
    raise RuntimeError("the answer has no accounting")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = str(find_model(DEFAULT_MODEL))
    lengths = [int(length) for length in options.lengths.split(",")]
    shared = {"engine.dtype": options.dtype, "engine.num_blocks": 1024}
    forms = {
        "throttled, overlapped": {"throttle_bytes_per_second": THROTTLE},
        "throttled, serial": {"throttle_bytes_per_second": THROTTLE, "pull_overlap": False},
        "shm, overlapped": {},
        "shm, serial": {"pull_overlap": False},
    }
    seconds: dict[str, dict[int, list[float]]] = {form: {length: [] for length in lengths} for form in forms}
    rng = random.Random(1)
    names = list(forms)
    for pair in (names[:2], names[2:]):
        meshes = {form: BenchMesh(model, ("prefill", "decode"), worker=shared | forms[form]) for form in pair}
        async with meshes[pair[0]], meshes[pair[1]]:
            for form in pair:
                await exposed(meshes[form], 64, rng)
            for _ in range(options.rounds):
                for length in lengths:
                    for form in pair:
                        seconds[form][length].append(await exposed(meshes[form], length, rng))
    medians = {form: [median(seconds[form][length]) for length in lengths] for form in forms}
    slopes = {form: float(np.polyfit(lengths, medians[form], 1)[0]) for form in forms}
    return {"lengths": lengths, "medians": medians, "slopes": slopes, "seconds": seconds}


def run(options: argparse.Namespace) -> None:
    result = asyncio.run(measure(options))
    lengths, medians, slopes = result["lengths"], result["medians"], result["slopes"]
    rows = [[form, *(f"{1e3 * value:.1f}" for value in medians[form]), f"{1e6 * slopes[form]:.2f}"] for form in medians]
    ratio = slopes["throttled, overlapped"] / slopes["throttled, serial"]
    show(
        "Exposed transfer time (ms, medians)",
        ["form", *(f"{length} tokens" for length in lengths), "slope µs/token"],
        rows,
        f"throttled to {THROTTLE / 1e6:.0f} MB/s: slope of overlapped / serial = {ratio:.1%} (aim: at most 10 %)",
    )
    lines = {form: (lengths, [1e3 * value for value in medians[form]]) for form in medians}
    plot = line_plot("overlap", "Exposed transfer time", "prompt tokens", "ms from end of prefill to commit", lines)
    print(f"saved {save('overlap', {**result, 'slope_ratio': ratio})} and {plot}")
