"""What was checked, as a table."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.compose.command import CommandFailed


@dataclass(frozen=True)
class Line:
    what: str
    result: str  # ok, FAILED, not checked
    seconds: float
    detail: str


class NotChecked(Exception):
    """Something that this machine lacks was needed; says what."""


class Report:
    """Goes on after a failure: what else works says where to look."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    @property
    def failed(self) -> bool:
        return any(line.result == "FAILED" for line in self.lines)

    async def check(self, what: str, checking: Callable[[], Awaitable[str]]) -> None:
        """checking returns what was seen; raises AssertionError, or what else a check meets."""
        started = time.monotonic()
        try:
            result, detail = "ok", await checking()
        except NotChecked as lacking:
            result, detail = "not checked", str(lacking)
        except (AssertionError, CommandFailed, Exception) as error:
            result, detail = "FAILED", f"{type(error).__name__}: {error}"
        line = Line(what, result, time.monotonic() - started, detail)
        self.lines.append(line)
        print(f"{line.result:>11}  {line.what}: {line.detail}", flush=True)

    def table(self) -> str:
        width = max(len(line.what) for line in self.lines)
        rows = [f"{'checked':<{width}}  {'result':<11}  {'s':>5}  seen"]
        for line in self.lines:
            seen = line.detail.splitlines()[0] if line.detail else ""
            rows.append(f"{line.what:<{width}}  {line.result:<11}  {line.seconds:>5.0f}  {seen}")
        counts = {result: sum(line.result == result for line in self.lines) for result in ("ok", "FAILED")}
        return "\n".join([*rows, "", f"{counts['ok']} passed, {counts['FAILED']} failed"])
