"""The pictures in docs: every dashboard has one, of its panels as they are; each is linked, small, whole in itself."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.dashboards import dashboards
from tests.pictures.panels import MAY_BE_EMPTY, Panel, Series, legend, query, unexpectedly_empty
from tests.pictures.panels import Board as Drawn

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "pictures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_BYTES = 300_000
_IMAGE = re.compile(r"!?\[[^\]]*\]\(([^)#]+\.svg)\)")


def linked() -> set[Path]:
    return {(page.parent / target).resolve() for page in PAGES for target in _IMAGE.findall(page.read_text())}


@pytest.mark.parametrize("name", dashboards())
def test_every_dashboard_has_a_picture_of_its_panels(name: str) -> None:
    """Where this fails: `make pictures`."""
    tree = ElementTree.fromstring((PICTURES / f"dashboard-{name}.svg").read_bytes())
    told = [text.strip() for text in tree.itertext()]
    for panel in dashboards()[name]["panels"]:
        assert panel["title"] in told


def test_every_picture_is_linked_and_every_link_has_its_picture() -> None:
    there = {path.resolve() for path in PICTURES.iterdir()}
    assert there >= {PICTURES / "trace.svg"}
    assert there == {path for path in linked() if path.is_relative_to(PICTURES)}
    assert all(path.is_file() for path in linked())
    assert PICTURES / "dashboard-absent.svg" not in there


def test_pictures_are_small_and_fetch_nothing() -> None:
    for path in PICTURES.iterdir():
        assert path.stat().st_size < MOST_BYTES, path.name
        text = path.read_text()
        assert "<image" not in text
        assert "url(" not in text.replace("url(#", "")
        assert re.findall(r'href="(?!#)', text) == []


def test_every_query_can_be_asked() -> None:
    """Variables are known, what remains is PromQL alone."""
    for board in dashboards().values():
        for panel in board["panels"]:
            for target in panel["targets"]:
                assert "$" not in query(target["expr"], board, 20.0)
    with pytest.raises(ValueError, match=r"\$absent"):
        query("sum(epd_requests_total{model=~'$absent'})", {"title": "t", "templating": {"list": []}}, 20.0)


def test_legends_are_of_the_labels() -> None:
    assert legend("{{job}} {{ state }}", {"job": "decode", "state": "free"}) == "decode free"
    assert legend("{{status}} {{reason}}", {"status": "OK"}) == "OK"


def test_an_empty_panel_is_told_of() -> None:
    names = {f"{name}: {panel['title']}" for name, board in dashboards().items() for panel in board["panels"]}
    assert names >= MAY_BE_EMPTY.keys()
    expected = sorted(MAY_BE_EMPTY)[0].split(": ", 1)

    def board(name: str, title: str, points: list[tuple[float, float]]) -> Drawn:
        look = {"kind": "timeseries", "unit": "s", "least": None, "most": None, "stacked": False, "fill": 0.0}
        panel = Panel(title=title, series=[Series("a", points)], x=0, y=0, w=1, h=1, **look)
        return Drawn(name=name, title=name, seconds=1.0, panels=[panel])

    assert unexpectedly_empty([board("b", "t", [])]) == ["b: t"]
    assert unexpectedly_empty([board("b", "t", [(0.0, 0.0)])]) == []
    assert unexpectedly_empty([board(expected[0], expected[1], [])]) == []
