"""Errors over the wire: a status, with reason, field and retry hint in the trailing metadata."""

import asyncio
import math
from collections.abc import Iterable

import grpc

from common import errors
from common.errors import EpdError

REASON_KEY = "epd-reason"
FIELD_KEY = "epd-field"
RETRY_AFTER_KEY = "retry-after-ms"
PEER_KEY = "epd-peer"

_BY_REASON = errors.by_reason()
# For statuses without a reason: those of gRPC itself and of foreign servers.
_BY_STATUS: dict[grpc.StatusCode, type[EpdError]] = {
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.NOT_FOUND: errors.UnknownId,
    grpc.StatusCode.ALREADY_EXISTS: errors.DuplicateRequest,
    grpc.StatusCode.ABORTED: errors.Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
}


def to_metadata(error: EpdError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of an error's status. A field may be a name that the caller made up: what gRPC does not take in
    a header, it would drop with a line in the log."""
    found = [(REASON_KEY, error.reason)]
    if field := _header(error.field):
        found.append((FIELD_KEY, field))
    if error.retry_after_seconds is not None:
        found.append((RETRY_AFTER_KEY, str(max(0, math.ceil(error.retry_after_seconds * 1000 - 1e-6)))))
    if peer := _header(error.peer):
        found.append((PEER_KEY, peer))
    return tuple(found)


def _header(text: str) -> str:
    """Printable ASCII, "?" for anything else, without spaces around it."""
    return "".join(each if " " <= each <= "~" else "?" for each in text).strip()


def from_rpc(error: grpc.aio.AioRpcError) -> EpdError:
    """The error a peer raised, by its reason, else by the status alone."""
    metadata = _as_dict(error.trailing_metadata() or ())
    kind = _BY_REASON.get(metadata.get(REASON_KEY, "")) or _BY_STATUS.get(error.code(), EpdError)
    millis = metadata.get(RETRY_AFTER_KEY, "")
    return kind(
        error.details() or error.code().name,
        field=metadata.get(FIELD_KEY, ""),
        retry_after_seconds=int(millis) / 1000 if millis.isdecimal() else None,
        peer=metadata.get(PEER_KEY, ""),
    )


def reason_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The reason in a call's trailing metadata, or an empty string."""
    return _as_dict(metadata).get(REASON_KEY, "")


def from_exception(error: BaseException, *, out_of_time: bool = False) -> EpdError | None:
    """The error to answer a caller with; None for what is not ours to explain (it becomes INTERNAL without a word)."""
    if isinstance(error, EpdError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc(error)
    if isinstance(error, asyncio.CancelledError):
        return errors.Cancelled("a call made for this request was cancelled")
    if isinstance(error, TimeoutError) and out_of_time:
        return errors.DeadlineExceeded("the request's time is over")
    return None


def _as_dict(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}
