"""Logging of every service: readable on a terminal, one JSON object a line elsewhere, with the trace's ids.

Prompts and outputs never reach a log: messages are ours, and of foreign exceptions only the type and the stack are
written, for their text may quote what they choked on.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TextIO

from common.errors import EpdError, InvalidArgument

# At DEBUG libraries tell what they work on: HTTP clients headers and addresses. Pillow is quieted in common/media.
_QUIET = (
    *("grpc", "etcd3aio", "opentelemetry", "urllib3", "httpx", "httpcore", "filelock", "transformers"),
    *("uvicorn", "multipart", "torch"),
)
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_LEVEL_COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "1;31", "DEBUG": "2"}


def setup_logging(
    service: str, *, level: str | None = None, as_json: bool | None = None, stream: TextIO | None = None
) -> None:
    """Replaces the root logger's handlers. level None: by EPD_LOG_LEVEL, else INFO. as_json None: by EPD_LOG_FORMAT,
    json or pretty, else JSON unless the stream (default stderr) is a terminal. Raises InvalidArgument for variables
    that say anything else.

    What nobody catches is logged too, as everything is, instead of being printed with its text.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    if as_json is None:
        wanted = _variable("EPD_LOG_FORMAT", ("JSON", "PRETTY"))
        as_json = wanted == "JSON" if wanted else not stream.isatty()
    handler.setFormatter(JsonFormatter(service) if as_json else PrettyFormatter(service, colours=stream.isatty()))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel((level or _variable("EPD_LOG_LEVEL", _LEVELS) or "INFO").upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.root.level))
    sys.excepthook = _uncaught
    threading.excepthook = lambda found: _uncaught(found.exc_type, found.exc_value, found.exc_traceback)


def _variable(name: str, values: tuple[str, ...]) -> str:
    found = os.environ.get(name, "").upper()
    if found and found not in values:
        raise InvalidArgument(f"{name} must be one of {', '.join(values)}", field=name)
    return found


def _uncaught(kind: type[BaseException], error: BaseException | None, stack: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    found = error if error is not None else kind()
    logging.getLogger(__name__).critical("not caught: %s", kind.__name__, exc_info=(kind, found, stack))


def _trace_ids() -> tuple[str, str]:
    """Of the current span. Engines have no telemetry, and need not load it for their logs."""
    found = sys.modules.get("common.telemetry")
    return found.current_trace_ids() if found else ("", "")


def safe_message(record: logging.LogRecord) -> str:
    """asyncio puts an exception's repr into the later lines of its messages."""
    message = record.getMessage()
    return message.partition("\n")[0] if record.name == "asyncio" else message


def safe_traceback(error: BaseException) -> str:
    """Stack and type of an exception and its causes; the text only where it is our own, or the system's."""
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        text = f": {link}" if isinstance(link, EpdError | OSError) else ""
        stack = "".join(traceback.format_tb(link.__traceback__))
        parts.append(f"Traceback (most recent call last):\n{stack}{type(link).__qualname__}{text}")
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return "\n\nand then\n\n".join(reversed(parts))


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        trace_id, span_id = _trace_ids()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": safe_message(record),
        }
        if trace_id:
            line |= {"trace_id": trace_id, "span_id": span_id}
        if record.exc_info and record.exc_info[1]:
            line["exception"] = safe_traceback(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False)


class PrettyFormatter(logging.Formatter):
    def __init__(self, service: str, *, colours: bool) -> None:
        super().__init__()
        self._service = service
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        trace_id, _ = _trace_ids()
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname:<7}"
        if self._colours and record.levelname in _LEVEL_COLOURS:
            level = f"\x1b[{_LEVEL_COLOURS[record.levelname]}m{level}\x1b[0m"
        line = f"{stamp}.{int(record.msecs):03d} {level} {self._service} {safe_message(record)}"
        if trace_id:
            line += f" [trace {trace_id}]"
        if record.exc_info and record.exc_info[1]:
            line += "\n" + safe_traceback(record.exc_info[1])
        return line
