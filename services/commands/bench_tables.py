"""What `epd bench` prints: pure functions from summaries to rich tables and lines."""

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.table import Table

from services.bench.outcome import UNFINISHED, Outcome
from services.bench.summary import Spread, Summary, Targets
from services.commands.render import milliseconds

_MAX_MESSAGE = 200  # characters


def headlines(summary: Summary, targets: Targets) -> Iterator[str]:
    failed = sum(summary.failed.values())
    unfinished = f", {summary.unfinished} unfinished" if summary.unfinished else ""
    sent = f"{summary.offered_rate:.2f} requests/s sent" if summary.offered_rate else "sent at once"
    yield f"{summary.requests} requests in {summary.duration_seconds:.1f} s, {failed} failed{unfinished}"
    yield (
        f"{sent}, {summary.request_throughput:.2f} answered, "
        f"{summary.output_throughput:,.0f} tokens/s, {summary.cached_share:.0%} of prompt tokens cached"
    )
    yield (
        f"attainment {summary.attainment:.1%} (TTFT ≤ {targets.ttft_seconds:g} s: {summary.ttft_attainment:.1%}, "
        f"TPOT ≤ {targets.tpot_seconds * 1000:g} ms: {summary.tpot_attainment:.1%})"
    )
    yield f"goodput {summary.goodput:.2f} requests/s, {summary.goodput_tokens:,.0f} tokens/s"


def run_table(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(heading, justify="right")
    for label, values in (("TTFT ms", summary.ttft), ("TPOT ms", summary.tpot), ("ITL ms", summary.itl)):
        table.add_row(label, *map(milliseconds, _five(values)))
    table.add_row("E2E ms", *map(milliseconds, _five(summary.e2e)))
    table.add_row("sent late ms", *map(milliseconds, _five(summary.late)), style="dim")
    table.add_row("prompt tokens", *(f"{value:,.0f}" for value in _five(summary.prompt_tokens)))
    table.add_row("output tokens", *(f"{value:,.0f}" for value in _five(summary.output_tokens)))
    return table


def sweep_table(runs: Sequence[tuple[float, Summary]], targets: Targets) -> Table:
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="bold", header_style="dim")
    table.title = f"TTFT ≤ {targets.ttft_seconds:g} s, TPOT ≤ {targets.tpot_seconds * 1000:g} ms"
    for heading in ("rate", "attainment", "TTFT", "TPOT", "goodput", "tokens/s", "failed"):
        table.add_column(heading, justify="right")
    for heading in ("TTFT p50", "p90", "p99 ms", "TPOT p50", "p90", "p99 ms"):
        table.add_column(heading, justify="right", style="dim")
    for rate, summary in runs:
        table.add_row(
            f"{rate:g}",
            f"{summary.attainment:.1%}",
            f"{summary.ttft_attainment:.1%}",
            f"{summary.tpot_attainment:.1%}",
            f"{summary.goodput:.2f}",
            f"{summary.output_throughput:,.0f}",
            str(sum(summary.failed.values())),
            *(milliseconds(value) for each in (summary.ttft, summary.tpot) for value in (each.p50, each.p90, each.p99)),
        )
    return table


def failures(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One line a reason: how many, and what the first of them said."""
    failed = [each for each in outcomes if not each.answered and each.reason != UNFINISHED]
    for reason, count in Counter(each.reason for each in failed).most_common():
        message = next(each.message for each in failed if each.reason == reason)
        yield f"{count} × {reason}: {message[:_MAX_MESSAGE]}"


def _five(values: Spread) -> tuple[float, ...]:
    return values.mean, values.p50, values.p90, values.p99, values.most
