"""What every answer must be, whatever was sent: a status of common/errors.py, in words that give nothing away."""

import logging
import re
from collections.abc import Sequence

import grpc

from common.errors import by_reason

MOST_CHARACTERS = 2_000  # of an error's message: it says what is wrong, and never sends back what came
# gRPC's own: no such method, a message larger than allowed, a call cancelled or out of time.
TRANSPORT = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
_KNOWN = by_reason()
# An engine or a worker that broke is a fault even where its status is documented.
_BROKEN = frozenset({"INTERNAL", "ENGINE_FAILED"})
_WORDS = re.compile(
    r"Traceback|File \"|\.py\b|<class|<function|object at 0x|site-packages|_pb2|[a-z]Error\b|Exception\b"
    r"|\(most recent call last\)|/home/|/work/|/usr/|/proc/|NoneType|not subscriptable|positional argument"
)


class Fault(AssertionError):
    """An answer that must not be."""


def check_words(text: str) -> None:
    """Raises Fault for what looks like the inside of a program."""
    if found := _WORDS.search(text):
        raise Fault(f"{found[0]!r} is in a message: {text[:400]!r}")
    if len(text) > MOST_CHARACTERS:
        raise Fault(f"a message of {len(text)} characters: {text[:200]!r}…")


def check_rpc(
    code: grpc.StatusCode, reason: str, details: str, extra: Sequence[tuple[grpc.StatusCode, str]] = ()
) -> None:
    """extra: further (status, reason) that a foreign service, such as health, answers with."""
    check_words(details)
    if code is grpc.StatusCode.OK or (code, reason) in extra:
        return
    if not reason and code in TRANSPORT:
        return
    kind = _KNOWN.get(reason)
    if kind is None or kind.status is not code or reason in _BROKEN:
        raise Fault(f"{code.name} with reason {reason!r}: {details[:300]!r}")


def http_statuses() -> frozenset[int]:
    """That a request may be answered with; 404, 405, 413 and 415 are HTTP's own."""
    return frozenset({200, 404, 405, 413, 415, *(kind.http for kind in _KNOWN.values())}) - {500}


class Logged(logging.Handler):
    """Collects what services log as an error, which bad input alone must never make them do.

    Not gRPC's word that a peer's answer could not be parsed; and `but`: names of further loggers.
    """

    def __init__(self, *but: str) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self._but = ("grpc._common", *but)

    def emit(self, record: logging.LogRecord) -> None:
        if record.name in self._but:
            return
        raised = record.exc_info[0] if record.exc_info else None
        kind = f" ({raised.__name__})" if raised else ""
        text = logging.Formatter().format(record)
        self.found.append(f"{record.name}: {record.getMessage()[:200]}{kind}\n{text[-1500:]}")

    def check(self) -> None:
        """Raises Fault with the first, and forgets all."""
        found, self.found = self.found, []
        if found:
            raise Fault(f"{len(found)} errors were logged, the first: {found[0]}")
