"""What the mesh adds to its engine: TTFT and time per token from the client, against the engine in process.

One engine driven directly, one aggregated worker and one disaggregated pair behind a gateway; the same model, threads
and prompts, asked in turn. With `--executor timed` the engine's own time is always the same, so that milliseconds show
that the noise of a real model hides. Also memory (gateway at most 350 MB, a worker at most weights + pool + 600 MB)
and loop lag.

    python -m bench overhead [--executor modules] [--prompt 128] [--tokens 32] [--rounds 10] [--dtype auto]
"""

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import msgspec

from bench.client import Timeline, ask
from bench.mesh import BenchMesh
from bench.report import median, save, show
from common.engine.messages import Done, Submit, Tokens
from common.engine.process import EngineProcess
from common.engine.settings import EngineSettings, TimedModel
from common.models.catalog import DEFAULT_MODEL
from common.models.fetch import find_model
from common.sampling import SamplingParams

NUM_BLOCKS = 512


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--executor", choices=("modules", "timed"), default="modules")


async def in_process(engine: EngineProcess, prompt: list[int], tokens: int, number: int) -> Timeline:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    line = Timeline(time.perf_counter())
    async for event in engine.open(Submit(seq=f"bench-{number}", prompt=prompt, sampling=sampling)):
        if isinstance(event, Tokens):
            line.times += [time.perf_counter()] * sum(len(each.token_ids) for _, each in event.items)
        elif isinstance(event, Done):
            break
    return line


def weight_bytes(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = find_model(DEFAULT_MODEL)
    weights = weight_bytes(model)
    timed = TimedModel(base_seconds=0.02, seconds_per_prefill_token=0.0005)
    settings = EngineSettings(
        model_dir=str(model), executor=options.executor, dtype=options.dtype, num_blocks=NUM_BLOCKS, timed=timed
    )
    worker = {"engine.executor": options.executor, "engine.dtype": options.dtype, "engine.num_blocks": NUM_BLOCKS}
    worker |= {f"engine.timed.{name}": value for name, value in msgspec.structs.asdict(timed).items()}
    engine = await EngineProcess.launch(settings)
    aggregated = BenchMesh(str(model), ("prefill,decode",), worker=worker)
    pair = BenchMesh(str(model), ("prefill", "decode"), worker=worker)
    lines: dict[str, list[Timeline]] = {"engine in process": [], "aggregated": [], "disaggregated": []}
    rng = random.Random(2)
    try:
        async with aggregated, pair:
            for number in range(options.rounds + 1):
                prompts = [[rng.randrange(100, 40000) for _ in range(options.prompt)] for _ in lines]
                asked = [
                    await in_process(engine, prompts[0], options.tokens, number),
                    await ask(aggregated.stub, prompts[1], options.tokens),
                    await ask(pair.stub, prompts[2], options.tokens),
                ]
                if number:  # the first round warms up
                    for form, line in zip(lines, asked, strict=True):
                        lines[form].append(line)
            status = await pair.status("decode-1")
            memory = {
                "gateway": pair.memory("gateway"),
                "prefill worker": pair.memory("prefill-0"),
                "decode worker": pair.memory("decode-1"),
            }
            lag = status.loop_lag_p99_seconds
    finally:
        pool = engine.layout.block_bytes * NUM_BLOCKS
        itemsize = engine.layout.itemsize
        await engine.close()
    return {
        "ttft_seconds": {form: [line.ttft for line in each] for form, each in lines.items()},
        "tpot_seconds": {form: [line.tpot for line in each] for form, each in lines.items()},
        "memory_bytes": memory,
        "worker_limit_bytes": weights * itemsize // 2 + pool + 600_000_000,  # the files are in bfloat16
        "decode_loop_lag_p99_seconds": lag,
    }


def run(options: argparse.Namespace) -> None:
    result = asyncio.run(measure(options))
    rows = []
    ttft = {form: median(values) for form, values in result["ttft_seconds"].items()}
    tpot = {form: median(values) for form, values in result["tpot_seconds"].items()}
    base = next(iter(ttft))
    for form in ttft:
        rows.append(
            [
                form,
                f"{1e3 * ttft[form]:.1f}",
                f"{1e3 * (ttft[form] - ttft[base]):+.1f}",
                f"{1e3 * tpot[form]:.2f}",
                f"{1e3 * (tpot[form] - tpot[base]):+.2f}",
                f"{tpot[form] / tpot[base]:.3f}",
            ]
        )
    show(
        "What the mesh adds (medians)",
        ["form", "TTFT ms", "added", "TPOT ms", "added", "ratio"],
        rows,
        "aim on an idle machine: at most +5 ms and +0.5 ms",
    )
    limits = {"gateway": 350_000_000}
    if options.executor == "timed":
        print(f"saved {save('overhead-timed', result)}")
        return
    show(
        "Memory (PSS, MB)",
        ["process", "used", "limit"],
        [
            [name, f"{used / 1e6:.0f}", f"{limits.get(name, result['worker_limit_bytes']) / 1e6:.0f}"]
            for name, used in result["memory_bytes"].items()
        ],
        f"loop lag p99 of the decode worker: {1e3 * result['decode_loop_lag_p99_seconds']:.2f} ms (aim: at most 5)",
    )
    print(f"saved {save('overhead', result)}")
