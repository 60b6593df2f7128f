"""How many tokens a second one gateway process carries, with `timed` workers behind it.

Streams run at once; every token is detokenized, checked for stops, accounted and sent. First with one token a message,
then coalesced. Aims: 4,000 and 10,000 tokens/s, loop lag p99 at most 5 ms.

    python -m bench gateway [--streams 128] [--tokens 200] [--interval 16] [--rounds 3]
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from typing import Any

from bench.client import ask_all
from bench.mesh import BenchMesh
from bench.report import median, save, show
from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import find_model
from common.rpc.channel import connect
from epd.v1 import generation_pb2_grpc

WORKERS = 2


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)


async def client(address: str, streams: int, tokens: int, interval: int) -> float:
    """Tokens per second received, first to last."""
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 40000) for _ in range(8)] for _ in range(streams)]
    async with connect(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        begin = time.perf_counter()
        lines = await ask_all(stub, prompts, tokens, stream_interval=interval)
        count = sum(len(line.times) for line in lines)
        if count != streams * tokens:
            raise SystemExit(f"{count} tokens came of {streams * tokens}")
        return count / (max(line.times[-1] for line in lines) - begin)


def loop_lag(http: str) -> float:
    """p99 of the gateway's loop lag, from its metrics."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=5) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("epd_loop_lag_seconds") and "0.99" in line:
                return float(line.rsplit(" ", 1)[1])
    return float("nan")


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    timed = {"base_seconds": 0.004, "seconds_per_prefill_token": 0.0, "seconds_per_decode": 0.00001}
    worker = {
        "engine.executor": "timed",
        "engine.num_blocks": 8192,
        "engine.max_running": 256,
        "engine_in_thread": True,
        **{f"engine.timed.{name}": value for name, value in timed.items()},
    }
    model = str(find_model(DEFAULT_MODEL))
    rates: dict[str, list[float]] = {"one token a message": [], f"{options.interval} tokens a message": []}
    async with BenchMesh(
        model, ("prefill,decode",) * WORKERS, worker=worker, gateway={"max_in_flight": 2 * options.streams}
    ) as mesh:
        for number in range(options.rounds):
            for form, interval in zip(rates, (1, options.interval), strict=True):
                # The client is a process of its own: it must not slow the gateway's event loop, nor share one.
                asked = json.dumps([mesh.address, options.streams, options.tokens, interval])
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "bench", "gateway", "--client", asked, stdout=asyncio.subprocess.PIPE
                )
                output, _ = await process.communicate()
                rates[form].append(float(output))
                if number == 0 and interval == 1:
                    lag = loop_lag(mesh.http)
        worker_lag = (await mesh.status("prefill-decode-0")).loop_lag_p99_seconds
    return {"tokens_per_second": rates, "gateway_lag_p99_seconds": lag, "worker_lag_p99_seconds": worker_lag}


def run(options: argparse.Namespace) -> None:
    if options.client:
        print(asyncio.run(client(*json.loads(options.client))))
        return
    result = asyncio.run(measure(options))
    aims = (4000, 10000)
    show(
        f"One gateway process, {options.streams} streams, {WORKERS} timed workers (medians)",
        ["form", "tokens/s", "aim"],
        [
            [form, f"{median(values):,.0f}", f"{aim:,}"]
            for (form, values), aim in zip(result["tokens_per_second"].items(), aims, strict=True)
        ],
        f"loop lag p99: gateway {1e3 * result['gateway_lag_p99_seconds']:.1f} ms, "
        f"worker {1e3 * result['worker_lag_p99_seconds']:.1f} ms (aim: at most 5)",
    )
    print(f"saved {save('gateway', result)}")
