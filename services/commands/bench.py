"""`epd bench`: a load for a running mesh, or any OpenAI server, and what it was answered with."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from common.errors import InvalidArgument
from services.bench import chart, load, workload
from services.bench.arrivals import Arrivals
from services.bench.grpc_target import GrpcTarget
from services.bench.http_target import HttpTarget
from services.bench.outcome import UNFINISHED, Outcome
from services.bench.summary import Summary, Targets, best_rate, summarize
from services.bench.target import Target
from services.bench.trace_files import TraceEntry, read_trace
from services.bench.workload import Ask, Shape
from services.commands.bench_tables import failures, headlines, run_table, sweep_table
from services.commands.client import dial, gateway_address
from services.commands.render import make_console
from services.commands.trust import SYSTEM, Trust

EXIT_INTERRUPTED = 130
WARM = -1  # the load before the first one
_WARM_AT_ONCE = 4


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `epd bench` was asked for."""

    address: str = ""
    http: str = ""  # a URL, instead of the address of a gRPC server
    model: str = ""
    chat: bool = False
    ca: str = ""
    arrivals: Arrivals = Arrivals(rate=1.0)
    concurrency: int = 0  # above 0: a closed loop
    trace: Path | None = None
    speedup: float = 1.0
    length_scale: float = 1.0
    count: int | None = None
    seconds: float = 0.0  # above 0, without a count: as many requests as come in this time
    sweep: tuple[float, ...] = ()
    shape: Shape = Shape()
    warm_up: int = 0
    seed: int = 0
    ignore_eos: bool = True
    timeout_seconds: float = 600.0
    targets: Targets = Targets()
    output: Path | None = None
    plot: Path | None = None


DEFAULT_COUNT = 100


class Run(msgspec.Struct, frozen=True):
    """One load and what became of it. rate: requests a second, as planned; 0 in a closed loop."""

    rate: float
    summary: Summary
    outcomes: list[Outcome]


async def bench(plan: Plan) -> int:
    """Runs it, shows it, saves it; the exit code. Ctrl-C ends the load and shows what there is, a second one all."""
    for path in filter(None, (plan.output, plan.plot)):
        if not path.parent.is_dir():
            raise InvalidArgument(f"{path.parent} is no directory", field="output" if path is plan.output else "plot")
    if plan.plot:
        chart.check_name(plan.plot)
    entries = read_trace(plan.trace, plan.count) if plan.trace else None
    stop = asyncio.Event()
    async with _target(plan) as target, _interruptible(stop):
        loads = _loads(plan, entries)
        fitted = [(rate, *workload.fit(asks, target.context)) for rate, asks in loads]
        await _warm(plan, target, stop)
        runs = []
        for rate, asks, _ in fitted:
            if stop.is_set():
                break
            runs.append(Run(rate, *await _run(plan, target, asks, stop, rate)))
    _show(plan, runs, max(cut for _, _, cut in fitted), target)
    if plan.output:
        plan.output.write_bytes(_result(plan, runs, target, interrupted=stop.is_set()))
    if plan.plot and runs:
        chart.save(_chart(plan, runs), plan.plot)
    return EXIT_INTERRUPTED if stop.is_set() else 0


def _loads(plan: Plan, entries: Sequence[TraceEntry] | None) -> list[tuple[float, list[Ask]]]:
    """(planned rate, requests), one for each rate of a sweep. A trace is stretched to a sweep's rates."""
    share = plan.shape.image_share

    def recorded(speedup: float, number: int = 0) -> list[Ask]:
        assert entries is not None
        scale = plan.length_scale
        return workload.replay(
            entries, speedup=speedup, length_scale=scale, image_share=share, seed=plan.seed, load=number
        )

    def drawn(rate: float, number: int) -> list[Ask]:
        arrivals = msgspec.structs.replace(plan.arrivals, rate=rate)
        count = plan.count or (max(1, round(rate * plan.seconds)) if plan.seconds else DEFAULT_COUNT)
        return workload.synthetic(plan.shape, count, arrivals, plan.seed, number)

    if entries is not None:
        asks = recorded(plan.speedup)
        own = workload.mean_rate(asks)
        if plan.concurrency:
            return [(0.0, asks)]
        if plan.sweep and math.isinf(own):
            raise InvalidArgument("the trace's requests come all at once: there is no rate to change", field="sweep")
        swept = [(rate, recorded(plan.speedup * rate / own, i)) for i, rate in enumerate(plan.sweep)]
        return swept or [(own, asks)]
    if plan.concurrency:
        return [(0.0, workload.synthetic(plan.shape, plan.count or DEFAULT_COUNT, None, plan.seed))]
    return [(rate, drawn(rate, i)) for i, rate in enumerate(plan.sweep or (plan.arrivals.rate,))]


async def _warm(plan: Plan, target: Target, stop: asyncio.Event) -> None:
    """Requests that do not count. Their prompts are others, so that they leave nothing in a cache that would help."""
    if plan.warm_up:
        asks, _ = workload.fit(workload.synthetic(plan.shape, plan.warm_up, None, plan.seed, WARM), target.context)
        outcomes = await load.closed_loop(target, asks, _WARM_AT_ONCE, stop)
        if failed := [each for each in outcomes if not each.answered and each.reason != UNFINISHED]:
            make_console(stderr=True).print(f"warm-up: {failed[0].reason}: {failed[0].message}", markup=False)


async def _run(
    plan: Plan, target: Target, asks: Sequence[Ask], stop: asyncio.Event, rate: float
) -> tuple[Summary, list[Outcome]]:
    with _progress(len(asks), f"{rate:.3g} requests/s" if rate else f"{plan.concurrency} at a time") as told:
        if plan.concurrency:
            outcomes = await load.closed_loop(target, asks, plan.concurrency, stop, told)
        else:
            outcomes = await load.open_loop(target, asks, stop, told)
    return summarize(outcomes, plan.targets), outcomes


@contextlib.contextmanager
def _progress(total: int, what: str) -> Iterator[Callable[[Outcome], None]]:
    """A function to call with every outcome; a bar where standard error is a terminal."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda _: progress.advance(task)


@contextlib.asynccontextmanager
async def _interruptible(stop: asyncio.Event) -> AsyncIterator[None]:
    """The first Ctrl-C sets `stop`; a second one is Python's again."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        print("stopping; what there is follows", file=sys.stderr)

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.asynccontextmanager
async def _target(plan: Plan) -> AsyncIterator[Target]:
    images = plan.shape.image_share > 0
    if plan.http:
        key = os.environ.get("EPD_API_KEY", "") or os.environ.get("OPENAI_API_KEY", "")
        ca = "" if plan.ca == SYSTEM else plan.ca
        patience, eos = plan.timeout_seconds, plan.ignore_eos
        http = HttpTarget(plan.http, key=key, timeout_seconds=patience, ignore_eos=eos, chat=plan.chat, ca_file=ca)
        try:
            yield await http.find(plan.model, images=images)
        finally:
            await http.close()
        return
    async with dial(gateway_address(plan.address), Trust(plan.ca)) as channel:
        yield await GrpcTarget.find(
            channel, plan.model, images=images, timeout_seconds=plan.timeout_seconds, ignore_eos=plan.ignore_eos
        )


def _show(plan: Plan, runs: Sequence[Run], cut: int, target: Target) -> None:
    console = make_console()
    console.print(f"{target.model}, seed {plan.seed}", highlight=False)
    if plan.sweep:
        pairs = [(run.rate, run.summary) for run in runs]
        console.print(sweep_table(pairs, plan.targets))
        best = best_rate(pairs)
        known = "none of these rates" if best is None else f"{best:g} requests/s"
        console.print(f"largest rate with at least 90 % attainment: {known}", highlight=False)
    else:
        for run in runs:
            for line in headlines(run.summary, plan.targets):
                console.print(line, highlight=False, soft_wrap=True)
            console.print(run_table(run.summary))
    for run in runs:
        for line in failures(run.outcomes):
            console.print(f"{f'{run.rate:g} requests/s: ' if plan.sweep else ''}{line}", markup=False, highlight=False)
    if cut:
        console.print(f"{cut} requests were cut to the context of {target.context} tokens", highlight=False)
    if runs:
        console.print(chart.text(_chart(plan, runs)), highlight=False, markup=False)


def _chart(plan: Plan, runs: Sequence[Run]) -> chart.Chart:
    if plan.sweep:
        return chart.attainment_over_rate([(run.rate, run.summary) for run in runs], plan.targets)
    return chart.distribution(runs[0].outcomes, plan.targets)


def _result(plan: Plan, runs: Sequence[Run], target: Target, *, interrupted: bool) -> bytes:
    """JSON: what was asked for, and of each run its summary and every request. No prompt and no answer is in it."""
    best = best_rate([(run.rate, run.summary) for run in runs]) if plan.sweep else None
    found = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": target.model,
        "plan": msgspec.to_builtins(plan, enc_hook=_plain),
        "interrupted": interrupted,
        "best_rate": best,
        "runs": runs,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"


def _plain(value: object) -> str:
    return str(value)
