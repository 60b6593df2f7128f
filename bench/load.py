"""200 requests at once on the real model: all answered, with what they waited for.

python -m bench load [--requests 200] [--prompt 16] [--tokens 4] [--dtype auto]
"""

import argparse
import asyncio
import random
import time
from typing import Any

from bench.client import ask_all
from bench.mesh import BenchMesh
from bench.report import percentile, save, show
from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import find_model


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--dtype", default="auto")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    count = options.requests
    worker = {"engine.dtype": options.dtype, "engine.num_blocks": 2048, "engine.max_waiting": 2 * count}
    rng = random.Random(4)
    prompts = [[rng.randrange(100, 40000) for _ in range(options.prompt)] for _ in range(count)]
    model = str(find_model(DEFAULT_MODEL))
    async with BenchMesh(model, ("prefill", "decode"), worker=worker, gateway={"max_in_flight": 2 * count}) as mesh:
        begin = time.perf_counter()
        lines = await ask_all(mesh.stub, prompts, options.tokens, timeout=600)
        wall = time.perf_counter() - begin
        status = [await mesh.status(name) for name in mesh.worker_ports]
    answered = sum(len(line.times) == options.tokens for line in lines)
    return {
        "answered": answered,
        "wall_seconds": wall,
        "ttft_seconds": [line.ttft for line in lines],
        "tpot_seconds": [line.tpot for line in lines],
        "integrity_errors": [error for each in status for error in each.integrity_errors],
        "blocks_left": [each.load.active_blocks + each.load.held_blocks for each in status],
    }


def run(options: argparse.Namespace) -> None:
    result = asyncio.run(measure(options))
    rows = []
    for name in ("ttft_seconds", "tpot_seconds"):
        values = result[name]
        rows.append(
            [
                name.removesuffix("_seconds").upper(),
                *(f"{1e3 * percentile(values, share):,.0f}" for share in (0.5, 0.9, 0.99)),
            ]
        )
    clean = not result["integrity_errors"] and not any(result["blocks_left"])
    show(
        f"{result['answered']} of {options.requests} requests at once answered in {result['wall_seconds']:.1f} s",
        ["ms", "p50", "p90", "p99"],
        rows,
        f"block pools afterwards: {'clean' if clean else 'NOT CLEAN'}",
    )
    print(f"saved {save('load', result)}")
