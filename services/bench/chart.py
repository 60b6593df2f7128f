"""A line chart, drawn as text, SVG or PNG of the same numbers."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from PIL import Image, ImageDraw, ImageFont

from common.errors import InvalidArgument
from services.bench.outcome import UNFINISHED, Outcome
from services.bench.summary import WANTED_ATTAINMENT, Summary, Targets, percentile

WIDTH, HEIGHT = 720, 420  # pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 150, 40, 52
_COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3")
_INK, _GRID, _MARK = "#333333", "#dddddd", "#999999"
_SYMBOLS = "•+×o"
_TICKS = 5


class Line(msgspec.Struct, frozen=True):
    label: str
    points: tuple[tuple[float, float], ...]  # by x


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """y goes from 0 to 1, shown in percent; x from 0. at_x, at_y: where a line is drawn across."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    at_x: float | None = None
    at_y: float | None = None

    @property
    def x_most(self) -> float:
        return max((x for line in self.lines for x, _ in line.points), default=0.0) or 1.0


def distribution(outcomes: Sequence[Outcome], targets: Targets) -> Chart:
    """Which share of all requests stayed below which multiple of its target. At 1 stands the attainment."""
    lines = []
    ended = [each for each in outcomes if each.reason != UNFINISHED]
    for label, values in (
        ("TTFT", [each.ttft / targets.ttft_seconds for each in ended if each.answered]),
        ("TPOT", [each.tpot / targets.tpot_seconds for each in ended if each.answered]),
    ):
        most = max(2.0, percentile(values, 0.99))
        steps = [(0.0, 0.0)]
        for place, value in enumerate(sorted(values), start=1):
            if value <= most:
                steps += [(value, steps[-1][1]), (value, place / len(ended))]
        lines.append(Line(label, (*steps, (most, steps[-1][1]))))
    return Chart(
        title="Share of requests within a multiple of the target",
        x_label=f"multiple of the target (TTFT {targets.ttft_seconds:g} s, TPOT {targets.tpot_seconds * 1000:g} ms)",
        y_label="requests",
        lines=tuple(lines),
        at_x=1.0,
        at_y=WANTED_ATTAINMENT,
    )


def attainment_over_rate(runs: Sequence[tuple[float, Summary]], targets: Targets) -> Chart:
    runs = sorted(runs, key=lambda run: run[0])
    return Chart(
        title="SLO attainment over arrival rate",
        x_label=f"requests/s (TTFT {targets.ttft_seconds:g} s, TPOT {targets.tpot_seconds * 1000:g} ms)",
        y_label="attainment",
        lines=(
            Line("both", tuple((rate, each.attainment) for rate, each in runs)),
            Line("TTFT", tuple((rate, each.ttft_attainment) for rate, each in runs)),
            Line("TPOT", tuple((rate, each.tpot_attainment) for rate, each in runs)),
        ),
        at_y=WANTED_ATTAINMENT,
    )


def save(chart: Chart, path: Path) -> None:
    """By the file's name: .svg or .png. Raises InvalidArgument for another."""
    check_name(path)
    if path.suffix == ".svg":
        path.write_text(svg(chart))
    else:
        png(chart).save(path, "PNG")


def check_name(path: Path) -> None:
    if path.suffix not in (".svg", ".png"):
        raise InvalidArgument(f"a plot is a .svg or a .png file, not {path.name}", field="plot")


class Stroke(msgspec.Struct, frozen=True):
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dashed: bool = False


class Label(msgspec.Struct, frozen=True):
    x: float
    y: float  # of the middle of the line
    text: str
    anchor: str = "middle"  # start, middle or end
    size: int = 12
    colour: str = _INK


def drawing(chart: Chart) -> list[Stroke | Label]:
    """The chart as strokes and labels, in pixels from the top left."""
    right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (right - _LEFT) * x / chart.x_most, bottom - (bottom - _TOP) * y

    parts: list[Stroke | Label] = [Label(_LEFT, 14, chart.title, "start", 15)]
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        x, y = place(share * chart.x_most, share)
        parts += [Stroke(((_LEFT, y), (right, y)), _GRID), Stroke(((x, bottom), (x, bottom + 4)), _INK)]
        parts += [Label(_LEFT - 8, y, f"{share:.0%}", "end"), Label(x, bottom + 16, f"{share * chart.x_most:.3g}")]
    parts.append(Stroke(((_LEFT, _TOP), (_LEFT, bottom), (right, bottom)), _INK))
    parts += [
        Label((_LEFT + right) / 2, HEIGHT - 14, chart.x_label),
        Label(_LEFT, _TOP - 8, chart.y_label, "start", 11),
    ]
    if chart.at_x is not None:
        parts.append(Stroke((place(chart.at_x, 0), place(chart.at_x, 1)), _MARK, dashed=True))
    if chart.at_y is not None:
        parts.append(Stroke((place(0, chart.at_y), place(chart.x_most, chart.at_y)), _MARK, dashed=True))
        parts.append(Label(right + 8, place(0, chart.at_y)[1], f"{chart.at_y:.0%}", "start", 11, _MARK))
    for number, line in enumerate(chart.lines):
        colour = _COLOURS[number % len(_COLOURS)]
        y = _TOP + 80 + 22.0 * number
        parts.append(Stroke(tuple(place(*point) for point in line.points), colour, 2.0))
        parts.append(Stroke(((right + 16, y), (right + 40, y)), colour, 2.0))
        parts.append(Label(right + 48, y, line.label, "start"))
    return parts


def svg(chart: Chart) -> str:
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for part in drawing(chart):
        if isinstance(part, Stroke):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in part.points)
            dashes = ' stroke-dasharray="5 4"' if part.dashed else ""
            found.append(
                f'<polyline points="{points}" fill="none" stroke="{part.colour}" stroke-width="{part.width}"{dashes}/>'
            )
        else:
            text = part.text.replace("&", "&amp;").replace("<", "&lt;")
            at = f'x="{part.x:.1f}" y="{part.y:.1f}" dominant-baseline="middle" text-anchor="{part.anchor}"'
            found.append(f'<text {at} font-size="{part.size}" fill="{part.colour}">{text}</text>')
    return "\n".join([*found, "</svg>", ""])


def png(chart: Chart) -> Image.Image:
    """Drawn twice as large and averaged down."""
    image = Image.new("RGB", (WIDTH * 2, HEIGHT * 2), "white")
    canvas = ImageDraw.Draw(image)
    anchors = {"start": "lm", "middle": "mm", "end": "rm"}
    for part in drawing(chart):
        if isinstance(part, Label):
            font = ImageFont.load_default(part.size * 2)
            canvas.text((part.x * 2, part.y * 2), part.text, part.colour, font, anchors[part.anchor])
            continue
        points = [(x * 2, y * 2) for x, y in part.points]
        if part.dashed:
            (x0, y0), (x1, y1) = points[0], points[-1]
            for step in range(0, 100, 2):
                ends = [(x0 + (x1 - x0) * at / 100, y0 + (y1 - y0) * at / 100) for at in (step, step + 1)]
                canvas.line(ends, part.colour, round(part.width * 2))
        elif len(points) > 1:
            canvas.line(points, part.colour, round(part.width * 2), "curve")
    return image.resize((WIDTH, HEIGHT), Image.Resampling.BOX)


def text(chart: Chart, width: int = 60, height: int = 11) -> str:
    """For a terminal: one symbol a line, the height of each column by straight lines between the points."""
    rows = [[" "] * width for _ in range(height)]
    if chart.at_y is not None:
        rows[_row(chart.at_y, height)] = ["·"] * width
    if chart.at_x is not None and (column := round(chart.at_x / chart.x_most * (width - 1))) < width:
        for cells in rows:
            cells[column] = "·"
    for number, line in reversed(list(enumerate(chart.lines))):  # the first one on top
        last = None
        for column in range(width):
            y = _height(line.points, column / (width - 1) * chart.x_most)
            if y is not None:
                row = _row(y, height)
                for each in range(row, row + 1 if last is None else max(last, row + 1)):  # a steep rise has no holes
                    rows[each][column] = _SYMBOLS[number % len(_SYMBOLS)]
                last = row
    shown = []
    for number, cells in enumerate(rows):
        share = 1 - number / (height - 1)
        axis = f"{share:>4.0%} ┤" if number % 2 == 0 else "     │"
        shown.append(f"{axis}{''.join(cells)}".rstrip())
    legend = "   ".join(f"{_SYMBOLS[number % len(_SYMBOLS)]} {line.label}" for number, line in enumerate(chart.lines))
    ends = f"      0{f'{chart.x_most:.3g}':>{width - 1}}"
    return "\n".join([chart.title, *shown, f"     └{'─' * width}", ends, f"      {chart.x_label}", f"      {legend}"])


def _row(y: float, height: int) -> int:
    return round((1 - y) * (height - 1))


def _height(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """None where the line is not; of a step the upper end."""
    before = [point for point in points if point[0] <= x]
    after = [point for point in points if point[0] > x]
    if not before or (not after and before[-1][0] < x):
        return None
    (x0, y0) = before[-1]
    if not after:
        return y0
    (x1, y1) = after[0]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
