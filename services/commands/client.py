"""What every command needs to talk to a gateway or a worker."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import AsyncIterator

import grpc

from common.errors import DeadlineExceeded, Unavailable
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from common.rpc.tls import handshake_refusal
from services.commands.run_dir import RunDir, default_run_dir
from services.commands.trust import Trust

DEFAULT_GRPC = "127.0.0.1:50051"
DEFAULT_ETCD = "127.0.0.1:2379"
NO_TRUST = Trust()  # beyond what the run directory tells
_PROBE_SECONDS = 2.0
_ADVICE = {"untrusted": " (--ca)", "name": " (--name, or another --address)"}


def gateway_address(given: str) -> str:
    """The given address, else EPD_ADDRESS, else that of the mesh in the run directory, else the default."""
    if address := given or os.environ.get("EPD_ADDRESS", ""):
        return address
    state = RunDir(default_run_dir()).running()
    return state.grpc if state else DEFAULT_GRPC


def etcd_address(given: str) -> str:
    """The given address, else EPD_ETCD, else that of the mesh in the run directory, else the default."""
    if address := given or os.environ.get("EPD_ETCD", ""):
        return address
    state = RunDir(default_run_dir()).running()
    return state.etcd if state else DEFAULT_ETCD


def credentials() -> tuple[tuple[str, str], ...]:
    """For a gateway that wants keys: EPD_API_KEY, if it is set."""
    key = os.environ.get("EPD_API_KEY", "")
    return (("authorization", f"Bearer {key}"),) if key else ()


@contextlib.asynccontextmanager
async def dial(address: str, trust: Trust = NO_TRUST) -> AsyncIterator[grpc.aio.Channel]:
    """A channel whose failures are errors of ours that say what to do."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what a handshake failed of is told below, in our words
    tls = trust.gateway(address)
    async with connect(address, tls=tls, metadata=credentials()) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            known = from_rpc(error)
            if refusal := handshake_refusal(known.message):
                raise Unavailable(f"{address} is not trusted: {refusal[1]}{_ADVICE.get(refusal[0], '')}") from None
            if type(known) is Unavailable and tls is None and await _speaks_tls(address):
                raise Unavailable(f"{address} speaks TLS: name its authority with --ca or EPD_CA") from None
            if type(known) is Unavailable:
                raise Unavailable(f"nothing answers at {address}{_what_to_do(address)}") from None
            if isinstance(known, DeadlineExceeded):
                raise DeadlineExceeded(f"{address} did not answer in time; look at `epd status`") from None
            raise known from None


def _what_to_do(address: str) -> str:
    run = RunDir(default_run_dir())
    state = run.running()
    if state is not None and state.grpc == address:
        return f": the mesh in {run.path} is starting, or its gateway is; its logs are in {run.logs}"
    return "; start a mesh with `epd up`, or name its gateway with --address"


async def _speaks_tls(address: str) -> bool:
    """Whether a handshake gets an answer there, whatever certificate it shows."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.close()
            return True
    return False
