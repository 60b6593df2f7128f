"""Open and closed loops against a target without a server; figures, tables and charts of what came of it."""

import asyncio
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from common.errors import InvalidArgument, Overloaded
from services.bench import chart
from services.bench.arrivals import Arrivals
from services.bench.clock import Clock
from services.bench.load import closed_loop, open_loop
from services.bench.outcome import UNFINISHED, Outcome
from services.bench.summary import Summary, Targets, best_rate, percentile, summarize
from services.bench.workload import Ask, Lengths, Shape, synthetic
from services.commands.bench_tables import failures, headlines, run_table, sweep_table
from services.commands.render import make_console

TARGETS = Targets(ttft_seconds=1.0, tpot_seconds=0.1)


class FakeTarget:
    """Answers when told to; every third request is refused."""

    model, context = "fake", 0

    def __init__(self) -> None:
        self.running = self.most = 0
        self.go = asyncio.Event()

    def request(self, ask: Ask) -> Ask:
        return ask

    async def send(self, request: Ask, outcome: Outcome, clock: Clock) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            if request.number % 3 == 2:
                raise Overloaded("full")
            outcome.arrivals += [clock(), clock()]
            outcome.output_tokens, outcome.prompt_tokens = request.output_tokens, request.prompt_tokens
        finally:
            self.running -= 1


def asks(count: int, rate: float = 1000.0) -> list[Ask]:
    return synthetic(Shape(prompt=Lengths(8, 8), output=Lengths(4, 4)), count, Arrivals(rate=rate), seed=1)


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_open_loop_waits_for_no_answer() -> None:
    target, told = FakeTarget(), []
    load = asyncio.create_task(open_loop(target, asks(12), asyncio.Event(), told.append))
    await until(lambda: target.running == 12)
    assert told == []
    target.go.set()
    outcomes = await load
    assert [each.number for each in outcomes] == list(range(12))
    assert all(each.sent >= each.due for each in outcomes)
    assert sorted(each.number for each in told) == list(range(12))
    summary = summarize(outcomes, TARGETS)
    assert (summary.requests, summary.answered, summary.failed) == (12, 8, {"OVERLOADED": 4})
    assert summary.attainment == pytest.approx(8 / 12)  # what is refused has met nothing


async def test_a_closed_loop_keeps_its_number() -> None:
    target = FakeTarget()
    load = asyncio.create_task(closed_loop(target, asks(10), 3, asyncio.Event()))
    await until(lambda: target.running == 3)
    target.go.set()
    outcomes = await load
    assert sorted(each.number for each in outcomes) == list(range(10))
    assert target.most == 3


@pytest.mark.parametrize("loop", ["open", "closed"])
async def test_a_stop_leaves_what_there_is(loop: str) -> None:
    target, stop = FakeTarget(), asyncio.Event()
    many = [*asks(3), *asks(50, rate=0.01)[1:]]
    load = open_loop(target, many, stop) if loop == "open" else closed_loop(target, many, 3, stop)
    task = asyncio.create_task(load)
    await until(lambda: target.running == 3)
    stop.set()
    outcomes = await asyncio.wait_for(task, 30)
    assert [each.reason for each in outcomes] == [UNFINISHED] * 3
    assert target.running == 0
    summary = summarize(outcomes, TARGETS)
    assert (summary.requests, summary.unfinished, summary.attainment) == (0, 3, 0.0)


async def test_a_bug_of_the_target_ends_the_load() -> None:
    class Broken(FakeTarget):
        async def send(self, request: Ask, outcome: Outcome, clock: Clock) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await open_loop(Broken(), asks(3), asyncio.Event())


def outcome(number: int, ttft: float, tpot: float, tokens: int = 5, reason: str = "") -> Outcome:
    sent = float(number)
    first = sent + ttft
    arrivals = [first + tpot * i for i in range(tokens)]
    made = Outcome(number=number, due=sent, sent=sent, ended=arrivals[-1], arrivals=arrivals, reason=reason)
    made.output_tokens, made.prompt_tokens, made.cached_tokens = tokens, 32, 16
    return made


GOOD, LATE, SLOW = (0.5, 0.05), (2.0, 0.05), (0.5, 0.2)


def test_both_targets_have_to_be_met() -> None:
    outcomes = [outcome(0, *GOOD), outcome(1, *LATE), outcome(2, *SLOW), outcome(3, *GOOD, reason="DRAINING")]
    summary = summarize(outcomes, TARGETS)
    assert (summary.attainment, summary.ttft_attainment, summary.tpot_attainment) == (0.25, 0.5, 0.5)
    assert summary.duration_seconds == pytest.approx(3.7)
    assert summary.goodput == pytest.approx(1 / 3.7)
    assert summary.goodput_tokens == pytest.approx(5 / 3.7)
    assert summary.offered_rate == 1.0
    assert summary.ttft.p50 == pytest.approx(0.5)
    assert summary.tpot.most == pytest.approx(0.2)
    assert summary.itl.p50 == pytest.approx(0.05)
    assert summary.cached_share == 0.5


def test_one_token_has_no_time_per_token() -> None:
    summary = summarize([outcome(0, *GOOD, tokens=1)], TARGETS)
    assert summary.tpot.most == 0.0
    assert summary.attainment == 1.0


def test_percentiles_lie_between_the_nearest() -> None:
    assert percentile([], 0.9) == 0.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)


def with_attainment(share: float) -> Summary:
    return summarize([outcome(i, *(GOOD if i < share * 20 else LATE)) for i in range(20)], TARGETS)


def test_the_best_rate_is_below_the_first_that_fails() -> None:
    runs = [
        (8.0, with_attainment(0.95)),
        (1.0, with_attainment(1.0)),
        (4.0, with_attainment(0.5)),
        (2.0, with_attainment(0.9)),
    ]
    assert best_rate(runs) == 2.0
    assert best_rate([(1.0, with_attainment(0.85))]) is None


def test_tables_say_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [outcome(0, *GOOD), outcome(1, *LATE), outcome(2, *GOOD, reason="NO_WORKERS")]
    outcomes[2].message = "no worker"
    summary = summarize(outcomes, TARGETS)
    console = make_console()
    console.print(run_table(summary))
    console.print(sweep_table([(2.0, summary)], TARGETS))
    shown = capsys.readouterr().out
    for part in ("TTFT ms", "p99", "1,250", "33.3%"):
        assert part in shown
    said = "\n".join(headlines(summary, TARGETS))
    assert "3 requests" in said
    assert "1 failed" in said
    assert "attainment 33.3%" in said
    assert list(failures(outcomes)) == ["1 × NO_WORKERS: no worker"]


CHARTS = {
    "distribution": chart.distribution([outcome(i, 0.1 * i, 0.01 * i) for i in range(20)], TARGETS),
    "sweep": chart.attainment_over_rate([(2.0, with_attainment(1.0)), (4.0, with_attainment(0.5))], TARGETS),
    "nothing": chart.distribution([outcome(0, *GOOD, reason=UNFINISHED)], TARGETS),
    "all failed": chart.distribution([outcome(0, *GOOD, reason="DRAINING")], TARGETS),
}


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_drawn(name: str, tmp_path: Path) -> None:
    drawn = CHARTS[name]
    chart.save(drawn, tmp_path / "plot.svg")
    tree = ElementTree.parse(tmp_path / "plot.svg")
    assert len(tree.findall("{*}polyline")) > len(drawn.lines)
    assert drawn.title in {each.text for each in tree.findall("{*}text")}
    chart.save(drawn, tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        assert image.size == (chart.WIDTH, chart.HEIGHT)
        assert len(image.convert("RGB").getcolors(1 << 20)) > 3
    assert drawn.x_label in chart.text(drawn)


def test_the_text_chart_shows_the_curve() -> None:
    lines = chart.text(CHARTS["sweep"], width=20, height=11).splitlines()
    assert lines[0] == "SLO attainment over arrival rate"
    assert lines[1].startswith("100% ┤")
    assert "•" in lines[1]  # all at 2 requests/s
    assert "•" in lines[6]  # half at 4
    assert "•" not in lines[8]


def test_other_plots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"\.svg or a \.png"):
        chart.save(CHARTS["sweep"], tmp_path / "plot.pdf")
    assert not list(tmp_path.iterdir())
