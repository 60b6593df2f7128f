"""How tokens should travel from a decode worker to a gateway: a stream a request, with coalescing, or one a pair.

Bare grpc.aio on loopback, one process a side, 128 sequences that all gain a token in each step. Prints tokens per
second at the receiver, in turn A B C A B C, medians. The decision is in docs/adr.

    python bench/token_streams.py [--sequences 128] [--steps 200] [--rounds 3]
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time

import grpc

from epd.v1 import decode_pb2, decode_pb2_grpc, types_pb2

COALESCE = 8  # steps in one message of the coalesced form


def _message(choices: int, tokens: int) -> decode_pb2.DecodeResponse:
    one = types_pb2.ChoiceTokens(choice=0, token_ids=[12345] * tokens)
    return decode_pb2.DecodeResponse(tokens=decode_pb2.DecodeTokens(choices=[one] * choices))


class _Server(decode_pb2_grpc.DecodeServiceServicer):
    """`model` of the request tells the form: messages, choices in a message, tokens a choice."""

    async def Decode(self, request, context):
        messages, choices, tokens = json.loads(request.model)
        message = _message(choices, tokens)
        for _ in range(messages):
            yield message


def _serve(pipe) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(_Server(), server)
        pipe.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


async def _receive(stub, form: tuple[int, int, int]) -> int:
    count = 0
    async for message in stub.Decode(decode_pb2.DecodeRequest(model=json.dumps(form))):
        for choice in message.tokens.choices:
            count += len(choice.token_ids)
    return count


async def _measure(port: int, sequences: int, steps: int, rounds: int) -> dict[str, float]:
    forms = {
        "a stream a request, a message a token": (sequences, (steps, 1, 1)),
        f"a stream a request, {COALESCE} tokens a message": (sequences, (steps // COALESCE, 1, COALESCE)),
        "one stream a pair, a message a step": (1, (steps, sequences, 1)),
    }
    rates: dict[str, list[float]] = {name: [] for name in forms}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        for _ in range(rounds):
            for name, (streams, form) in forms.items():
                start = time.perf_counter()
                tokens = sum(await asyncio.gather(*[_receive(stub, form) for _ in range(streams)]))
                rates[name].append(tokens / (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(there,), daemon=True)
    server.start()
    try:
        rates = asyncio.run(_measure(here.recv(), arguments.sequences, arguments.steps, arguments.rounds))
    finally:
        server.terminate()
    base = next(iter(rates.values()))
    for name, rate in rates.items():
        print(f"{name:45s} {rate:10,.0f} tokens/s  {rate / base:5.1f}×")


if __name__ == "__main__":
    main()
