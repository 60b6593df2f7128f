"""Cancel, deadline and `break` through two hops: the leaf's handler stops, and every span ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from common import telemetry
from common.rpc import deadline
from common.rpc.channel import connect
from common.rpc.server import Server, make_server
from common.span_store import SpanStore
from common.telemetry import Telemetry

PATIENCE = 10.0  # seconds; a bound for broken code, never reached by right code


class Chain:
    """client -> middle -> leaf; the leaf answers one message to streams and then stands still."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.store = SpanStore()
        self.client = telemetry.setup("client", store=self.store)
        self.middle = telemetry.setup("middle", store=self.store)
        self.leaf = telemetry.setup("leaf", store=self.store)
        self.leaf_entered = asyncio.Event()
        self.leaf_stopped = asyncio.Event()
        self.leaf_remaining: float | None = None
        self.to_leaf: grpc.aio.Channel
        self.to_middle: grpc.aio.Channel

    async def leaf_unary(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.leaf_remaining = deadline.remaining()
        try:
            with telemetry.start_span("leaf.work"):
                self.leaf_entered.set()
                await asyncio.Event().wait()
        finally:
            self.leaf_stopped.set()
        return b""

    async def leaf_stream(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        self.leaf_remaining = deadline.remaining()
        try:
            with telemetry.start_span("leaf.work"):
                self.leaf_entered.set()
                yield b"first"
                await asyncio.Event().wait()
        finally:
            self.leaf_stopped.set()

    async def middle_unary(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        with telemetry.start_span("middle.work"):
            return await self.to_leaf.unary_unary("/test.Chain/Call")(request)

    async def middle_stream(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        with telemetry.start_span("middle.work"):
            async for message in self.to_leaf.unary_stream("/test.Chain/Call")(request):
                yield message

    def call(self, timeout: float | None = None):
        make = self.to_middle.unary_unary if self.kind == "unary" else self.to_middle.unary_stream
        return make("/test.Chain/Call")(b"", timeout=timeout)

    async def all_spans_ended(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.client.open_spans + self.middle.open_spans + self.leaf.open_spans:
                await asyncio.sleep(0.005)


def handlers(kind: str, unary: Callable, stream: Callable) -> Callable:
    method = (
        grpc.unary_unary_rpc_method_handler(unary) if kind == "unary" else grpc.unary_stream_rpc_method_handler(stream)
    )
    generic = grpc.method_handlers_generic_handler("test.Chain", {"Call": method})
    return lambda servicer, server: server.add_generic_rpc_handlers((generic,))


async def serve(owner: Telemetry, add: Callable) -> Server:
    server = make_server(telemetry=owner)
    server.add(add, None, "test.Chain")
    await server.start("127.0.0.1:0")
    return server


@asynccontextmanager
async def running(kind: str) -> AsyncIterator[Chain]:
    chain = Chain(kind)
    leaf = await serve(chain.leaf, handlers(kind, chain.leaf_unary, chain.leaf_stream))
    middle = await serve(chain.middle, handlers(kind, chain.middle_unary, chain.middle_stream))
    async with connect(leaf.address) as chain.to_leaf, connect(middle.address) as chain.to_middle:
        yield chain
    await middle.stop()
    await leaf.stop()


async def drive(chain: Chain, call) -> None:
    """Uses the call until it ends."""
    if chain.kind == "unary":
        await call
    else:
        async for _ in call:
            pass


async def stopped(chain: Chain) -> None:
    await asyncio.wait_for(chain.leaf_stopped.wait(), PATIENCE)
    await chain.all_spans_ended()


def spans_of(chain: Chain, trace_id: str) -> dict[tuple[str, str], object]:
    return {(span.service, span.name): span for span in chain.store.trace(trace_id)}


RPC = "test.Chain/Call"


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_cancelled_task_stops_the_leaf(kind: str) -> None:
    async with running(kind) as chain:
        with chain.client.start_span("client.root"):
            trace_id, _ = telemetry.current_trace_ids()
            task = asyncio.create_task(drive(chain, chain.call()))
            await asyncio.wait_for(chain.leaf_entered.wait(), PATIENCE)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await stopped(chain)
        spans = spans_of(chain, trace_id)
        assert set(spans) == {
            ("client", "client.root"),
            ("client", RPC),
            ("middle", "middle.work"),
            ("middle", RPC),
            ("leaf", "leaf.work"),
        }
        for edge in [("client", RPC), ("middle", "middle.work"), ("middle", RPC), ("leaf", "leaf.work")]:
            assert spans[edge].error == "CANCELLED"
        chained = [("client", "client.root"), ("client", RPC), ("middle", "middle.work"), ("middle", RPC)]
        for parent, child in zip(chained, [*chained[1:], ("leaf", "leaf.work")], strict=True):
            assert spans[child].parent_span_id == spans[parent].span_id


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_cancelled_call_stops_the_leaf(kind: str) -> None:
    async with running(kind) as chain:
        with chain.client.start_span("client.root"):
            call = chain.call()
            task = asyncio.create_task(drive(chain, call))
            await asyncio.wait_for(chain.leaf_entered.wait(), PATIENCE)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await stopped(chain)


@pytest.mark.parametrize("kind", ["unary", "stream"])
async def test_deadline_is_forwarded_and_stops_the_leaf(kind: str) -> None:
    async with running(kind) as chain:
        with chain.client.start_span("client.root"):
            trace_id, _ = telemetry.current_trace_ids()
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await drive(chain, chain.call(timeout=0.5))
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await stopped(chain)
        assert chain.leaf_remaining is not None
        assert 0 < chain.leaf_remaining <= 0.5
        assert spans_of(chain, trace_id)["client", RPC].error == "DEADLINE_EXCEEDED"


async def test_no_deadline_stays_none() -> None:
    async with running("stream") as chain:
        async for _ in chain.call():
            break
        await asyncio.wait_for(chain.leaf_stopped.wait(), PATIENCE)
        assert chain.leaf_remaining is None


async def test_stream_left_by_break_ends_its_span_at_once() -> None:
    async with running("stream") as chain:
        with chain.client.start_span("client.root"):
            async for message in chain.call():
                assert message == b"first"
                assert chain.client.open_spans == 2
                break
            assert chain.client.open_span_names() == ["client.root"]
        await stopped(chain)


async def test_stream_left_by_break_can_go_on_while_it_is_held() -> None:
    async with running("stream") as chain:
        with chain.client.start_span("client.root"):
            call = chain.call()
            async for _ in call:
                break
            assert chain.client.open_spans == 2
            assert not call.done()
            del call
            assert chain.client.open_spans == 1
        await stopped(chain)


async def test_stream_dropped_by_an_exception_ends() -> None:
    async with running("stream") as chain:

        async def consume() -> None:
            async for _ in chain.call():
                raise LookupError

        with chain.client.start_span("client.root"), pytest.raises(LookupError):
            await consume()
        await stopped(chain)


async def test_explicit_timeout_and_remaining_time_take_the_smaller() -> None:
    deadline.set_remaining(5.0)
    assert deadline.cap(1.0) == 1.0
    assert deadline.cap(9.0) == pytest.approx(5.0, abs=0.5)
    assert deadline.cap(None) == pytest.approx(5.0, abs=0.5)
    with deadline.detached():
        assert deadline.cap(None) is None
    deadline.set_remaining(-1.0)
    assert deadline.cap(7.0) == 0.0


async def echo_stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def count(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
    return str(len([request async for request in requests])).encode()


@pytest.fixture
async def streaming() -> AsyncIterator[tuple[Telemetry, grpc.aio.Channel]]:
    owner = telemetry.setup("streaming", store=SpanStore())
    generic = grpc.method_handlers_generic_handler(
        "test.Streams",
        {
            "Echo": grpc.stream_stream_rpc_method_handler(echo_stream),
            "Count": grpc.stream_unary_rpc_method_handler(count),
        },
    )
    server = make_server(telemetry=owner)
    server.add(lambda servicer, inner: inner.add_generic_rpc_handlers((generic,)), None, "test.Streams")
    await server.start("127.0.0.1:0")
    async with connect(server.address) as channel:
        yield owner, channel
    await server.stop()


async def numbers() -> AsyncIterator[bytes]:
    for number in range(3):
        yield str(number).encode()


async def test_stream_stream_by_iterator_and_by_hand(streaming: tuple[Telemetry, grpc.aio.Channel]) -> None:
    owner, channel = streaming
    with owner.start_span("root"):
        assert [message async for message in channel.stream_stream("/test.Streams/Echo")(numbers())] == [
            b"0",
            b"1",
            b"2",
        ]
        call = channel.stream_stream("/test.Streams/Echo")()
        await call.write(b"hello")
        assert await call.read() == b"hello"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert owner.open_spans == 1


async def test_stream_stream_left_open_ends_when_dropped(streaming: tuple[Telemetry, grpc.aio.Channel]) -> None:
    owner, channel = streaming
    with owner.start_span("root"):
        call = channel.stream_stream("/test.Streams/Echo")()
        await call.write(b"hello")
        assert await call.read() == b"hello"
        del call
        assert owner.open_span_names() == ["root"]


async def test_stream_unary(streaming: tuple[Telemetry, grpc.aio.Channel]) -> None:
    owner, channel = streaming
    with owner.start_span("root"):
        assert await channel.stream_unary("/test.Streams/Count")(numbers()) == b"3"
        assert owner.open_spans == 1


async def test_unsampled_parent_is_respected() -> None:
    store = SpanStore()
    client = telemetry.setup("client", store=store, sample_ratio=0.0)
    owner = telemetry.setup("server", store=store)
    seen: list[str] = []

    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        with telemetry.start_span("server.work"):
            seen.append(telemetry.current_trace_ids()[0])
        return b""

    server = await serve(owner, handlers("unary", handler, handler))
    async with connect(server.address) as channel:
        with client.start_span("client.root"):
            trace_id, _ = telemetry.current_trace_ids()
            await channel.unary_unary("/test.Chain/Call")(b"")
    await server.stop()
    assert seen == [trace_id]
    assert len(store) == 0


async def test_call_outside_a_trace_makes_no_span() -> None:
    owner = telemetry.setup("server", store=(store := SpanStore()))

    async def handler(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return str(dict(context.invocation_metadata()).get("traceparent")).encode()

    server = await serve(owner, handlers("unary", handler, handler))
    async with connect(server.address) as channel:
        assert await channel.unary_unary("/test.Chain/Call")(b"") == b"None"
    await server.stop()
    assert len(store) == 0


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_stream"])
async def test_a_cancellation_is_not_lost_in_a_call_that_fails_just_then(kind: str) -> None:
    """gRPC would raise its own error, and a task that tries again upon errors would never end."""
    async with connect("127.0.0.1:9") as channel:

        async def requests() -> AsyncIterator[bytes]:
            yield b""
            await asyncio.Event().wait()

        call = getattr(channel, kind)("/test.Chain/Call")(requests() if kind == "stream_stream" else b"")

        async def answer() -> bytes:
            return await (call if kind == "unary_unary" else call.read())

        task = asyncio.create_task(answer())
        call.add_done_callback(lambda _: task.cancel())
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_call_after_a_cancellation_fails_with_its_own_error() -> None:
    task = asyncio.create_task(_after_a_cancel())
    await asyncio.sleep(0)
    task.cancel()
    assert await task is grpc.StatusCode.UNAVAILABLE


async def _after_a_cancel() -> grpc.StatusCode:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        async with connect("127.0.0.1:9") as channel:
            call = channel.unary_stream("/test.Chain/Call")(b"")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
    return caught.value.code()
