"""`epd generate`, `chat`, `status`, `trace` and `health`: what one does with a mesh that runs."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from services.commands.options import Address, Ca, Certs, Etcd


def generate(
    prompt: Annotated[str, typer.Argument(help="- reads standard input")],
    address: Address = "",
    model: Annotated[str, typer.Option()] = "",
    raw: Annotated[bool, typer.Option("--raw", help="the prompt as it is, without the chat template")] = False,
    image: Annotated[
        list[Path] | None, typer.Option(help="a picture in front of the prompt; may be given several times")
    ] = None,
    n: Annotated[int, typer.Option(help="choices")] = 1,
    max_tokens: Annotated[int | None, typer.Option()] = None,
    temperature: Annotated[float | None, typer.Option(help="0: greedy")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="may be given several times")] = None,
    timeout: Annotated[float, typer.Option(help="seconds")] = 600.0,
    json: Annotated[bool, typer.Option("--json", help="every message as one line of JSON")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="then show where the time went")] = False,
    ca: Ca = "",
) -> None:
    """Ask once and print the answer while it comes."""
    from services.commands import ask
    from services.commands.trust import Trust

    question = ask.Question(
        model=model,
        raw=raw,
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop or ()),
        timeout=timeout,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    images = ask.read_images(image or ())
    trust = Trust(ca)
    asyncio.run(ask.generate(address, text, question, images=images, as_json=json, timing=timing, trust=trust))


def chat(
    address: Address = "",
    model: Annotated[str, typer.Option()] = "",
    system: Annotated[str, typer.Option(help="what the conversation starts with")] = "",
    image: Annotated[list[Path] | None, typer.Option(help="a picture in front of the first message")] = None,
    max_tokens: Annotated[int | None, typer.Option()] = 512,
    temperature: Annotated[float | None, typer.Option(help="0: greedy")] = 0.2,
    top_p: Annotated[float | None, typer.Option()] = 0.9,
    seed: Annotated[int | None, typer.Option()] = None,
    ca: Ca = "",
) -> None:
    """A conversation in the terminal."""
    import secrets

    from services.commands import ask
    from services.commands.trust import Trust

    session = secrets.token_hex(8)
    ask.chat(
        address,
        ask.Question(
            model=model, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, session=session
        ),
        system,
        ask.read_images(image or ()),
        Trust(ca),
    )


def status(address: Address = "", etcd: Etcd = "", ca: Ca = "", certs: Certs = "") -> None:
    """Workers with their roles, pools, queues and integrity; without etcd only what the gateway knows."""
    from services.commands import inspect
    from services.commands.trust import Trust

    asyncio.run(inspect.status(address, etcd, Trust(ca, certs)))


def trace(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="a trace id, or an answer's or a request's id")],
    address: Address = "",
    ca: Ca = "",
    svg: Annotated[Path | None, typer.Option(help="also draw it into this file")] = None,
) -> None:
    """Where one request's time went, as a waterfall."""
    from services.commands import inspect
    from services.commands.trust import Trust

    asyncio.run(inspect.trace(address, identifier, Trust(ca), svg))


def health(
    address: Address = "",
    service: Annotated[str, typer.Option(help="ask for this one's health alone [default: the whole server's]")] = "",
    ca: Ca = "",
    certs: Certs = "",
    name: Annotated[str, typer.Option(help="with TLS: the id in the server's certificate, for a worker")] = "",
) -> None:
    """Ask a gateway or a worker whether it serves; ends with 1 if it does not.

    A gateway serves when a request would reach workers. With --service only the server's own health counts.
    """
    from services.commands.health import health as run
    from services.commands.trust import Trust

    asyncio.run(run(address, service, Trust(ca, certs, name)))
