"""The floor of the gateway bench: bare grpc.aio that passes a message a token on and does nothing else."""

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc

from epd.v1 import decode_pb2, decode_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2

_TOKENS = decode_pb2.DecodeResponse(
    tokens=decode_pb2.DecodeTokens(choices=[types_pb2.ChoiceTokens(choice=0, token_ids=[12345])])
)


class _Source(decode_pb2_grpc.DecodeServiceServicer):
    async def Decode(self, request: decode_pb2.DecodeRequest, context: Any) -> AsyncIterator[decode_pb2.DecodeResponse]:
        for _ in range(request.sampling.max_tokens):
            yield _TOKENS


class _Relay(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, source: decode_pb2_grpc.DecodeServiceStub) -> None:
        self._source = source

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        async for message in self._source.Decode(decode_pb2.DecodeRequest(sampling=request.sampling)):
            delta = generation_pb2.ChoiceDelta(token_ids=message.tokens.choices[0].token_ids)
            yield generation_pb2.GenerateResponse(choices=[delta])


async def _serve(pipe: Connection, source: str) -> None:
    server = grpc.aio.server()
    if source:
        channel = grpc.aio.insecure_channel(source)
        relay = _Relay(decode_pb2_grpc.DecodeServiceStub(channel))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(relay, server)
    else:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(_Source(), server)
    pipe.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await server.wait_for_termination()


def _process(pipe: Connection, source: str) -> None:
    asyncio.run(_serve(pipe, source))


@contextmanager
def bare_relay() -> Any:
    """Address of a relay with a source behind it, each a process."""
    context = multiprocessing.get_context("spawn")
    started = []
    address = ""
    try:
        for _ in range(2):
            here, there = context.Pipe()
            process = context.Process(target=_process, args=(there, address), daemon=True)
            process.start()
            started.append(process)
            address = here.recv()
        yield address
    finally:
        for process in started:
            process.terminate()
            process.join()
