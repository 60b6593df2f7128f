"""Raw gRPC calls: any bytes to any method, any number of messages, left at any time."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
from grpc._cython import cygrpc

from common.rpc.errors import reason_of

CALL_SECONDS = 4.0  # the deadline of every call
SLACK_SECONDS = 20.0  # over it, on a machine that does other things too
# What writing to a call that has just ended raises; its status is lost on the way then, and _OURS is there instead.
_TOO_LATE = (asyncio.InvalidStateError, grpc.aio.AioRpcError, cygrpc.ExecuteBatchError)
_OURS = "Internal error from Core"


@dataclass
class Outcome:
    code: grpc.StatusCode
    reason: str
    details: str
    answers: list[bytes] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.reason or self.code.name


def open_channel(address: str) -> grpc.aio.Channel:
    options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
    return grpc.aio.insecure_channel(address, options=(*options, ("grpc.use_local_subchannel_pool", 1)))


async def call(
    channel: grpc.aio.Channel,
    method: str,
    messages: Sequence[bytes],
    *,
    metadata: Sequence[tuple[str, str | bytes]] = (),
    leave_after: int | None = None,
    timeout: float = CALL_SECONDS,
) -> Outcome:
    """Sends the messages, whatever kind the method is, and reads to the end; `leave_after` answers it is cancelled."""
    kinds = {"request_serializer": None, "response_deserializer": None}
    if single := len(messages) == 1:  # in one piece, so that no answer can come before it is sent
        running = channel.unary_stream(method, **kinds)(messages[0], metadata=tuple(metadata), timeout=timeout)
    else:
        running = channel.stream_stream(method, **kinds)(metadata=tuple(metadata), timeout=timeout)
    answers: list[bytes] = []
    try:
        async with asyncio.timeout(timeout + SLACK_SECONDS):
            if not single:
                with contextlib.suppress(*_TOO_LATE):
                    for message in messages:
                        await running.write(message)
                    await running.done_writing()
            while leave_after is None or len(answers) < leave_after:
                answer = await running.read()
                if answer is grpc.aio.EOF:
                    break
                answers.append(answer)
            else:
                running.cancel()
            code = await running.code()
            reason, details = reason_of(await running.trailing_metadata() or ()), await running.details() or ""
            return _outcome(code, reason, details, answers)
    except grpc.aio.AioRpcError as error:
        return _outcome(error.code(), reason_of(error.trailing_metadata() or ()), error.details() or "", answers)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return Outcome(grpc.StatusCode.CANCELLED, "", "", answers)
    finally:
        running.cancel()


def _outcome(code: grpc.StatusCode, reason: str, details: str, answers: list[bytes]) -> Outcome:
    if code is grpc.StatusCode.INTERNAL and details == _OURS:
        return Outcome(grpc.StatusCode.CANCELLED, "", "", answers)
    return Outcome(code, reason, details, answers)
