"""`epd status` and `epd trace`: looking into a running mesh."""

import asyncio
import re
from pathlib import Path

import grpc
from rich.markup import escape

from common.errors import Unavailable, UnknownId
from common.registry.record import WorkerRecord
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from common.rpc.tls import TlsOptions, handshake_refusal
from epd.v1 import generation_pb2, generation_pb2_grpc, trace_pb2, trace_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.commands.client import NO_TRUST, dial, gateway_address
from services.commands.render import make_console, status_table, waterfall
from services.commands.trace_svg import write_svg
from services.commands.trust import Trust
from services.commands.workers import registered_workers

_TIMEOUT_SECONDS = 5.0


async def status(address: str, etcd: str, trust: Trust = NO_TRUST) -> None:
    """Models of the gateway, then every registered worker's own report.

    Raises Unavailable without a gateway, and when there is neither an etcd nor a model to tell of.
    """
    console = make_console()
    gateway = gateway_address(address)
    async with dial(gateway, trust) as channel:
        models = await generation_pb2_grpc.GenerationServiceStub(channel).ListModels(
            generation_pb2.ListModelsRequest(), timeout=_TIMEOUT_SECONDS
        )
    console.print(f"gateway {gateway}")
    for model in models.models:
        console.print(
            f"  {model.id}{_behind(model)} {model.dtype}, context {model.max_context_tokens}: "
            f"{f'{model.encode_workers} encode, ' if model.images else ''}{model.prefill_workers} prefill, "
            f"{model.decode_workers} decode"
        )
    for away in models.away:
        what = f"cannot pull from {away.owner}" if away.owner else "gets no requests"
        console.print(f"  [yellow]{escape(away.worker_id)} {escape(what)}: {away.why}[/yellow]", highlight=False)
    try:
        records = await registered_workers(etcd, trust)
    except Unavailable as error:
        if not models.models:
            raise
        console.print(
            f"[yellow]no more without etcd: {escape(error.message)}; name one with --etcd or EPD_ETCD[/yellow]",
            highlight=False,
        )
        return
    reports = await asyncio.gather(*(_worker_status(record, trust.worker()) for record in records))
    console.print(status_table([(record.worker_id, report) for record, report in zip(records, reports, strict=True)]))


def _behind(model: generation_pb2.Model) -> str:
    if model.parent:
        return f" (adapter on {model.parent})"
    return "" if model.root in ("", model.id) else f" (another name of {model.root})"


async def _worker_status(record: WorkerRecord, tls: TlsOptions | None) -> worker_pb2.GetStatusResponse | str:
    async with connect(record.address, record.worker_id, tls=tls) as channel:
        try:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            answer: worker_pb2.GetStatusResponse = await stub.GetStatus(
                worker_pb2.GetStatusRequest(), timeout=_TIMEOUT_SECONDS
            )
            return answer
        except grpc.aio.AioRpcError as error:
            known = from_rpc(error)
            refusal = handshake_refusal(known.message)
            return f"{known.reason} at {record.address}{f': {refusal[1]}' if refusal else ''}"


async def trace(address: str, identifier: str, trust: Trust = NO_TRUST, picture: Path | None = None) -> None:
    """A waterfall of the spans that the mesh's processes still remember. picture: an SVG file to draw it into."""
    by_trace = re.fullmatch(r"[0-9a-f]{32}", identifier.lower()) is not None
    request = (
        trace_pb2.GetTraceRequest(trace_id=identifier.lower())
        if by_trace
        else trace_pb2.GetTraceRequest(request_id=identifier)
    )
    async with dial(gateway_address(address), trust) as channel:
        answer = await trace_pb2_grpc.TraceServiceStub(channel).GetTrace(request, timeout=_TIMEOUT_SECONDS)
    if not answer.spans:
        raise UnknownId(
            f"no span of {identifier} is remembered; every process keeps the most recent ones only, and unsampled "
            "requests have none"
        )
    console = make_console()
    console.print(waterfall(answer.spans, console.width))
    if picture is not None:
        write_svg(answer.spans, picture)
