"""What every command needs to talk to a gateway or a worker."""

import contextlib
import os
from collections.abc import AsyncIterator

import grpc

from common.errors import DeadlineExceeded, Unavailable
from common.rpc.channel import connect
from common.rpc.errors import from_rpc
from services.commands.run_dir import RunDir, default_run_dir

DEFAULT_GRPC = "127.0.0.1:50051"
DEFAULT_ETCD = "127.0.0.1:2379"


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


@contextlib.asynccontextmanager
async def dial(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel whose failures are errors of ours that say what to do."""
    async with connect(address) as channel:
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            known = from_rpc(error)
            if type(known) is Unavailable:
                raise Unavailable(
                    f"nothing answers at {address}; start a mesh with `epd up`, or name its gateway with --address"
                ) from None
            if isinstance(known, DeadlineExceeded):
                raise DeadlineExceeded(f"{address} did not answer in time; look at `epd status`") from None
            raise known from None
