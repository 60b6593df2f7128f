"""The run directory of a local mesh: logs, sockets, and which processes are running."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from common.errors import AddressTaken, InvalidArgument

_LONGEST_SOCKET_DIR = 70  # bytes; a unix socket's whole path is at most 107


class MeshState(msgspec.Struct, kw_only=True):
    """What other commands need to know of a running mesh, in state.json."""

    pid: int
    model: str
    grpc: str  # host:port
    http: str
    etcd: str
    processes: dict[str, int] = {}  # name to pid
    socket_dir: str = ""
    models_dir: str = ""
    certs: str = ""  # directory of the certificates; empty: without TLS


def default_run_dir() -> Path:
    """EPD_RUN_DIR, or .run in the working directory."""
    return Path(os.environ.get("EPD_RUN_DIR") or ".run").absolute()


class RunDir:
    """A 0700 directory. `acquire` marks it as that of a running mesh until the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.sockets = path / "sockets"
        self.certs = path / "certs"
        self._lock = -1

    def acquire(self) -> None:
        """Make it ours and empty. Raises AddressTaken when a mesh runs there, InvalidArgument when it is no good."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_uid != os.getuid():
            raise InvalidArgument(
                f"{self.path} belongs to another user; choose another with EPD_RUN_DIR", field="run_dir"
            )
        self.path.chmod(0o700)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            state = self.state()
            who = f" (pid {state.pid}, gRPC on {state.grpc})" if state else ""
            raise AddressTaken(f"a mesh already runs in {self.path}{who}; end it with `epd down`") from None
        self._lock = lock
        for stale in (self.logs, self.sockets, self.certs, self.path / "etcd"):
            shutil.rmtree(stale, ignore_errors=True)
        self.logs.mkdir(mode=0o700)
        if len(os.fsencode(self.sockets)) > _LONGEST_SOCKET_DIR:
            self.sockets = Path(tempfile.mkdtemp(prefix="epd-"))
        else:
            self.sockets.mkdir(mode=0o700)

    def running(self) -> MeshState | None:
        """The mesh that runs here, or None."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return self.state()
        finally:
            os.close(lock)
        return None

    def state(self) -> MeshState | None:
        try:
            return msgspec.json.decode((self.path / "state.json").read_bytes(), type=MeshState)
        except (OSError, msgspec.MsgspecError):
            return None

    def write_state(self, state: MeshState) -> None:
        scratch = self.path / "state.json.new"
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(state)))
        scratch.rename(self.path / "state.json")

    def release(self) -> None:
        """The mesh has ended; its logs stay."""
        with contextlib.suppress(OSError):
            (self.path / "state.json").unlink()
        shutil.rmtree(self.sockets, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
