"""Bars, tables and the tree of spans."""

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epd.v1 import generation_pb2, trace_pb2, types_pb2, worker_pb2
from services.commands.render import bar, hops_table, milliseconds, status_table, tree_order, waterfall


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("start", "length", "drawn"),
    [
        (0, 1, "████"),
        (0, 0.5, "██"),
        (0.5, 0.5, "  ██"),
        (0, 0, "▏"),
        (1, 0, "   ▐"),
        (0.25, 0.5, " ██"),
        (0, 0.28125, "█▏"),
    ],
)
def test_bar(start: float, length: float, drawn: str) -> None:
    assert bar(start, length, 4) == drawn


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, "0.00"), (0.00123, "1.23"), (0.0456, "45.6"), (1.2345, "1,234")])
def test_milliseconds(seconds: float, shown: str) -> None:
    assert milliseconds(seconds) == shown


def test_hops_say_how_long_and_where() -> None:
    accounting = generation_pb2.Accounting(ttft_seconds=0.1, total_seconds=0.3, tpot_seconds=0.01)
    first = types_pb2.HopTiming(name="prefill.forward", where="p0")
    first.duration.FromMilliseconds(100)
    second = types_pb2.HopTiming(name="decode.steps", where="d0")
    second.duration.FromMilliseconds(200)
    accounting.ttft_hops.append(first)
    accounting.total_hops.extend([first, second])
    text = printed(hops_table(accounting))
    assert "first token after 100 ms, all after 300 ms" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "p0" in lines["prefill.forward"]
    assert "200" in lines["decode.steps"]


def span(name: str, identifier: str, parent: str, start: int, end: int, error: str = "") -> trace_pb2.Span:
    return trace_pb2.Span(
        trace_id="t",
        span_id=identifier,
        parent_span_id=parent,
        name=name,
        service="s",
        start_unix_nanos=start,
        end_unix_nanos=end,
        error=error,
    )


def test_tree_order_puts_parents_first_and_keeps_orphans() -> None:
    spans = [
        span("leaf", "3", "2", 5, 6),
        span("late", "4", "1", 9, 10),
        span("early", "2", "1", 3, 8),
        span("root", "1", "absent", 1, 10),
        span("orphan", "5", "gone", 2, 3),
    ]
    assert [(depth, found.name) for depth, found in tree_order(spans)] == [
        (0, "root"),
        (1, "early"),
        (2, "leaf"),
        (1, "late"),
        (0, "orphan"),
    ]


def test_waterfall_shows_errors_and_fits() -> None:
    spans = [span("root", "1", "", 0, 10**9), span("child", "2", "1", 10**8, 2 * 10**8, "CANCELLED")]
    text = printed(waterfall(spans, 80))
    assert "child CANCELLED" in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_status_shows_an_integrity_error_and_a_lost_worker() -> None:
    status = worker_pb2.GetStatusResponse(healthy=True, integrity_errors=["free + cached != total"])
    text = printed(status_table([("a", status), ("b", "UNAVAILABLE at h:1")]))
    assert "free + cached != total" in text
    assert "UNAVAILABLE at h:1" in text
    # Why there is none stands where the others have their integrity, so no column widens for it.
    header = text.splitlines()[0]
    assert len(header[: header.index("life")]) < 20
    lost = next(line for line in text.splitlines() if "UNAVAILABLE" in line)
    assert lost.index("UNAVAILABLE") == header.index("integrity")


def test_a_second_attempts_hops_are_not_those_before_the_first_token() -> None:
    accounting = generation_pb2.Accounting(ttft_seconds=0.1, total_seconds=0.3)
    for name in ("gateway.route", "gateway.retry", "gateway.route"):
        accounting.total_hops.add(name=name, where="gateway").duration.FromMilliseconds(100)
    accounting.ttft_hops.append(accounting.total_hops[0])
    table = hops_table(accounting)
    styles = [str(cell.style) for cell in table.columns[3].cells if isinstance(cell, Text)]
    assert styles == ["green", "blue", "blue"]
