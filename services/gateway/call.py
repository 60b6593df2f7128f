"""One streaming call to one worker: accepted in time, never silent for too long, cancelled when it is let go."""

import asyncio
from typing import Any

import grpc

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    EpdError,
    NotReady,
    Preempted,
    TransferFailed,
    Unavailable,
    WorkerLost,
    WrongIncarnation,
)
from common.rpc import deadline
from common.rpc.errors import from_rpc, reason_of
from services.gateway.worker import Worker

# Without a reason of ours these come from the transport: the peer, or the way to it, is gone.
_TRANSPORT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)
_NO_TIME_SECONDS = 0.05
# What a failure says about the worker itself, by class; others are about the request, or the worker's load.
_TELLING = (WorkerLost, EngineFailed)
_UNEXPLAINED = (EpdError, Unavailable)


class CallFailed(Exception):
    """A call to a worker failed. `exclude`: this worker should not be asked again for this request."""

    def __init__(self, error: EpdError, worker: Worker, *, exclude: bool = True) -> None:
        super().__init__(error.message)
        self.error = error
        self.worker = worker
        self.exclude = exclude


class WorkerCall:
    """Wraps a unary-stream call; `read` raises CallFailed, and has marked the worker down when nobody answers there."""

    def __init__(self, worker: Worker, call: Any, *, first_byte_seconds: float, stall_seconds: float) -> None:
        self._worker = worker
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._limit = first_byte_seconds
        self._stall_seconds = stall_seconds
        self._reading_since: float | None = None
        self._began = self._loop.time()
        self._hurried = False  # its work is done, so it proves nothing any more
        self._expired = ""  # why it was ended here
        self._patient = False  # silence counts only while the worker as a whole is silent, too
        # One lazy timer a call: a message only notes its time.
        self._timer = self._loop.call_later(first_byte_seconds, self._check)
        worker.on_stuck.add(self._give_up)

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        self._reading_since = self._loop.time()
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._failed(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task was cancelled but the call: a task group would take that for a quiet end.
            if not self._expired:
                raise self.lost("left in mid-stream") from None
            if not self._hurried:
                self._worker.call_failed(self._began)
            raise self.lost(self._expired) from None
        self._reading_since = None
        if self._limit != self._stall_seconds:
            self._limit = self._stall_seconds
            self._patient = True
        return message

    def worked(self) -> None:
        """The worker has done what it is asked for."""
        self._worker.call_worked(self._began)

    def alive(self) -> None:
        """The worker has shown progress on this call by another way."""
        if self._reading_since is not None:
            self._reading_since = self._loop.time()

    def abort(self) -> None:
        """`read` raises CallFailed."""
        self._call.cancel()

    def hurry(self, seconds: float) -> None:
        """From now on the next message is waited for no longer than this."""
        self._limit = self._stall_seconds = seconds
        self._patient = False
        self._hurried = True
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._check)

    def lost(self, what: str) -> CallFailed:
        return CallFailed(WorkerLost(f"{self._worker.worker_id} {what}"), self._worker)

    def close(self) -> None:
        self._worker.on_stuck.discard(self._give_up)
        self._timer.cancel()
        self._call.cancel()

    def _give_up(self) -> None:
        if self._reading_since is not None:
            self._expired = "shows no sign of life"
            self._call.cancel()

    def _check(self) -> None:
        now, since = self._loop.time(), self._reading_since
        if since is not None and self._patient:
            since = max(since, self._worker.heard_at)  # it computes for others: this call waits its turn
        left = self._limit if since is None else since + self._limit - now
        if left <= 0:
            self._expired = "did not answer in time"
            self._call.cancel()
        else:
            self._timer = self._loop.call_later(left, self._check)

    def _failed(self, error: grpc.aio.AioRpcError) -> CallFailed:
        worker = self._worker
        if error.code() in _TRANSPORT and not reason_of(error.trailing_metadata() or ()):
            worker.mark_down(error.code().name)
            worker.call_failed(self._began)
            return CallFailed(WorkerLost(f"{worker.worker_id} is gone"), worker)
        found = from_rpc(error)
        if isinstance(found, WrongIncarnation):
            worker.mark_gone()
        elif isinstance(found, Draining):
            worker.mark_draining()
        elif isinstance(found, Cancelled):  # not by us, or nobody would read here
            found = WorkerLost(f"{worker.worker_id} cancelled the call")
        elif isinstance(found, DeadlineExceeded) and (deadline.remaining() or 0.0) > _NO_TIME_SECONDS:
            found = WorkerLost(f"{worker.worker_id} ran out of its own time")
        if isinstance(found, _TELLING) or type(found) in _UNEXPLAINED:
            worker.call_failed(self._began)
        # Preempted, TransferFailed, NotReady say nothing against asking the same worker again.
        return CallFailed(found, worker, exclude=not isinstance(found, Preempted | TransferFailed | NotReady))
