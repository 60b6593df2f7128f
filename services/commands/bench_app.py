"""`epd bench`: its options. What it needs is imported when it runs, as in services/cli.py."""

import asyncio
import random
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

LOAD, SIZES, ASKED, SHOWN = "The load", "Its requests", "Whom to ask", "What is shown"


def bench(
    rate: Annotated[float, typer.Option(help="requests a second, in an open loop", rich_help_panel=LOAD)] = 1.0,
    arrival: Annotated[
        Literal["poisson", "constant", "gamma"],
        typer.Option(help="how requests follow each other; gamma: in bursts", rich_help_panel=LOAD),
    ] = "poisson",
    burst: Annotated[
        float, typer.Option(help="gamma's shape: 1 is Poisson, less is burstier", rich_help_panel=LOAD)
    ] = 0.25,
    concurrency: Annotated[
        int, typer.Option(min=0, help="instead of a rate: so many requests at a time", rich_help_panel=LOAD)
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option(help="instead of a rate: a file in Azure's, Mooncake's or Splitwise's form", rich_help_panel=LOAD),
    ] = None,
    speedup: Annotated[float, typer.Option(min=1e-6, help="of the trace's times", rich_help_panel=LOAD)] = 1.0,
    limit: Annotated[
        int | None,
        typer.Option("--requests", "--limit", min=1, help="[default: 100, or all of a trace]", rich_help_panel=LOAD),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="instead of --requests: as many as come in this time", rich_help_panel=LOAD)
    ] = 0.0,
    sweep: Annotated[str, typer.Option(help="rates, one after the other: 1,2,4,8", rich_help_panel=LOAD)] = "",
    warm_up: Annotated[
        int, typer.Option(min=0, help="requests before the load, which do not count", rich_help_panel=LOAD)
    ] = 2,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="of times, lengths and prompts [default: drawn, and shown]", rich_help_panel=LOAD),
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="128, or 64-256", rich_help_panel=SIZES)] = "128",
    output_tokens: Annotated[str, typer.Option(help="32, or 16-64", rich_help_panel=SIZES)] = "32",
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="of each prompt: the first ones, the same in all", rich_help_panel=SIZES)
    ] = 0,
    images: Annotated[
        float, typer.Option(min=0, max=1, help="share of requests with a picture", rich_help_panel=SIZES)
    ] = 0.0,
    length_scale: Annotated[
        float, typer.Option(min=1e-6, help="of the trace's lengths, shared blocks too", rich_help_panel=SIZES)
    ] = 1.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="answers of just the length that is asked for", rich_help_panel=SIZES)
    ] = True,
    address: Annotated[
        str, typer.Option(help="host:port of the gateway's gRPC [default: the running mesh's]", rich_help_panel=ASKED)
    ] = "",
    http: Annotated[
        str, typer.Option(help="instead of gRPC: URL of any server with OpenAI's API", rich_help_panel=ASKED)
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="with --http: chat completions for text, too", rich_help_panel=ASKED)
    ] = False,
    model: Annotated[str, typer.Option(help="[default: the first one]", rich_help_panel=ASKED)] = "",
    timeout: Annotated[float, typer.Option(min=0.001, help="seconds a request", rich_help_panel=ASKED)] = 600.0,
    ca: Annotated[
        str, typer.Option(help="file of the authority to trust, or `system`", envvar="EPD_CA", rich_help_panel=ASKED)
    ] = "",
    ttft: Annotated[float, typer.Option(min=1e-6, help="target in seconds", rich_help_panel=SHOWN)] = 0.5,
    tpot: Annotated[float, typer.Option(min=1e-6, help="target in seconds", rich_help_panel=SHOWN)] = 0.05,
    output: Annotated[
        Path | None, typer.Option(help="JSON file: figures, and every request", rich_help_panel=SHOWN)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help=".svg or .png file", rich_help_panel=SHOWN)] = None,
) -> None:
    """Send a load and tell how it was answered: TTFT, TPOT, ITL, errors, SLO attainment, goodput.

    Ctrl-C ends the load early and shows what there is.
    """
    from common.errors import InvalidArgument
    from services.bench.arrivals import Arrivals
    from services.bench.summary import Targets
    from services.bench.workload import Lengths, Shape
    from services.commands import bench as command

    if trace and seconds:
        raise InvalidArgument("--seconds is of a rate; a trace takes --limit", field="seconds")
    if concurrency and (sweep or seconds):
        raise InvalidArgument("--concurrency has no rate: no --sweep and no --seconds", field="concurrency")
    plan = command.Plan(
        address=address,
        http=http,
        model=model,
        chat=chat,
        ca=ca,
        arrivals=Arrivals(rate=rate, kind=arrival, shape=burst),
        concurrency=concurrency,
        trace=trace,
        speedup=speedup,
        length_scale=length_scale,
        count=limit,
        seconds=seconds,
        sweep=_rates(sweep),
        shape=Shape(
            prompt=Lengths.parse(prompt_tokens, "prompt_tokens"),
            output=Lengths.parse(output_tokens, "output_tokens"),
            prefix_tokens=prefix_tokens,
            image_share=images,
        ),
        warm_up=warm_up,
        seed=random.randrange(1 << 30) if seed is None else seed,
        ignore_eos=ignore_eos,
        timeout_seconds=timeout,
        targets=Targets(ttft_seconds=ttft, tpot_seconds=tpot),
        output=output,
        plot=plot,
    )
    sys.exit(asyncio.run(command.bench(plan)))


def _rates(text: str) -> tuple[float, ...]:
    from common.errors import InvalidArgument

    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        rates = (0.0,)
    if not all(0 < rate < float("inf") for rate in rates):
        raise InvalidArgument(f"--sweep takes rates above 0 such as 1,2,4,8, not {text!r}", field="sweep")
    return rates
