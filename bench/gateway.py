"""How many tokens a second one gateway process carries, with `timed` workers behind it.

Streams run at once; every token is detokenized, checked for stops, accounted and sent. One token a message, then
coalesced, in turn with the floor: a relay in bare grpc.aio that only passes messages on. Rates are those of the steady
window, in which all streams run. Aims: 4,000 and 10,000 tokens/s; loop lag p99 at most 5 ms, measured at a load that
the machine carries.

    python -m bench gateway [--streams 128] [--tokens 600] [--interval 16] [--rounds 3]
"""

import argparse
import asyncio
import json
import random
import sys
import urllib.request
from contextlib import AsyncExitStack
from typing import Any

from bench.client import ask_all
from bench.mesh import BenchMesh
from bench.relay import bare_relay
from bench.report import median, save, show
from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import find_model
from common.rpc.channel import connect
from epd.v1 import generation_pb2_grpc

WORKERS = 2
FLOOR = "floor: bare relay"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)


async def client(address: str, streams: int, tokens: int, interval: int) -> dict[str, float]:
    """Tokens per second while all streams run, and tokens a message."""
    rng = random.Random(3)
    prompts = [[rng.randrange(100, 40000) for _ in range(8)] for _ in range(streams)]
    async with connect(address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        lines = await ask_all(stub, prompts, tokens, stream_interval=interval)
    count = sum(len(line.times) for line in lines)
    if count != streams * tokens:
        raise SystemExit(f"{count} tokens came of {streams * tokens}")
    begin, end = max(line.times[0] for line in lines), min(line.times[-1] for line in lines)
    steady = sum(begin < when <= end for line in lines for when in line.times)
    messages = sum(len(set(line.times)) for line in lines)
    return {"rate": steady / (end - begin), "tokens_a_message": count / messages}


async def ask_in_process(address: str, streams: int, tokens: int, interval: int) -> dict[str, float]:
    """The client is a process of its own: it must not share the event loop of what is measured."""
    asked = json.dumps([address, streams, tokens, interval])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench", "gateway", "--client", asked, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    return json.loads(output)


def loop_lag(http: str) -> float:
    """p99 of the gateway's loop lag, from its metrics."""
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=5) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("epd_loop_lag_seconds") and "0.99" in line:
                return float(line.rsplit(" ", 1)[1])
    return float("nan")


def timed_worker(step_seconds: float) -> dict[str, Any]:
    return {
        "engine.executor": "timed",
        "engine.num_blocks": 8192,
        "engine.max_running": 256,
        "engine.timed.base_seconds": step_seconds,
        "engine.timed.seconds_per_prefill_token": 0.0,
        "engine.timed.seconds_per_decode": 0.00001,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = str(find_model(DEFAULT_MODEL))
    roles = ("prefill,decode",) * WORKERS
    gateway = {"max_in_flight": 2 * options.streams}
    # Workers offer somewhat more than the aim: far more would only take the cores from the gateway.
    forms = {"one token a message": (1, 0.010), f"{options.interval} tokens a message": (options.interval, 0.005)}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in (*forms, FLOOR)}
    async with AsyncExitStack() as stack:
        meshes = {
            form: await stack.enter_async_context(BenchMesh(model, roles, worker=timed_worker(step), gateway=gateway))
            for form, (_, step) in forms.items()
        }
        relay = stack.enter_context(bare_relay())
        for _ in range(options.rounds):
            for form, (interval, _) in forms.items():
                found = await ask_in_process(meshes[form].address, options.streams, options.tokens, interval)
                results[form].append(found)
            results[FLOOR].append(await ask_in_process(relay, options.streams, options.tokens, 1))
    # Eight streams of 50 tokens/s: what two cores carry without a queue anywhere.
    async with BenchMesh(model, roles, worker=timed_worker(0.02), gateway=gateway) as mesh:
        await ask_in_process(mesh.address, 8, 3500, 1)  # longer than the minute that lag is kept for
        lag = loop_lag(mesh.http)
        worker_lag = (await mesh.status("prefill-decode-0")).loop_lag_p99_seconds
    return {"results": results, "gateway_lag_p99_seconds": lag, "worker_lag_p99_seconds": worker_lag}


def run(options: argparse.Namespace) -> None:
    if options.client:
        print(json.dumps(asyncio.run(client(*json.loads(options.client)))))
        return
    result = asyncio.run(measure(options))
    rates = {form: median([each["rate"] for each in found]) for form, found in result["results"].items()}
    sizes = {form: median([each["tokens_a_message"] for each in found]) for form, found in result["results"].items()}
    aims = ("4,000", "10,000", "")
    show(
        f"One gateway process, {options.streams} streams, {WORKERS} timed workers (medians)",
        ["form", "tokens/s", "aim", "tokens a message", "of the floor"],
        [
            [form, f"{rates[form]:,.0f}", aim, f"{sizes[form]:.1f}", f"{rates[form] / rates[FLOOR]:.2f}×"]
            for form, aim in zip(rates, aims, strict=True)
        ],
        f"loop lag p99 at 8 streams of 50 tokens/s: gateway {1e3 * result['gateway_lag_p99_seconds']:.1f} ms, "
        f"worker {1e3 * result['worker_lag_p99_seconds']:.1f} ms (aim: at most 5)",
    )
    print(f"saved {save('gateway', result)}")
