"""The picture of a trace: bars where the times say, words that are not cut by others."""

from xml.etree import ElementTree

import pytest

from common.telemetry import CACHED_IMAGES, IMAGES
from epd.v1 import trace_pb2
from services.commands.trace_svg import svg

SVG = "{http://www.w3.org/2000/svg}"
ROW_COLOURS = {"gateway": "#57606a", "decode": "#0969da", "failed": "#cf222e"}


def span(name: str, identifier: str, parent: str, start: int, end: int, **fields: object) -> trace_pb2.Span:
    """start, end: milliseconds."""
    times = {"start_unix_nanos": 10**18 + start * 10**6, "end_unix_nanos": 10**18 + end * 10**6}
    return trace_pb2.Span(trace_id="t", span_id=identifier, parent_span_id=parent, name=name, **times, **fields)


SPANS = [
    span("gateway.generate", "1", "", 0, 1000, service="gateway"),
    span("decode.run", "2", "1", 500, 750, service="decode"),
    span("epd.v1.A/B", "3", "1", 750, 750, service="decode", error="a<b"),
    span("encode.images", "4", "1", 0, 10, service="gateway", attributes={IMAGES: "2", CACHED_IMAGES: "1"}),
]


def bars(drawn: str) -> list[tuple[str, float, float]]:
    """(colour, x, width) of each, from the top."""
    found = [each for each in ElementTree.fromstring(drawn).iter(f"{SVG}rect") if each.get("height") == "12.0"]
    found.sort(key=lambda each: float(each.get("y", "")))
    return [(each.get("fill", ""), float(each.get("x", "")), float(each.get("width", ""))) for each in found]


def test_bars_are_where_the_times_say() -> None:
    whole, cached, decode, failed = bars(svg(SPANS))
    assert [whole[0], decode[0], failed[0]] == list(ROW_COLOURS.values())
    left, width = whole[1:]
    tenth = 0.06  # of a pixel: what is written is rounded
    assert decode[1:] == pytest.approx((left + width / 2, width / 4), abs=tenth)
    assert cached[1:] == pytest.approx((left, width / 100), abs=tenth)
    assert failed[1] == pytest.approx(left + width * 0.75, abs=tenth)
    assert 0 < failed[2] < 3  # seen, though it took no time


def test_words_are_indented_and_say_what_was_wrong_or_cached() -> None:
    texts = list(ElementTree.fromstring(svg(SPANS)).iter(f"{SVG}text"))
    words = {"".join(each.itertext()): float(each.get("x", "")) for each in texts}
    assert words["gateway.generate"] < words["A/B a<b"] == words["decode.run"]
    assert "encode.images 1 of 2 cached" in words
    assert {"1,000 ms, 4 spans", "200 ms", "800 ms", "epd trace t"} <= words.keys()


def test_a_single_span_without_length_has_a_picture() -> None:
    ((_, x, width),) = bars(svg([span("gateway.generate", "1", "", 5, 5, service="gateway")]))
    assert width > 0
    assert x > 0


def test_a_deep_tree_stays_left_of_the_next_column() -> None:
    spans = [span("n" * 60, str(depth), str(depth - 1), 0, 1, service="gateway", error="e" * 60) for depth in range(20)]
    names = [each for each in ElementTree.fromstring(svg(spans)).iter(f"{SVG}text") if "nn" in "".join(each.itertext())]
    assert len(names) == 20
    for each in names:
        assert float(each.get("x", "")) + 6.5 * len("".join(each.itertext())) < 300
