"""Two tenants at 1 : 10 demand while prefill is full, and one long prompt among short ones: who gets what.

Timed workers. Each tenant keeps a number of requests there all the time. Service is prompt tokens plus twice the output
tokens, as the counters have it. Beside virtual token counters the order of arrival.

    python -m bench fairness [--seconds 30] [--light 16] [--heavy 160] [--prompt 64] [--tokens 8] [--long 2048]
"""

import argparse
import asyncio
import itertools
import json
import time
from collections import Counter
from typing import Any

import grpc

from bench.mesh import BenchMesh
from bench.report import percentile, save, show
from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import find_model
from epd.v1 import generation_pb2

ORDERS = ("vtc", "fcfs")
WARM_SECONDS = 15.0  # all that came at once has been served by then, in any order
PROMPT_SECONDS = 0.06  # that prefill takes for a short prompt: prefill is what is short, not these cores


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--light", type=int, default=16)
    parser.add_argument("--heavy", type=int, default=160)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--long", type=int, default=2048)


class Load:
    """What came within the window, by tenant: service in tokens, seconds to the first token."""

    def __init__(self, mesh: BenchMesh, options: argparse.Namespace) -> None:
        self._mesh, self._options = mesh, options
        self._numbers = itertools.count(100)
        self.open = False
        self.service = {"light": 0, "heavy": 0}
        self.ttft: dict[str, list[float]] = {"light": [], "heavy": [], "long": []}

    async def client(self, tenant: str) -> None:
        while True:
            await self.ask(tenant, self._options.prompt, tenant)

    async def ask(self, tenant: str, prompt: int, kind: str) -> None:
        options, number = self._options, next(self._numbers)
        request = generation_pb2.GenerateRequest()
        request.token_ids.ids.extend([100 + number // 10_000, 100 + number % 10_000, *range(100, 98 + prompt)])
        request.sampling.max_tokens, request.sampling.ignore_eos = options.tokens, True
        begin, first = time.perf_counter(), True
        async for message in self._mesh.stub.Generate(request, timeout=120, metadata=(("x-epd-tenant", tenant),)):
            tokens = sum(len(choice.token_ids) for choice in message.choices)
            if tokens and self.open:
                self.service[tenant] += prompt * first + 2 * tokens
                if first:
                    self.ttft[kind].append(time.perf_counter() - begin)
            first = first and not tokens


async def measure(options: argparse.Namespace, order: str) -> dict[str, Any]:
    timed = {
        "engine.executor": "timed",
        "engine.num_blocks": 8192,
        "engine.timed.seconds_per_prefill_token": PROMPT_SECONDS / options.prompt,
        "engine.oldest_share": 0.5 if order == "vtc" else 1.0,
    }
    gateway = {
        "fairness.order": order,
        "routing.dispatch_tokens": 2 * options.prompt,
        "max_in_flight": 2 * (options.light + options.heavy),
        "refuse_by": "never",
        "hold_seconds": 120,
    }
    async with BenchMesh(str(find_model(DEFAULT_MODEL)), ("prefill", "decode"), worker=timed, gateway=gateway) as mesh:
        load = Load(mesh, options)
        clients = {"light": options.light, "heavy": options.heavy}
        tasks = [asyncio.create_task(load.client(name)) for name, count in clients.items() for _ in range(count)]
        await asyncio.sleep(WARM_SECONDS)
        load.open = True
        begin = time.perf_counter()
        await asyncio.sleep(options.seconds)
        seconds = time.perf_counter() - begin
        service = dict(load.service)
        long = asyncio.create_task(load.ask("light", options.long, "long"))
        await asyncio.wait({long}, timeout=60)
        for task in (*tasks, long):
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    errors = Counter(_words(each) for each in ended if not isinstance(each, asyncio.CancelledError))
    return {"order": order, "service": service, "seconds": seconds, "ttft_seconds": load.ttft, "errors": errors}


def _words(error: Any) -> str:
    return error.details() if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__


def run(options: argparse.Namespace) -> None:
    results = [asyncio.run(measure(options, order)) for order in ORDERS]
    rows = []
    for each in results:
        service, ttft = each["service"], each["ttft_seconds"]
        rate = {tenant: tokens / each["seconds"] for tenant, tokens in service.items()}
        rows.append(
            [
                each["order"],
                f"{rate['light']:,.0f}",
                f"{rate['heavy']:,.0f}",
                f"{service['heavy'] / max(1, service['light']):.2f}",
                *(f"{percentile(ttft[tenant], 0.5):.2f}" if ttft[tenant] else "-" for tenant in ttft),
            ]
        )
    show(
        f"{options.light} requests of one tenant beside {options.heavy} of another, all the time",
        ["", "light tokens/s", "heavy tokens/s", "ratio", "TTFT light s", "heavy s", f"one of {options.long} s"],
        rows,
        f"errors: {json.dumps([each['errors'] for each in results])}",
    )
    print(f"saved {save('fairness', {'results': results})}")
