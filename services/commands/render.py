"""What commands print: pure functions from messages to rich tables."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.telemetry import CACHED_IMAGES, CACHED_TOKENS, IMAGES
from epd.v1 import generation_pb2, trace_pb2, types_pb2, worker_pb2

_EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR_WIDTH = 28
_PLAIN_WIDTH = 120  # columns when the output is no terminal


def make_console(*, stderr: bool = False) -> Console:
    """A console whose tables are not squeezed when they go into a file."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    return console


def bar(start: float, length: float, width: int = BAR_WIDTH) -> str:
    """A bar over [start, start + length] of a line from 0 to 1, in eighths of a character; never empty."""
    first = min(width * 8 - 1, round(start * width * 8))
    last = max(first + 1, min(width * 8, round((start + length) * width * 8)))
    cells: list[str] = []
    for cell in range(width):
        low, high = cell * 8, cell * 8 + 8
        if last <= low or first >= high:
            cells.append(" ")
        elif first > low and last >= high:  # begins inside: half a cell at most is shown too early
            cells.append("▐" if first - low >= 4 else "█")
        else:
            cells.append(_EIGHTHS[min(8, last - low)])
    return "".join(cells).rstrip()


def milliseconds(seconds: float) -> str:
    """Three significant digits, at least one microsecond's worth."""
    value = seconds * 1000
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def hops_table(accounting: generation_pb2.Accounting) -> Table:
    """Where a request's time went: each hop's share of the whole, after the one before it."""
    total = accounting.total_seconds or 1e-9
    to_first = [_hop_key(hop) for hop in accounting.ttft_hops]
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold", header_style="dim")
    table.title = (
        f"first token after {milliseconds(accounting.ttft_seconds)} ms, all after {milliseconds(total)} ms"
        + (f", {milliseconds(accounting.tpot_seconds)} ms a token" if accounting.tpot_seconds else "")
    )
    table.add_column("hop")
    table.add_column("where", style="dim")
    table.add_column("ms", justify="right")
    table.add_column("", no_wrap=True)
    start = 0.0
    for hop in accounting.total_hops:
        seconds = hop_seconds(hop)
        color = "blue"
        if _hop_key(hop) in to_first:  # the first of that name: a later attempt has hops of the same names
            to_first.remove(_hop_key(hop))
            color = "green"
        drawn = Text(bar(start / total, seconds / total), style=color)
        table.add_row(hop.name, hop.where, milliseconds(seconds), drawn)
        start += seconds
    table.caption = "green: until the first token; blue: after it"
    if accounting.cached_images:
        table.caption += f". Not encoded, since known: {accounting.cached_images} of the images"
    table.caption_justify = "left"
    return table


def hop_seconds(hop: types_pb2.HopTiming) -> float:
    return float(hop.duration.seconds + hop.duration.nanos / 1e9)


def _hop_key(hop: types_pb2.HopTiming) -> tuple[str, str]:
    return hop.name, hop.where


def waterfall(spans: Sequence[trace_pb2.Span], width: int) -> Table:
    """Spans of one trace as a tree over a common time line, in `width` columns.

    Times of other machines are as their clocks say.
    """
    origin = min(span.start_unix_nanos for span in spans)
    length = max(1, max(span.end_unix_nanos for span in spans) - origin)
    table = Table(box=None, pad_edge=False, header_style="dim", title_justify="left", title_style="bold")
    table.title = f"trace {spans[0].trace_id}, {milliseconds(length / 1e9)} ms, {len(spans)} spans"
    rows = tree_order(spans)
    names = [Text("  " * depth + span.name.removeprefix("epd.v1.")) for depth, span in rows]
    for name, (_, span) in zip(names, rows, strict=True):
        if span.error:
            name.append(f" {span.error}", style="red")
        if note := cached(span):
            name.append(f" {note}", style="green")
    services = max(len("service"), *(len(span.service) for span in spans))
    bars = max(12, width - max(len(name) for name in names) - services - 22)
    table.add_column("span", no_wrap=True)
    table.add_column("service", style="dim", no_wrap=True)
    table.add_column("at ms", justify="right", no_wrap=True, min_width=6)
    table.add_column("ms", justify="right", no_wrap=True, min_width=6)
    table.add_column("", no_wrap=True)
    for name, (_, span) in zip(names, rows, strict=True):
        start, end = span.start_unix_nanos - origin, max(span.end_unix_nanos, span.start_unix_nanos) - origin
        drawn = Text(bar(start / length, (end - start) / length, bars), style="red" if span.error else "cyan")
        table.add_row(name, span.service, milliseconds(start / 1e9), milliseconds((end - start) / 1e9), drawn)
    return table


def tree_order(spans: Iterable[trace_pb2.Span]) -> list[tuple[int, trace_pb2.Span]]:
    """(depth, span), parents before children, siblings by start. Spans whose parent is not there are roots."""
    known = {span.span_id: span for span in spans}
    children: dict[str, list[trace_pb2.Span]] = {}
    for span in known.values():
        parent = span.parent_span_id if span.parent_span_id in known else ""
        children.setdefault(parent, []).append(span)
    ordered: list[tuple[int, trace_pb2.Span]] = []
    todo = [(0, span) for span in sorted(children.get("", []), key=_start, reverse=True)]
    while todo:
        depth, span = todo.pop()
        ordered.append((depth, span))
        todo += [(depth + 1, child) for child in sorted(children.get(span.span_id, []), key=_start, reverse=True)]
    return ordered


def cached(span: trace_pb2.Span) -> str:
    """What the span did not have to compute."""
    images, tokens = (span.attributes.get(name, "") for name in (CACHED_IMAGES, CACHED_TOKENS))
    if images not in ("", "0"):
        return f"{images} of {span.attributes[IMAGES]} cached"
    return f"{tokens} tokens cached" if tokens not in ("", "0") else ""


def _start(span: trace_pb2.Span) -> int:
    return int(span.start_unix_nanos)


def _pools(load: worker_pb2.Load) -> str:
    """A line for each pool that the worker has."""
    lines = []
    if load.total_rows:
        lines.append(f"rows {load.free_rows}·{load.cached_rows}·{load.held_rows}/{load.total_rows}")
    if load.total_blocks:
        blocks = (load.free_blocks, load.cached_blocks, load.active_blocks, load.held_blocks)
        lines.append(f"blocks {'·'.join(map(str, blocks))}/{load.total_blocks}")
    return "\n".join(lines)


def status_table(workers: Sequence[tuple[str, worker_pb2.GetStatusResponse | str]]) -> Table:
    """One row a worker: (name, its status, or why there is none)."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("worker", "roles", "life", "executor", "pool", "weights MB"):
        table.add_column(heading, no_wrap=True)
    for heading in ("run", "wait", "pulls", "lag ms", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("integrity")
    table.caption = (
        "pool: KV blocks free·cached·active·held/total, embedding rows free·cached·held/total. pulls: open here/open "
        "from here. lag: event loop, p99 of a minute. MiB: service and engine processes"
    )
    table.caption_justify = "left"
    for name, status in workers:
        if isinstance(status, str):
            table.add_row(name, *[""] * (len(table.columns) - 2), Text(status, style="red"))
            continue
        load = status.load
        weights = "\n".join(f"{part} {size / 1e6:,.0f}" for part, size in sorted(status.weight_bytes.items()) if size)
        clean = not status.integrity_errors
        state = Text("clean" if clean else status.integrity_errors[0], style="green" if clean else "red")
        if not status.healthy:
            state = Text("unhealthy ", style="red").append_text(state)
        elif load.draining:
            state = Text("draining ", style="yellow").append_text(state)
        table.add_row(
            name,
            "+".join(status.roles),
            status.identity.incarnation[:6],
            status.executor,
            _pools(load),
            weights,
            str(load.running),
            str(load.waiting + load.pending_images),
            f"{status.open_pulls}/{status.open_publications}",
            milliseconds(status.loop_lag_p99_seconds),
            f"{status.resident_bytes / 2**20:,.0f}",
            state,
        )
    return table
