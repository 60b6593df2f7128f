"""`epd trace --svg`: the waterfall as a picture. Shapes and words alone: it looks the same wherever it is opened."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from common.errors import InvalidArgument
from epd.v1 import trace_pb2
from services.commands.render import cached, milliseconds, tree_order

# Pixels.
WIDTH, ROW, HEAD, FOOT, EDGE = 1080, 20, 62, 16, 16
_SERVICE, _AT, _LENGTH, _BARS = 300, 432, 502, 518  # left edge; _AT, _LENGTH: right edge of numbers
_INDENT, _BAR, _THINNEST = 12, 12, 1.5
_INK, _DIM, _GRID, _STRIPE, _FAILED, _CACHED = "#24292f", "#6e7781", "#d8dee4", "#f6f8fa", "#cf222e", "#1a7f37"
_COLOURS = {"gateway": "#57606a", "encode": "#8250df", "prefill": "#bf8700", "decode": "#0969da"}
_OTHER = "#1b7c83"
_TICKS = 6  # at most
_LONGEST = 40  # characters of a name with its indent, a letter being at most 7 pixels wide


def write_svg(spans: Sequence[trace_pb2.Span], file: Path) -> None:
    """Raises InvalidArgument when the file cannot be written."""
    try:
        file.write_text(svg(spans), encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{file} cannot be written: {error.strerror}", field="svg") from None


def svg(spans: Sequence[trace_pb2.Span]) -> str:
    """Spans of one trace, at least one, as a tree over a common time line; colours tell services, red a failure."""
    origin = min(span.start_unix_nanos for span in spans)
    length = max(1, max(span.end_unix_nanos for span in spans) - origin)
    rows = tree_order(spans)
    height, scale = HEAD + ROW * len(rows) + FOOT, (WIDTH - EDGE - _BARS) / length
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(EDGE, 22, f"{milliseconds(length / 1e9)} ms, {len(spans)} spans", size=15, weight="bold"),
        _text(WIDTH - EDGE, 22, f"epd trace {spans[0].trace_id}", _DIM, "end"),
        _text(EDGE, HEAD - 12, "span", _DIM),
        _text(_SERVICE, HEAD - 12, "where", _DIM),
        _text(_AT, HEAD - 12, "at ms", _DIM, "end"),
        _text(_LENGTH, HEAD - 12, "ms", _DIM, "end"),
    ]
    for number in range(1, len(rows), 2):
        parts.append(_rect(0, HEAD + number * ROW, WIDTH, ROW, _STRIPE))
    step = _step(length / _TICKS)
    for tick in range(int(length / step) + 1):
        x = _BARS + tick * step * scale
        parts.append(_rect(x, HEAD - 6, 1, height - HEAD - FOOT + 6, _GRID))
        if x < WIDTH - 60 or not tick:
            parts.append(_text(x, HEAD - 12, f"{milliseconds(tick * step / 1e9) if tick else 0} ms", _DIM))
    for number, (depth, span) in enumerate(rows):
        y = HEAD + number * ROW
        start, end = span.start_unix_nanos - origin, max(span.end_unix_nanos, span.start_unix_nanos) - origin
        colour = _FAILED if span.error else _COLOURS.get(span.service, _OTHER)
        parts += [
            _name(depth, span, y + 14),
            _text(_SERVICE, y + 14, span.service, colour),
            _text(_AT, y + 14, milliseconds(start / 1e9), _DIM, "end"),
            _text(_LENGTH, y + 14, milliseconds((end - start) / 1e9), _INK, "end"),
            _rect(
                min(_BARS + start * scale, WIDTH - EDGE - _THINNEST),
                y + (ROW - _BAR) / 2,
                max(_THINNEST, (end - start) * scale),
                _BAR,
                colour,
            ),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _name(depth: int, span: trace_pb2.Span, y: float) -> str:
    """Cut to what there is room for; what was wrong or cached stands behind it, on top of nothing else."""
    indent = min(depth, 8)
    room = _LONGEST - 2 * indent
    note, colour = (span.error, _FAILED) if span.error else (cached(span), _CACHED)
    name = span.name.removeprefix("epd.v1.")[:room]
    note = note[: max(0, room - len(name) - 1)]
    behind = f' <tspan fill="{colour}">{escape(note)}</tspan>' if note else ""
    return _text(EDGE + indent * _INDENT, y, name).replace("</text>", f"{behind}</text>")


def _step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, … nanoseconds that is not below."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _text(
    x: float, y: float, text: str, colour: str = _INK, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    how = (f' font-size="{size}"' if size != 12 else "") + (f' font-weight="{weight}"' if weight != "normal" else "")
    return f'<text {where} fill="{colour}"{how}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
