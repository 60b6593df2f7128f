"""`epd generate` and `epd chat`: asking the mesh from a terminal."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import msgspec
from google.protobuf import json_format

from common.errors import EpdError, InvalidArgument
from epd.v1 import generation_pb2, generation_pb2_grpc
from services.commands.client import NO_TRUST, dial, gateway_address
from services.commands.render import hops_table, make_console
from services.commands.trust import Trust


class Message(msgspec.Struct, frozen=True):
    """One turn; its images come before its text."""

    role: str
    text: str
    images: tuple[bytes, ...] = ()


def read_images(paths: Sequence[Path]) -> tuple[bytes, ...]:
    """The files as they are. Raises InvalidArgument naming one that cannot be read."""
    found = []
    for path in paths:
        try:
            found.append(path.read_bytes())
        except OSError as error:
            raise InvalidArgument(f"{path} cannot be read: {error.strerror}", field="image") from None
    return tuple(found)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask and how; None leaves a field to the mesh's default."""

    model: str = ""
    raw: bool = False  # the prompt as it is, without the chat template
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    session: str = ""
    timeout: float = 600.0  # seconds

    def request(self, messages: Sequence["Message"]) -> generation_pb2.GenerateRequest:
        request = generation_pb2.GenerateRequest(model=self.model, n=self.n, stop=self.stop, session_id=self.session)
        if self.raw:
            request.text = messages[-1].text
            for data in messages[-1].images:
                request.images.add(data=data)
        else:
            for each in messages:
                message = request.chat.messages.add(role=each.role)
                for data in each.images:
                    message.content.add(image=generation_pb2.Image(data=data))
                message.content.add(text=each.text)
        for name in ("max_tokens", "temperature", "top_p", "seed"):
            if (value := getattr(self, name)) is not None:
                setattr(request.sampling, name, value)
        return request


async def stream(
    channel: grpc.aio.Channel, request: generation_pb2.GenerateRequest, timeout: float
) -> AsyncIterator[generation_pb2.GenerateResponse]:
    """The answer's messages. Leaving early cancels the request everywhere."""
    call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=timeout)
    async for response in call:
        yield response


async def generate(
    address: str,
    prompt: str,
    question: Question,
    *,
    images: tuple[bytes, ...] = (),
    as_json: bool,
    timing: bool,
    trust: Trust = NO_TRUST,
) -> None:
    """Print the answer while it comes; several choices one after the other, when they are complete."""
    request = question.request([Message("user", prompt, images)])
    texts: dict[int, str] = {}
    async with dial(gateway_address(address), trust) as channel:
        async for response in stream(channel, request, question.timeout):
            if as_json:
                print(json_format.MessageToJson(response, preserving_proto_field_name=True, indent=None), flush=True)
                continue
            for choice in response.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                if question.n == 1:
                    print(choice.text, end="", flush=True)
    if as_json:
        return
    if question.n == 1:
        print()
    else:
        for index, text in sorted(texts.items()):
            print(f"[{index}] {text}")
    sys.stdout.flush()
    if timing:
        console = make_console(stderr=True)
        console.print(hops_table(response.accounting))
        at = f" --address {address}" if address else ""
        console.print(f"[dim]epd trace {response.accounting.trace_id}{at}[/dim]", highlight=False, soft_wrap=True)


def chat(
    address: str, question: Question, system: str, images: tuple[bytes, ...] = (), trust: Trust = NO_TRUST
) -> None:
    """A conversation. The session keeps it on the worker that has its prefix. images go with the next message."""
    console = make_console()
    history = [Message("system", system)] if system else []
    with asyncio.Runner() as runner:
        target = gateway_address(address)
        models = [model.id for model in runner.run(_models(target, trust))]
        console.print(f"[dim]{', '.join(models)} at {target}. /image FILE adds a picture to the next message, ", end="")
        console.print("[dim]/new starts over, /quit or Ctrl-D ends, Ctrl-C stops an answer.[/dim]")
        if images:
            console.print(f"[dim]{len(images)} picture{'s' if len(images) > 1 else ''} with the next message.[/dim]")
        while (line := _read_line()) is not None:
            if line in ("/quit", "/exit"):
                return
            if line == "/new":
                history, images = history[:1] if system else [], ()
                console.print("[dim]A new conversation.[/dim]")
            elif line.startswith("/image "):
                try:
                    images += read_images([Path(line.removeprefix("/image ").strip()).expanduser()])
                    console.print("[dim]It goes with the next message.[/dim]")
                except InvalidArgument as error:
                    console.print(f"[red]{error.message}[/red]", highlight=False)
            elif line:
                answer: list[str] = []
                said = Message("user", line, images)
                try:
                    runner.run(_turn(target, question.request([*history, said]), question.timeout, answer, trust))
                except KeyboardInterrupt:
                    console.print("\n[dim]stopped[/dim]")
                except EpdError as error:
                    console.print(f"[red]{error.message}[/red]", highlight=False)
                    if images and isinstance(error, InvalidArgument):  # or every further message would meet it again
                        console.print("[dim]The pictures were dropped.[/dim]")
                        images = ()
                if answer:
                    history += [said, Message("assistant", "".join(answer))]
                    images = ()


async def _models(target: str, trust: Trust) -> list[generation_pb2.Model]:
    async with dial(target, trust) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return list((await stub.ListModels(generation_pb2.ListModelsRequest(), timeout=10)).models)


async def _turn(
    target: str, request: generation_pb2.GenerateRequest, timeout: float, answer: list[str], trust: Trust
) -> None:
    """Prints the answer while it comes and adds its pieces to `answer`."""
    response = generation_pb2.GenerateResponse()
    async with dial(target, trust) as channel:
        async for response in stream(channel, request, timeout):
            for choice in response.choices:
                answer.append(choice.text)
                print(choice.text, end="", flush=True)
    timing, usage = response.accounting, response.usage
    print()
    make_console().print(
        f"[dim]{usage.completion_tokens} tokens, first after {timing.ttft_seconds * 1000:.0f} ms, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, trace {timing.trace_id}[/dim]",
        highlight=False,
    )


def _read_line() -> str | None:
    """One line of stdin, None at its end or at Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
