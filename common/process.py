"""Life of child processes on Linux, and their waiting."""

import ctypes
import math
import os
import select
import signal
from collections.abc import Iterable
from typing import Protocol

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "EPD_PARENT_PID"


def end_with_parent() -> None:
    """In a child started with EPD_PARENT_PID: be killed when that parent dies, however it dies. Survives exec.

    The kernel ties this to the parent's thread that started the child, so children are started from a main thread.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != int(parent):  # it died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(sources: Iterable[int | _HasFileno], timeout: float | None) -> set[int]:
    """Descriptors among them that can be read, waited for up to `timeout` seconds (None: for ever).

    Not by select.select, which knows descriptors below 1024 only.
    """
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    milliseconds = None if timeout is None else math.ceil(max(0.0, timeout) * 1000)
    return {descriptor for descriptor, _ in poll.poll(milliseconds)}
