"""uvicorn on the event loop that is already running, on a socket of ours, without its signal handlers."""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from common.errors import AddressTaken, InvalidArgument
from common.metrics import Metrics
from common.rpc.tls import TlsOptions

_BACKLOG = 1024
_PORT = re.compile("[0-9]{1,5}")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    def __init__(self, app: Any, tls: TlsOptions | None = None) -> None:
        # The last client to go is waited for by `stop`, not by uvicorn.
        self._config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=30,
            ws="none",
            **(tls.uvicorn_options() if tls is not None else {}),
        )
        self._server = _Server(self._config)
        self._task: asyncio.Task[None] | None = None
        self.address = ""

    async def start(self, bind: str) -> None:
        """Listens on host:port (port 0: a free one). Raises AddressTaken or InvalidArgument naming the address."""
        host, port = host_and_port(bind, "http_bind")
        listener = _listen(host.strip("[]"), port, bind)
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    async def stop(self, grace_seconds: float) -> None:
        """Takes no new connections; requests that still run after the grace time are broken off."""
        if self._task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait((self._task,), timeout=grace_seconds)
        if not done:
            self._server.force_exit = True
            await asyncio.wait((self._task,), timeout=grace_seconds)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def host_and_port(bind: str, field: str) -> tuple[str, int]:
    """Raises InvalidArgument naming the setting."""
    host, _, port = bind.rpartition(":")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise InvalidArgument(f"{bind!r} is not host:port", field=field)
    return host, int(port)


def serve_metrics(metrics: Metrics, bind: str, **tls: Any) -> tuple[str, Callable[[], None]]:
    """/metrics at an address of its own, from a thread: the address, and what ends it. tls: see Metrics.serve.

    Raises AddressTaken or InvalidArgument naming the address.
    """
    host, port = host_and_port(bind, "metrics_bind")
    try:
        server, _ = metrics.serve(host.strip("[]"), port, **tls)
    except OSError as error:
        raise AddressTaken(f"cannot listen on {bind}: {error.strerror}") from None

    def close() -> None:
        server.shutdown()
        server.server_close()

    return f"{host}:{server.server_port}", close


def _listen(host: str, port: int, bind: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise AddressTaken(f"cannot listen on {bind}: {error.strerror}") from None
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
