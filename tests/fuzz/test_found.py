"""What fuzzing has found, each as its smallest input."""

import asyncio
import io
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

import common.engine.messages as msg
from common.errors import MAX_FIELD_CHARACTERS, MAX_MESSAGE_CHARACTERS, EngineFailed, InvalidArgument
from common.log import setup_logging
from common.models.tokenizer import Tokenizer
from common.registry.record import BadRecord, decode
from common.rpc.channel import connect
from common.rpc.errors import reason_of
from common.rpc.server import make_server
from common.rpc.trace_service import SERVICE, TraceService
from common.sampling import ChoiceTokens, SamplingParams
from common.span_store import SpanStore
from common.tasks import together
from epd.v1 import trace_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from services.gateway.choice import Choice
from services.gateway.openai_schema import ChatBody, parse
from services.gateway.sse import merge
from tests.tokenizer_files import byte_tokenizer
from tests.unit.engine.harness import Harness
from tests.unit.gateway.conftest import Mesh, ask, refusal

DEEP = b"[" * 30_000


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    made = Mesh(byte_tokenizer(tmp_path))
    await made.start()
    yield made
    await made.stop()


async def test_a_message_that_cannot_be_parsed_is_an_invalid_argument() -> None:
    """It was UNKNOWN with the parser's words."""
    server = make_server()
    server.add(trace_pb2_grpc.add_TraceServiceServicer_to_server, TraceService(SpanStore()), SERVICE)
    await server.start("127.0.0.1:0")
    async with connect(server.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/GetTrace", request_serializer=None, response_deserializer=None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff\xff\xff")
    await server.stop()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value.trailing_metadata()) == "INVALID_ARGUMENT"
    assert "google" not in (caught.value.details() or "")


class Noise(grpc.GenericRpcHandler):
    """Answers with bytes that are no message."""

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b"\xff\xff\xff"

        return grpc.unary_stream_rpc_method_handler(answer)


async def test_an_answer_that_cannot_be_parsed_fails_the_call() -> None:
    """gRPC hands out None for it, on which readers stumbled."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Noise(),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with connect(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = stub.Watch(worker_pb2.WatchRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.Watch(worker_pb2.WatchRequest()):
                pass
    await server.stop(0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_brackets_within_brackets() -> None:
    """They ended the watch of the registry for good, and made HTTP 500."""
    with pytest.raises(BadRecord):
        decode(b'{"x": ' + DEEP)
    with pytest.raises(InvalidArgument, match="nested"):
        parse(b'{"messages": [], "response_format": {"json_schema": {"schema": {"x": ' + DEEP, ChatBody)


def test_errors_say_no_more_than_a_transport_takes() -> None:
    error = InvalidArgument("x" * 100_000, field="y" * 100_000)
    assert len(error.message) == len(str(error)) == MAX_MESSAGE_CHARACTERS
    assert len(error.field) == MAX_FIELD_CHARACTERS


async def test_time_is_over_after_a_failed_attempt() -> None:
    """asyncio.TaskGroup left a cancellation behind, so that a later timeout looked like a cancelled call."""

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    async def waits() -> None:
        await asyncio.Event().wait()

    async def fails_then_waits() -> None:
        other = asyncio.create_task(waits())
        with pytest.raises(ValueError, match="no"):
            await together(other, asyncio.create_task(fails()))
        assert other.cancelled()
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        await waits()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fails_then_waits(), 0.05)


@pytest.mark.parametrize(
    "first",
    [
        [ChoiceTokens(choice=0, token_ids=[2**32 - 1])],
        [ChoiceTokens(choice=0, token_ids=[512])],
        [ChoiceTokens(choice=0, token_ids=[])],
        [ChoiceTokens(choice=0, token_ids=[5, 6])],
        [ChoiceTokens(choice=1, token_ids=[5])],
        [ChoiceTokens(choice=0, token_ids=[5])] * 2,
    ],
)
def test_first_tokens_that_cannot_be_fail_their_request_alone(first: list[ChoiceTokens]) -> None:
    """A token outside of the vocabulary broke the engine's step, and with it the worker."""
    engine = Harness()
    engine.core.handle(
        msg.Reserve(seq="a", prompt=[1] * 20, output=[], choices=[0], sampling=SamplingParams(max_tokens=4))
    )
    engine.core.step()
    engine.core.handle(msg.Commit(seq="a", first=first))
    assert engine.failed["a"].reason == "TRANSFER_FAILED"
    assert not engine.core.check_integrity()
    assert engine.core.load().free_blocks == engine.core.load().total_blocks


def test_an_unknown_end_is_no_end(tmp_path: Path) -> None:
    choice = Choice(0, Tokenizer(byte_tokenizer(tmp_path)), SamplingParams(), ())
    with pytest.raises(EngineFailed):
        choice.receive(types_pb2.ChoiceTokens(token_ids=[97], finish_reason=99))
    assert not choice.finished


async def test_a_merge_that_is_left_leaves_nothing() -> None:
    async def slow() -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    merged = merge([slow(), slow()])  # type: ignore[list-item]
    await anext(merged)
    await anext(merged)
    reading = asyncio.ensure_future(anext(merged))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await merged.aclose()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_a_label_that_is_refused_is_not_in_a_span(mesh: Mesh) -> None:
    await mesh.pair()
    code, _, _ = await refusal(mesh, ask(request_id="secret" * 100))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    spans = mesh.gateway.store.trace(mesh.gateway.store.trace_of_request("secret" * 100) or "")
    assert not spans


async def test_a_client_that_leaves_in_mid_body_is_no_error(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = mesh.gateway.http_address.rpartition(":")
    for _ in range(3):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\ncontent-length: 999\r\n\r\n{"
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    async with httpx.AsyncClient(base_url=f"http://{mesh.gateway.http_address}", timeout=20) as client:
        response = await client.post("/v1/completions/", content=b"{}")
        assert response.status_code == 404  # and no redirect, which clients follow with another method
        assert response.json()["error"]["message"]
        assert (await client.get("/openapi.json")).json()["openapi"] == "3.1.0"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_what_nobody_catches_is_logged_without_its_text() -> None:
    hooks, handlers, level = (sys.excepthook, threading.excepthook), logging.root.handlers[:], logging.root.level
    out, text = io.StringIO(), "sec" + "ret"  # not as it stands in the source, which a stack may show
    try:
        setup_logging("engine", stream=out, level="DEBUG")
        logging.getLogger("PIL.TiffImagePlugin").debug("tag: %s", text)
        try:
            raise ValueError(text)
        except ValueError as error:
            sys.excepthook(ValueError, error, error.__traceback__)
        thread = threading.Thread(target=lambda: json.loads(text))
        thread.start()
        thread.join()
    finally:
        sys.excepthook, threading.excepthook = hooks
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    assert text not in out.getvalue()
    assert out.getvalue().count("not caught") == 2
