"""Every error a caller can see: one tree, each with its gRPC status, HTTP code and machine-readable reason."""

import grpc

MAX_MESSAGE_CHARACTERS = 1000
MAX_FIELD_CHARACTERS = 128


class EpdError(Exception):
    """Base of all errors that cross a process boundary.

    `message` is shown to callers, so it never holds prompts, outputs, token ids or keys.
    `field` names the offending input; `retry_after_seconds` is a hint for retryable ones; `peer` is the worker that
    the one that raised it could not pull from. Message and field are cut to a length that every transport takes, for
    they may name what a caller sent (a model, an unknown parameter).
    """

    status = grpc.StatusCode.INTERNAL
    http = 500
    reason = "INTERNAL"
    retryable = False  # another worker, or the same one later, may succeed

    def __init__(
        self, message: str, *, field: str = "", retry_after_seconds: float | None = None, peer: str = ""
    ) -> None:
        self.message = _cut(message, MAX_MESSAGE_CHARACTERS)
        super().__init__(self.message)
        self.field = _cut(field, MAX_FIELD_CHARACTERS)
        self.retry_after_seconds = retry_after_seconds
        self.peer = peer


class InvalidArgument(EpdError):
    """The client's fault; the message names the field and its limits."""

    status, http, reason = grpc.StatusCode.INVALID_ARGUMENT, 400, "INVALID_ARGUMENT"


class ContextTooLong(InvalidArgument):
    reason = "CONTEXT_TOO_LONG"


class NeverFits(InvalidArgument):
    """The request can never fit the pool it is meant for."""

    reason = "NEVER_FITS"


class ModelNotFound(EpdError):
    status, http, reason = grpc.StatusCode.NOT_FOUND, 404, "MODEL_NOT_FOUND"


class UnknownId(EpdError):
    """No such request, trace or transfer."""

    status, http, reason = grpc.StatusCode.NOT_FOUND, 404, "UNKNOWN_ID"


class DuplicateRequest(EpdError):
    status, http, reason = grpc.StatusCode.ALREADY_EXISTS, 409, "DUPLICATE_REQUEST"


class Overloaded(EpdError):
    """A bounded queue is full."""

    status, http, reason, retryable = grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "OVERLOADED", True


class RateLimited(EpdError):
    """A tenant's limit is used up; the message names it, the hint says when there is room again."""

    status, http, reason, retryable = grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "RATE_LIMITED", True


class Unauthenticated(EpdError):
    """No key, or one that is not known (any more)."""

    status, http, reason = grpc.StatusCode.UNAUTHENTICATED, 401, "UNAUTHENTICATED"


class PermissionDenied(EpdError):
    """The caller is known and may not do this."""

    status, http, reason = grpc.StatusCode.PERMISSION_DENIED, 403, "PERMISSION_DENIED"


class Unavailable(EpdError):
    """A peer is gone or not there yet; another try may succeed."""

    status, http, reason, retryable = grpc.StatusCode.UNAVAILABLE, 503, "UNAVAILABLE", True


class NoWorkers(Unavailable):
    reason = "NO_WORKERS"


class Draining(Unavailable):
    reason = "DRAINING"


class WrongIncarnation(Unavailable):
    """The call was meant for an earlier life of this worker."""

    reason = "WRONG_INCARNATION"


class WorkerLost(Unavailable):
    """A worker died or hung and no other could take over in time."""

    reason = "WORKER_LOST"


class Preempted(EpdError):
    """The worker gave up the sequence for want of blocks; the gateway resumes it."""

    status, http, reason, retryable = grpc.StatusCode.ABORTED, 503, "PREEMPTED", True


class TransferFailed(EpdError):
    """A pull was refused, broken off or failed its checks; the tensor must be made again."""

    status, http, reason, retryable = grpc.StatusCode.ABORTED, 503, "TRANSFER_FAILED", True


class TransferRefused(TransferFailed):
    """Wrong ticket, request, attempt or incarnation, or a used ticket."""

    status, http, reason = grpc.StatusCode.PERMISSION_DENIED, 403, "TRANSFER_REFUSED"


class LayoutMismatch(EpdError):
    """Two pools that cannot exchange blocks; the message names both layouts."""

    status, http, reason = grpc.StatusCode.FAILED_PRECONDITION, 500, "LAYOUT_MISMATCH"


class NotReady(EpdError):
    """Not published yet."""

    status, http, reason, retryable = grpc.StatusCode.FAILED_PRECONDITION, 503, "NOT_READY", True


class EmbeddingMissing(NotReady):
    """An encode worker was asked for an embedding that it does not have (any more); send the image again."""

    reason = "EMBEDDING_MISSING"


class DeadlineExceeded(EpdError):
    status, http, reason = grpc.StatusCode.DEADLINE_EXCEEDED, 504, "DEADLINE_EXCEEDED"


class Cancelled(EpdError):
    status, http, reason = grpc.StatusCode.CANCELLED, 499, "CANCELLED"


class AddressTaken(EpdError):
    """A server cannot listen where it was told to."""

    status, http, reason = grpc.StatusCode.FAILED_PRECONDITION, 500, "ADDRESS_TAKEN"


class RegistryRefused(EpdError):
    """etcd answered, and said no: wrong user, password or rights."""

    status, http, reason = grpc.StatusCode.FAILED_PRECONDITION, 500, "REGISTRY_REFUSED"


class EngineFailed(EpdError):
    """The engine broke; its worker restarts it."""

    reason, retryable = "ENGINE_FAILED", True


class FetchFailed(EpdError):
    """A model could not be fetched or converted; the message says what to do."""

    reason = "FETCH_FAILED"


class ChildFailed(EpdError):
    """A process of a local mesh refuses to start, or has failed too often."""

    reason = "CHILD_FAILED"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def by_reason() -> dict[str, type[EpdError]]:
    """Every error class by its reason."""
    found: dict[str, type[EpdError]] = {}
    todo: list[type[EpdError]] = [EpdError]
    while todo:
        cls = todo.pop()
        found.setdefault(cls.reason, cls)
        todo.extend(cls.__subclasses__())
    return found
