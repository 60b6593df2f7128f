"""`epd up --detach` and `epd down`."""

import os
import signal
import subprocess
import sys

from common.errors import ChildFailed, EpdError
from common.process import readable
from services.commands.run_dir import RunDir, default_run_dir


def up_detached(arguments: list[str]) -> None:
    """Start `epd up` with these arguments in the background and return once it can be used. Raises ChildFailed."""
    run = RunDir(default_run_dir())
    if (state := run.running()) is not None:
        raise ChildFailed(f"a mesh already runs in {run.path} (pid {state.pid}); end it with `epd down`")
    run.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = run.path / "up.log"
    reading, writing = os.pipe()
    command = [sys.executable, "-P", "-m", "services.cli", "up", *arguments, "--ready-fd", str(writing)]
    with log.open("wb") as out, os.fdopen(reading, "rb") as ready:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, pass_fds=[writing]
        )
        os.close(writing)
        print(f"starting; what happens meanwhile is told in {log}", flush=True)
        if not ready.readline():  # its end: the process is gone
            process.wait()
            raise ChildFailed(f"the mesh did not start:\n{log.read_text(errors='replace').strip()}")
    print(log.read_text(errors="replace").strip())
    print(f"running in the background, pid {process.pid}; end it with `epd down`")


def down(seconds: float = 60.0) -> None:
    """End the mesh of the run directory; one that does not end in time is killed."""
    run = RunDir(default_run_dir())
    state = run.running()
    if state is None:
        print(f"no mesh runs in {run.path}")
        return
    try:
        descriptor = os.pidfd_open(state.pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor):
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not _ended(descriptor, seconds):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)  # its children end with it
            _ended(descriptor, 5)
            raise EpdError(f"pid {state.pid} did not end within {seconds:.0f} s and was killed")
    print(f"ended pid {state.pid}")


def _ended(descriptor: int, seconds: float) -> bool:
    return bool(readable((descriptor,), seconds))
