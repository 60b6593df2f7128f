"""Dashboards ask for what there is: declared metrics and labels, and every declared metric is fed somewhere."""

import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import Histogram

from common.metrics import Metrics
from tests.dashboards import DIRECTORY, SCRAPED, dashboards, grouped_by, metrics_in, queries

ROOT = Path(__file__).parents[3]
GRAFANA = ROOT / "docker" / "grafana"
QUERIES = list(queries())


def declared() -> dict[str, set[str]]:
    """Name of every sample to the labels that it is declared with."""
    found: dict[str, set[str]] = {}
    for metric in vars(Metrics()).values():
        if not hasattr(metric, "_labelnames"):
            continue
        (family,) = metric.describe()
        suffixes = ("_bucket", "_sum", "_count") if isinstance(metric, Histogram) else ("",)
        total = "_total" if family.type == "counter" else ""
        found |= {f"{family.name}{total}{suffix}": set(metric._labelnames) for suffix in suffixes}
    return found


@pytest.mark.parametrize(("panel", "query"), QUERIES)
def test_metrics_and_labels_are_declared(panel: str, query: str) -> None:
    known = declared()
    used = metrics_in(query)
    assert used, "no metric of the mesh"
    for name, filters in used.items():
        assert name in known
        assert filters <= known[name] | SCRAPED
    assert grouped_by(query) <= set().union(*(known[name] for name in used)) | SCRAPED
    assert query.count("(") == query.count(")")


def test_a_metric_that_is_none_would_be_seen() -> None:
    assert "epd_kv_blocs" in metrics_in('sum by (state) (epd_kv_blocs{state="free"})')
    assert "epd_kv_blocs" not in declared()
    assert declared()["epd_hop_seconds_bucket"] == {"hop"}


def test_every_metric_is_fed_somewhere() -> None:
    source = "\n".join(
        path.read_text()
        for top in ("common", "services")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "metrics.py"
    )
    names = [name for name, metric in vars(Metrics()).items() if hasattr(metric, "_labelnames")]
    assert len(names) > 30
    assert [name for name in names if not re.search(rf"metrics\.{name}\b", source)] == []


def test_dashboards_show_what_operators_ask_for() -> None:
    text = " ".join(query for _, query in QUERIES)
    for name in (
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_server_time_per_output_token_seconds_bucket",
        "epd_goodput_tokens_total",
        "epd_slo_met_total",
        "epd_slo_missed_total",
        "epd_hop_seconds_sum",
        "epd_kv_blocks",
        "epd_embedding_rows",
        "epd_cached_tokens_total",
        "epd_transfer_bytes_total",
        "epd_refusals_total",
    ):
        assert name in text


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    known = {(source["type"], source["uid"]) for source in sources}
    assert ("prometheus", "prometheus") in known
    for board in dashboards().values():
        for panel in board["panels"]:
            assert (panel["datasource"]["type"], panel["datasource"]["uid"]) in known
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/epd.yaml").read_text())["providers"]
    grafana = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    assert mounts[f"./{DIRECTORY.relative_to(ROOT)}"] == provider["options"]["path"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (str(home.parent), (DIRECTORY / home.name).is_file()) == (provider["options"]["path"], True)


def test_panels_lie_side_by_side() -> None:
    for name, board in dashboards().items():
        taken: set[tuple[int, int]] = set()
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not cells & taken, f"{name}: {panel['title']}"
            assert at["x"] + at["w"] <= 24
            taken |= cells
