"""The dashboards as tests read them: queries, and the metrics and labels in them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

DIRECTORY = Path(__file__).parents[1] / "docker" / "grafana" / "dashboards"
_METRIC = re.compile(r"\b((?:epd|gen_ai)_\w+)\s*(?:\{([^}]*)\})?")
_BY = re.compile(r"\bby \(([^)]*)\)")
_LABEL = re.compile(r"(\w+)\s*[=!]~?")
SCRAPED = frozenset({"job", "instance", "le"})  # labels that Prometheus itself adds


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(DIRECTORY.glob("*.json"))}


def queries() -> Iterator[tuple[str, str]]:
    """(panel, query), those of variables too."""
    for name, board in dashboards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            yield f"{name}: {variable['name']}", variable["query"]["query"]


def metrics_in(query: str) -> dict[str, set[str]]:
    """Metric to the labels that the query filters it by."""
    found: dict[str, set[str]] = {}
    for name, filters in _METRIC.findall(query):
        found.setdefault(name, set()).update(_LABEL.findall(filters))
    return found


def grouped_by(query: str) -> set[str]:
    return {label.strip() for labels in _BY.findall(query) for label in labels.split(",")}


def samples(exposition: bytes) -> dict[str, set[str]]:
    """Of what a process exposes: each sample's name to its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
