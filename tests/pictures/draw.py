"""A dashboard as Grafana lays it out, drawn by matplotlib into an SVG file."""

import io
import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from tests.pictures.panels import Board, Panel, Series

# Pixels, at 100 to the inch. A row and the gap are about what Grafana has.
WIDTH, ROW, GAP, HEAD, COLUMNS = 1440, 38, 8, 58, 24
TITLE, RIGHT, TICKS, LINE, LETTER = 26, 22, 20, 15, 6.4
INK, DIM, GRID, PAGE, CARD, EDGE = "#24292e", "#6e7681", "#e4e5e6", "#f4f5f5", "#ffffff", "#dcdde0"
# Light to dark are alike on white: as many as the panel with the most lines needs.
COLOURS = (
    *("#3f833d", "#e0b400", "#1f78c1", "#e0752d", "#bf1b00", "#6d1f62", "#58c9d9", "#806eb7"),
    *("#9ac48a", "#967302", "#82b5d8", "#f29191", "#584477", "#d683ce", "#0a437c", "#629e51"),
    *("#890f02", "#447ebc", "#cca300", "#705da0"),
)
FONTS = ["DejaVu Sans", "Verdana", "Helvetica", "sans-serif"]
_PLACES = re.compile(r' (?:d|x|y|transform)="[^"]*"')  # tenths of a point are enough there
_LONG = re.compile(r"\d+\.\d{2,}")
NOTE = "Drawn by `make pictures` from the panels' own queries, in the dashboard's own layout; no screenshot of Grafana."


def shown(value: float, unit: str) -> str:
    """A value with its unit, as short as Grafana writes it. unit: Grafana's name of it."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= factor or name == "µs":
                return f"{value / factor:.3g} {name}" if value else "0 s"
    scales = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (0.0, ""))
    factor, prefix = next(each for each in scales if abs(value) >= each[0])
    number = f"{value / (factor or 1):.3g}"
    if unit == "Bps":
        return f"{number} {prefix}B/s"
    return number + prefix + {"reqps": " req/s", "ops": " ops/s", "short": ""}.get(unit, f" {unit}")


def draw(board: Board, file: Path) -> None:
    rows = max(panel.y + panel.h for panel in board.panels)
    height = HEAD + rows * ROW + GAP
    plt.rcParams["font.sans-serif"] = FONTS
    figure = plt.figure(figsize=(WIDTH / 100, height / 100), dpi=100, facecolor=PAGE)
    text = {"va": "center", "color": INK}
    figure.text(2 * GAP / WIDTH, 1 - 20 / height, board.title, fontsize=13, weight="bold", **text)
    note = f"{NOTE} Time: minutes since the load began."
    figure.text(2 * GAP / WIDTH, 1 - 42 / height, note, fontsize=8.5, va="center", color=DIM)
    for panel in board.panels:
        unit = (WIDTH - GAP) / COLUMNS
        left, top = GAP + panel.x * unit, HEAD + panel.y * ROW
        _panel(figure, panel, board.seconds, (left, top, panel.w * unit - GAP, panel.h * ROW - GAP), height)
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": board.name, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", facecolor=PAGE, metadata={"Date": None})
    plt.close(figure)
    drawn = _PLACES.sub(lambda found: _LONG.sub(lambda each: f"{float(each[0]):.1f}", found[0]), out.getvalue())
    file.write_text("\n".join(line.strip() for line in drawn.splitlines()) + "\n")


def _panel(figure: Figure, panel: Panel, seconds: float, box: tuple[float, float, float, float], height: float) -> None:
    """box: left, top, width, height in pixels from the top left."""

    def place(left: float, top: float, width: float, tall: float) -> tuple[float, float, float, float]:
        return left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height

    def axes(*box: float) -> Axes:
        return figure.add_axes(place(*box))

    left, top, width, tall = box
    card = axes(*box)
    card.set(xticks=[], yticks=[], facecolor=CARD)
    for spine in card.spines.values():
        spine.set(color=EDGE, linewidth=0.8)
    title = {"fontsize": 9.5, "weight": "bold", "color": INK, "va": "center"}
    card.text(8 / width, 1 - TITLE / 2 / tall, panel.title, transform=card.transAxes, **title)
    if panel.empty:
        card.text(0.5, 0.5, "No data", ha="center", va="center", transform=card.transAxes, color=DIM, fontsize=11)
        return
    if panel.kind == "stat":
        _stat(card, axes, panel, seconds, box)
        return
    labels = [each.label for each in panel.series if each.points]
    column = max(len(label) for label in labels) * LETTER + 34
    across = max(1, min(len(labels), int((width - 20) // column)))
    lines = math.ceil(len(labels) / across)
    foot = TICKS + lines * LINE + 10
    plot = axes(*box)
    _series(plot, panel, seconds)
    low, high = plot.get_ylim()
    margin = 18 + LETTER * max(len(shown(tick, panel.unit)) for tick in plot.get_yticks() if low <= tick <= high)
    plot.set_position(place(left + margin, top + TITLE + 4, width - margin - RIGHT, tall - TITLE - 4 - foot))
    handles, _ = plot.get_legend_handles_labels()
    at = {"bbox_to_anchor": (8 / width, 2 / tall), "bbox_transform": card.transAxes, "loc": "lower left"}
    plot.legend(
        handles,
        labels,
        ncols=across,
        fontsize=8,
        labelcolor=INK,
        frameon=False,
        borderpad=0.2,
        borderaxespad=0,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.4,
        labelspacing=0.35,
        **at,
    )


def _series(plot: Axes, panel: Panel, seconds: float) -> None:
    drawn = [each for each in panel.series if each.points]
    if panel.stacked:
        times = sorted({at for each in drawn for at, _ in each.points})
        below = [0.0] * len(times)
        for number, each in enumerate(drawn):
            values = dict(each.points)
            above = [low + values.get(at, 0.0) for at, low in zip(times, below, strict=True)]
            colour = COLOURS[number % len(COLOURS)]
            plot.fill_between(times, below, above, color=colour, alpha=panel.fill, linewidth=0)
            plot.plot(times, above, color=colour, linewidth=1.2, label=each.label)
            below = above
    else:
        for number, each in enumerate(drawn):
            times, values = zip(*_with_gaps(each), strict=True)
            colour = COLOURS[number % len(COLOURS)]
            plot.plot(times, values, color=colour, linewidth=1.4, label=each.label, solid_capstyle="round")
            plot.fill_between(times, 0, values, color=colour, alpha=panel.fill, linewidth=0)
    plot.set_xlim(0, seconds)
    low, high = plot.get_ylim()
    least = panel.least if panel.least is not None else 0.0 if low >= -0.1 * high else low
    most = panel.most if panel.most is not None else high if high > 0.1 or panel.unit == "s" else 1.0
    rise = 0.02 * (most - least)  # a line along the edge is seen whole
    plot.set_ylim(least - rise, most + rise)
    plot.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    plot.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    plot.xaxis.set_major_locator(MultipleLocator(60 if seconds > 150 else 30))
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value) // 60}:{int(value) % 60:02d}"))
    plot.tick_params(labelsize=8, length=0, labelcolor=DIM)
    plot.grid(color=GRID, linewidth=0.7)
    plot.set_axisbelow(True)
    plot.set_facecolor(CARD)
    for spine in plot.spines.values():
        spine.set_visible(False)


def _with_gaps(series: Series) -> list[tuple[float, float]]:
    """Where a value is missing the line is interrupted. The shortest distance of two points is the usual one."""
    points = series.points
    step = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=1.0)
    found = points[:1]
    for point in points[1:]:
        if point[0] - found[-1][0] > 1.5 * step:
            found.append((found[-1][0] + step, math.nan))
        found.append(point)
    return found


def _stat(card: Axes, axes, panel: Panel, seconds: float, box: tuple[float, float, float, float]) -> None:  # type: ignore[no-untyped-def]
    """The last value of each series, large, above its course."""
    left, top, width, tall = box
    drawn: Sequence[Series] = [each for each in panel.series if each.points]
    for number, each in enumerate(drawn):
        middle, colour = (number + 0.5) / len(drawn), COLOURS[0]
        spark = axes(left + width * number / len(drawn) + 1, top + tall * 0.62, width / len(drawn) - 2, tall * 0.36)
        times, values = zip(*_with_gaps(each), strict=True)
        spark.fill_between(times, 0, values, color=colour, alpha=0.15, linewidth=0)
        spark.plot(times, values, color=colour, linewidth=1.2)
        spark.set_xlim(0, seconds)
        spark.set_ylim(0, 1.1 * max((v for v in values if not math.isnan(v)), default=1.0) or 1.0)
        spark.axis("off")
        value = shown(each.points[-1][1], panel.unit)
        place = {"ha": "center", "va": "center", "transform": card.transAxes}
        card.text(middle, 0.57, value, fontsize=19, weight="bold", color=colour, **place)
        if each.label:
            card.text(middle, 0.78, each.label, fontsize=8.5, color=DIM, **place)
