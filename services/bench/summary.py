"""What a load's outcomes say. Every figure is of this client's clock.

TTFT        sending to the first token                       TPOT  (last token - first) / (tokens - 1)
ITL         between two messages with new tokens             E2E   sending to the end of the stream
attainment  share of all requests, failed ones too, with TTFT <= its target and TPOT <= its target (DistServe)
goodput     requests (tokens) a second of those that met both; of a sweep: the highest rate with attainment >= 90 %
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from services.bench.outcome import UNFINISHED, Outcome

WANTED_ATTAINMENT = 0.9
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    ttft_seconds: float = 0.5
    tpot_seconds: float = 0.05


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds or tokens; zeros when there was nothing to measure."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    requests: int  # that have ended, one way or the other
    answered: int
    failed: dict[str, int]  # by reason
    unfinished: int
    duration_seconds: float  # from the first request's time to the last one's end
    offered_rate: float  # requests a second, as they were due; of a closed loop as they were sent
    late: Spread  # seconds that requests were sent after they were due: large ones say that this client is too slow
    ttft: Spread
    tpot: Spread  # of answers of more than one token
    itl: Spread
    e2e: Spread
    prompt_tokens: Spread
    output_tokens: Spread
    cached_share: float  # of prompt tokens
    request_throughput: float  # answered, a second
    output_throughput: float  # tokens a second
    ttft_attainment: float
    tpot_attainment: float
    attainment: float
    goodput: float  # requests a second
    goodput_tokens: float  # tokens a second


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread()
    found = {name: percentile(values, share) for name, share in SHARES.items()}
    return Spread(mean=sum(values) / len(values), most=max(values), **found)


def summarize(outcomes: Sequence[Outcome], targets: Targets) -> Summary:
    """Of requests that an interruption cut off only the number counts: how they would have ended is not known."""
    ended = [each for each in outcomes if each.reason != UNFINISHED]
    answered = [each for each in ended if each.answered]
    met = [each for each in answered if each.met(targets.ttft_seconds, targets.tpot_seconds)]
    begin = min((each.due for each in ended), default=0.0)
    duration = max((each.ended for each in ended), default=0.0) - begin
    sending = max((each.due for each in outcomes), default=0.0) - begin
    prompt = sum(each.prompt_tokens for each in answered)

    def share(count: int) -> float:
        return count / len(ended) if ended else 0.0

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return Summary(
        requests=len(ended),
        answered=len(answered),
        failed=dict(Counter(each.reason for each in ended if not each.answered)),
        unfinished=len(outcomes) - len(ended),
        duration_seconds=duration,
        offered_rate=(len(outcomes) - 1) / sending if sending > 0 else 0.0,
        late=spread([each.sent - each.due for each in outcomes]),
        ttft=spread([each.ttft for each in answered]),
        tpot=spread([each.tpot for each in answered if each.output_tokens > 1]),
        itl=spread([gap for each in answered for gap in each.gaps]),
        e2e=spread([each.e2e for each in answered]),
        prompt_tokens=spread([each.prompt_tokens for each in answered]),
        output_tokens=spread([each.output_tokens for each in answered]),
        cached_share=sum(each.cached_tokens for each in answered) / prompt if prompt else 0.0,
        request_throughput=rate(len(answered)),
        output_throughput=rate(sum(each.output_tokens for each in answered)),
        ttft_attainment=share(sum(each.ttft <= targets.ttft_seconds for each in answered)),
        tpot_attainment=share(sum(each.tpot <= targets.tpot_seconds for each in answered)),
        attainment=share(len(met)),
        goodput=rate(len(met)),
        goodput_tokens=rate(sum(each.output_tokens for each in met)),
    )


def best_rate(runs: Sequence[tuple[float, Summary]]) -> float | None:
    """Of a sweep's (rate, summary): the highest rate with enough attainment, of those up to the first that lacks it."""
    best = None
    for rate, summary in sorted(runs, key=lambda run: run[0]):
        if summary.attainment < WANTED_ATTAINMENT:
            break
        best = rate
    return best
