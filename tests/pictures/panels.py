"""The panels of the provisioned dashboards with what their own queries answered."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from tests.dashboards import dashboards
from tests.pictures.prometheus import Prometheus, scrape_seconds

# Panels that may have no data: counters of events that need not happen within minutes have no series before the first.
MAY_BE_EMPTY = {
    "workers: Failed pulls": "a pull fails only when its owner dies in the middle of one",
}
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Series(msgspec.Struct, frozen=True):
    label: str
    points: list[tuple[float, float]]  # seconds since the start, value


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """x, y, w, h in Grafana's grid, of which a row has 24."""

    title: str
    kind: str  # stat or timeseries
    unit: str
    least: float | None
    most: float | None
    stacked: bool
    fill: float  # opacity, 0 to 1
    x: int
    y: int
    w: int
    h: int
    series: list[Series]

    @property
    def empty(self) -> bool:
        return not any(each.points for each in self.series)


class Board(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # of the file
    title: str
    seconds: float
    panels: list[Panel]


def query(expression: str, board: dict[str, Any], rate_seconds: float) -> str:
    """With everything selected, as the dashboard opens. Raises ValueError for a variable that nothing defines."""
    expression = expression.replace("$__rate_interval", f"{rate_seconds:g}s")
    for variable in board["templating"]["list"]:
        expression = re.sub(rf"\${variable['name']}\b", lambda _, all=variable["allValue"]: all, expression)
    if unknown := re.findall(r"\$\w+", expression):
        raise ValueError(f"{board['title']}: {', '.join(unknown)}")
    return expression


def legend(template: str, labels: dict[str, str]) -> str:
    return _LEGEND.sub(lambda found: labels.get(found[1], ""), template).strip()


async def ask(server: Prometheus, start: float, end: float) -> list[Board]:
    """start, end: Unix times. Steps and rate intervals are Grafana's: never below the scrape interval, never below
    four of them."""
    step = scrape_seconds()
    rate_seconds = max(2 * step, 4 * step)
    found = []
    for name, board in dashboards().items():
        panels = []
        for panel in board["panels"]:
            series = []
            for target in panel["targets"]:
                for labels, points in await server.over(query(target["expr"], board, rate_seconds), start, end, step):
                    shown = [(at - start, value) for at, value in points]
                    series.append(Series(legend(target["legendFormat"], labels), shown))
            field = panel["fieldConfig"]["defaults"]
            custom = field.get("custom", {})
            panels.append(
                Panel(
                    title=panel["title"],
                    kind=panel["type"],
                    unit=field["unit"],
                    least=field.get("min"),
                    most=field.get("max"),
                    stacked=custom.get("stacking", {}).get("mode") == "normal",
                    fill=custom.get("fillOpacity", 0) / 100,
                    series=series,
                    **panel["gridPos"],
                )
            )
        found.append(Board(name=name, title=board["title"], seconds=end - start, panels=panels))
    return found


def unexpectedly_empty(boards: list[Board]) -> list[str]:
    names = [f"{board.name}: {panel.title}" for board in boards for panel in board.panels if panel.empty]
    return [name for name in names if name not in MAY_BE_EMPTY]


def save(boards: list[Board], path: Path) -> None:
    path.write_text(json.dumps(msgspec.to_builtins(boards)))


def load(path: Path) -> list[Board]:
    return msgspec.json.decode(path.read_bytes(), type=list[Board])
