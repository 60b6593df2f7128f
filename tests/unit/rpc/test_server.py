"""Errors as statuses, health, reflection, taken ports, TLS, keepalive, lag."""

import asyncio
import logging
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common import errors, telemetry
from common.metrics import Metrics
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from common.rpc.lag import LoopLag
from common.rpc.server import Server, make_server
from common.rpc.tls import TlsOptions
from common.rpc.trace_service import SERVICE, TraceService
from common.span_store import SpanStore
from epd.v1 import trace_pb2, trace_pb2_grpc

Behavior = Callable[[grpc.aio.ServicerContext], Awaitable[bytes]]
SECRET = "the prompt was about cheese"


async def serve(behavior: Behavior, tls: TlsOptions | None = None) -> Server:
    async def unary(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return await behavior(context)

    async def stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"first"
        yield await behavior(context)

    async def write(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.write(b"first")
        await context.write(await behavior(context))

    methods = {
        "unary": grpc.unary_unary_rpc_method_handler(unary),
        "stream": grpc.unary_stream_rpc_method_handler(stream),
        "write": grpc.unary_stream_rpc_method_handler(write),
    }
    generic = grpc.method_handlers_generic_handler("test.Server", methods)
    server = make_server(telemetry=telemetry.setup("server"), tls=tls)
    server.add(lambda servicer, inner: inner.add_generic_rpc_handlers((generic,)), None, "test.Server")
    await server.start("127.0.0.1:0")
    return server


async def failure(server: Server, form: str) -> grpc.aio.AioRpcError:
    """The error a call of this form ends with."""
    async with connect(server.address) as channel:

        async def use() -> None:
            if form == "unary":
                await channel.unary_unary("/test.Server/unary")(b"", timeout=10)
                return
            async for message in channel.unary_stream(f"/test.Server/{form}")(b"", timeout=10):
                assert message == b"first"

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await use()
    return raised.value


FORMS = pytest.mark.parametrize("form", ["unary", "stream", "write"])


@FORMS
async def test_epd_error_keeps_class_message_field_and_hint(form: str) -> None:
    async def behavior(context: grpc.aio.ServicerContext) -> bytes:
        raise errors.Overloaded("queue is full (64)", field="priority", retry_after_seconds=1.25)

    server = await serve(behavior)
    error = await failure(server, form)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata() or ())["retry-after-ms"] == "1250"
    found = from_rpc(error)
    assert type(found) is errors.Overloaded
    assert (found.message, found.field, found.retry_after_seconds) == ("queue is full (64)", "priority", 1.25)
    await server.stop()


@FORMS
async def test_unknown_exception_is_internal_and_leaks_nothing(form: str, caplog: pytest.LogCaptureFixture) -> None:
    async def behavior(context: grpc.aio.ServicerContext) -> bytes:
        raise ValueError(SECRET)

    server = await serve(behavior)
    error = await failure(server, form)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert SECRET not in repr(error)
    assert from_rpc(error).reason == "INTERNAL"
    record = next(record for record in caplog.records if record.name == "common.rpc.interceptor")
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert SECRET not in record.getMessage()
    await server.stop()


@FORMS
async def test_abort_passes_unchanged(form: str) -> None:
    async def behavior(context: grpc.aio.ServicerContext) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine", (("key", "value"),))
        raise AssertionError

    server = await serve(behavior)
    error = await failure(server, form)
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE
    assert error.details() == "mine"
    assert dict(error.trailing_metadata() or ())["key"] == "value"
    await server.stop()


@FORMS
async def test_inner_call_cancelled_by_the_handler_is_answered(form: str) -> None:
    async def behavior(context: grpc.aio.ServicerContext) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        future.cancel()
        return await future

    server = await serve(behavior)
    error = await failure(server, form)
    assert error.code() is grpc.StatusCode.CANCELLED
    assert type(from_rpc(error)) is errors.Cancelled
    await server.stop()


async def test_error_of_a_peer_goes_on_to_the_caller() -> None:
    async def leaf(context: grpc.aio.ServicerContext) -> bytes:
        raise errors.Draining("worker is draining")

    leaf_server = await serve(leaf)
    channel = connect(leaf_server.address)

    async def middle(context: grpc.aio.ServicerContext) -> bytes:
        return await channel.unary_unary("/test.Server/unary")(b"")

    server = await serve(middle)
    assert type(from_rpc(await failure(server, "unary"))) is errors.Draining
    await channel.close()
    await server.stop()
    await leaf_server.stop()


@pytest.mark.parametrize("kind", sorted(errors.by_reason().values(), key=lambda kind: kind.__name__))
async def test_every_error_survives_the_wire(kind: type[errors.EpdError]) -> None:
    async def behavior(context: grpc.aio.ServicerContext) -> bytes:
        raise kind("what happened")

    server = await serve(behavior)
    found = from_rpc(await failure(server, "unary"))
    assert type(found) is kind
    assert found.message == "what happened"
    await server.stop()


async def test_nobody_there_is_unavailable() -> None:
    server = await serve(lambda context: asyncio.sleep(0, b""))
    await server.stop()
    assert type(from_rpc(await failure(server, "unary"))) is errors.Unavailable


async def test_taken_port_is_named() -> None:
    server = await serve(lambda context: asyncio.sleep(0, b""))
    second = make_server()
    with pytest.raises(errors.AddressTaken, match=str(server.port)):
        await second.start(server.address)
    await server.stop()


async def test_health_per_service_and_overall() -> None:
    server = await serve(lambda context: asyncio.sleep(0, b""))
    async with connect(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> str:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

        assert [await status("test.Server"), await status("")] == ["NOT_SERVING", "NOT_SERVING"]
        await server.set_serving(True)
        assert [await status("test.Server"), await status("")] == ["SERVING", "SERVING"]
        await server.set_serving(False, "test.Server")
        assert [await status("test.Server"), await status("")] == ["NOT_SERVING", "SERVING"]
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await status("no.such.Service")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop()


async def test_reflection_lists_services_and_trace_service_answers() -> None:
    store = SpanStore()
    owner = telemetry.setup("worker", store=store)
    server = make_server(telemetry=owner)
    server.add(trace_pb2_grpc.add_TraceServiceServicer_to_server, TraceService(store), SERVICE)
    await server.start("127.0.0.1:0")
    with owner.start_span("root", attributes={telemetry.REQUEST_ID: "mine"}):
        trace_id, span_id = telemetry.current_trace_ids()
    async with connect(server.address) as channel:
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")

        answers = [answer async for answer in reflection.ServerReflectionInfo(ask())]
        names = {service.name for service in answers[0].list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names

        stub = trace_pb2_grpc.TraceServiceStub(channel)
        for request in [{"trace_id": trace_id}, {"request_id": "mine"}]:
            spans = (await stub.GetTrace(trace_pb2.GetTraceRequest(**request))).spans
            assert [(span.span_id, span.name, span.service) for span in spans] == [(span_id, "root", "worker")]
        for request, kind in [
            ({"trace_id": "0" * 32}, errors.UnknownId),
            ({"request_id": "other"}, errors.UnknownId),
            ({"trace_id": "x"}, errors.InvalidArgument),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.GetTrace(trace_pb2.GetTraceRequest(**request))
            assert type(from_rpc(raised.value)) is kind
    await server.stop()


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a key with a certificate for `localhost` and 127.0.0.1 signed by it."""
    folder = tmp_path_factory.mktemp("tls")
    ca, ca_key, key, request, cert = (str(folder / name) for name in ("ca.pem", "ca.key", "key.pem", "req", "cert.pem"))
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test authority")
    openssl("req", *new_key, "-keyout", key, "-out", request, "-subj", "/CN=node")
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signer = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", str(extensions))
    openssl("x509", "-req", "-in", request, "-out", cert, *signer)
    return folder


async def test_mutual_tls(certificates: Path) -> None:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    both = TlsOptions(ca_file=ca, cert_file=cert, key_file=key)
    server = await serve(lambda context: asyncio.sleep(0, b"secret"), tls=both)
    async with connect(server.address, tls=both) as channel:
        assert await channel.unary_unary("/test.Server/unary")(b"", timeout=10) == b"secret"
    for wrong in (None, TlsOptions(ca_file=ca)):  # plain text; no certificate of its own
        async with connect(server.address, tls=wrong) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/test.Server/unary")(b"", timeout=10)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop()


def test_tls_options_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match="cert_file and key_file"):
        TlsOptions().server_credentials()
    with pytest.raises(errors.InvalidArgument, match=r"ca_file.*gone\.pem"):
        TlsOptions(ca_file=str(tmp_path / "gone.pem")).channel_credentials()


async def test_loop_lag_is_measured_and_exported() -> None:
    metrics = Metrics()
    lag = LoopLag(metrics)
    for number in range(100):
        lag.add(number / 1000)
    assert (lag.p50, lag.p99) == (0.05, 0.099)
    assert 'epd_loop_lag_seconds{quantile="0.99"} 0.099' in metrics.exposition().decode()

    measured = LoopLag()
    measured.start()
    async with asyncio.timeout(10):
        while not measured._lags:
            await asyncio.sleep(0.01)
    await measured.stop()
