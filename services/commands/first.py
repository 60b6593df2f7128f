"""The first questions of `epd up`: they show that the mesh answers, and where the time goes."""

import os
import secrets
from collections.abc import Collection
from pathlib import Path

import grpc
from rich.console import Console

from common.models.pictures import Picture, heldout
from common.rpc.channel import connect
from common.rpc.tls import TlsOptions
from epd.v1 import generation_pb2, generation_pb2_grpc
from services.commands.ask import Message, Question, stream
from services.commands.client import credentials
from services.commands.picture import show_picture
from services.commands.render import hops_table

QUESTION = "What is the capital of France?"
_SECONDS = 120.0
_ASKED = ("background", "colour", "shape")  # kinds of questions that the default model is good at


async def first_questions(
    address: str,
    served: str,
    aliases: Collection[str],
    run_dir: Path,
    console: Console,
    *,
    tls: TlsOptions | None = None,
) -> None:
    """A question in words and, of our own vision model, one about a picture drawn just now.

    Another vision model may know nothing of such pictures: it is asked in words only.
    """
    async with connect(address, tls=tls, metadata=credentials()) as channel:
        listed = await generation_pb2_grpc.GenerationServiceStub(channel).ListModels(
            generation_pb2.ListModelsRequest(), timeout=_SECONDS
        )
        await _ask(channel, next(iter(aliases), served), Message("user", QUESTION), 48, console)
        if aliases and any(model.id == served and model.encode_workers for model in listed.models):
            picture = heldout(1, seed=secrets.randbelow(1 << 16))[0]
            _show(picture, run_dir / "picture.png", console)
            asked = secrets.choice([each for each in picture.questions() if each.kind in _ASKED])
            await _ask(channel, served, Message("user", asked.text, (picture.png(),)), 24, console)


def _show(picture: Picture, path: Path, console: Console) -> None:
    path.write_bytes(picture.png())
    show_picture(picture.image, console)
    console.print(f"[dim]{os.path.relpath(path)}[/dim]", highlight=False, soft_wrap=True)


async def _ask(channel: grpc.aio.Channel, model: str, message: Message, max_tokens: int, console: Console) -> None:
    """A failure is reported and is no reason to end."""
    request = Question(model=model, max_tokens=max_tokens, temperature=0.0).request([message])
    console.print(f"[bold]> {message.text}[/bold]", highlight=False)
    response = generation_pb2.GenerateResponse()
    try:
        async for response in stream(channel, request, _SECONDS):
            for choice in response.choices:
                print(choice.text, end="", flush=True)
    except grpc.aio.AioRpcError as error:
        console.print(f"[yellow]the question failed: {error.details()}[/yellow]", highlight=False)
        return
    print("\n")
    console.print(hops_table(response.accounting))
    console.print(f"[dim]epd trace {response.accounting.trace_id}[/dim]\n", highlight=False)
