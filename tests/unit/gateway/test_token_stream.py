"""The stream that carries the tokens of all calls to one worker."""

import asyncio
from typing import Any

import grpc
import pytest

from epd.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from services.gateway.token_stream import TokenStream

PATIENCE_SECONDS = 10.0


class FakeDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Hands each Subscribe stream to the test, which says what comes and when it ends."""

    def __init__(self) -> None:
        self.streams: asyncio.Queue[asyncio.Queue[decode_pb2.SubscribeResponse | None]] = asyncio.Queue()
        self.subscribers: list[bytes] = []

    async def Subscribe(self, request: decode_pb2.SubscribeRequest, context: Any) -> Any:
        self.subscribers.append(request.subscriber)
        messages: asyncio.Queue[decode_pb2.SubscribeResponse | None] = asyncio.Queue()
        await self.streams.put(messages)
        while (message := await messages.get()) is not None:
            yield message


class World:
    def __init__(self, fake: FakeDecode, stream: TokenStream) -> None:
        self.fake, self.stream = fake, stream
        self.got: list[list[int]] = []
        self.arrived = asyncio.Event()
        self.lost = asyncio.Event()

    def tokens(self, choices: Any) -> None:
        self.got.append([token for choice in choices for token in choice.token_ids])
        self.arrived.set()

    async def opened(self) -> asyncio.Queue[decode_pb2.SubscribeResponse | None]:
        """The worker's end of the stream, once the gateway uses it."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            messages = await self.fake.streams.get()
            await messages.put(decode_pb2.SubscribeResponse())
            while not (route := self.stream.attach(self.tokens, self.lost.set)):
                await asyncio.sleep(0.001)
        self.stream.detach(route)
        return messages


def message(tag: int, *token_ids: int) -> decode_pb2.SubscribeResponse:
    choice = types_pb2.ChoiceTokens(choice=0, token_ids=token_ids)
    return decode_pb2.SubscribeResponse(calls=[decode_pb2.CallTokens(tag=tag, choices=[choice])])


@pytest.fixture
async def world() -> Any:
    server, fake = grpc.aio.server(), FakeDecode()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = TokenStream(decode_pb2_grpc.DecodeServiceStub(channel), "fake")
        yield World(fake, stream)
        await stream.close()
    await server.stop(0)


async def within(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await event.wait()


async def test_no_route_before_the_worker_knows_the_subscriber(world: World) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await world.fake.streams.get()
    assert world.stream.attach(world.tokens, world.lost.set) is None


async def test_tokens_reach_their_call_and_no_other(world: World) -> None:
    messages = await world.opened()
    others: list[Any] = []
    mine = world.stream.attach(world.tokens, world.lost.set)
    other = world.stream.attach(others.append, world.lost.set)
    assert mine
    assert other
    world.stream.detach(other)
    await messages.put(message(other.subscription.tag, 9))  # late words for a call that has ended
    await messages.put(message(mine.subscription.tag, 1, 2))
    await within(world.arrived)
    assert world.got == [[1, 2]]
    assert others == []
    assert mine.subscription.subscriber == world.fake.subscribers[0]


async def test_the_end_of_the_stream_ends_its_calls_and_a_new_one_is_opened(world: World) -> None:
    messages = await world.opened()
    assert world.stream.attach(world.tokens, world.lost.set)
    await messages.put(None)
    await within(world.lost)
    await world.opened()
    assert world.stream.attach(world.tokens, world.lost.set)
    assert len(set(world.fake.subscribers)) == len(world.fake.subscribers) >= 2


async def test_a_call_that_cannot_take_its_tokens_ends_alone(world: World) -> None:
    messages = await world.opened()
    bad_lost = asyncio.Event()

    def bad(choices: Any) -> None:
        raise RuntimeError

    broken, fine = world.stream.attach(bad, bad_lost.set), world.stream.attach(world.tokens, world.lost.set)
    assert broken
    assert fine
    await messages.put(message(broken.subscription.tag, 1))
    await messages.put(message(fine.subscription.tag, 2))
    await within(bad_lost)
    await within(world.arrived)
    assert world.got == [[2]]
    assert not world.lost.is_set()


async def test_a_worker_without_the_stream_is_left_alone() -> None:
    server = grpc.aio.server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode_pb2_grpc.DecodeServiceServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = TokenStream(decode_pb2_grpc.DecodeServiceStub(channel), "old")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(stream._task)
        assert stream.attach(lambda choices: None, lambda: None) is None
        await stream.close()
    await server.stop(0)
