"""Results of a measurement: a table for the terminal, JSON and plots under bench/results/."""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def save(name: str, data: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **data}, indent=2) + "\n")
    return path


def line_plot(
    name: str, title: str, x_label: str, y_label: str, lines: dict[str, tuple[Sequence[float], Sequence[float]]]
) -> Path:
    """lines: label to (x values, y values)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, (x, y) in lines.items():
        axes.plot(x, y, marker="o", label=label)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
