"""Sizes of pools: the formula's values, and what a scaler does that sees nothing."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policies.scaling import Demand, ScalingPolicy, workers

POLICY = ScalingPolicy(least=2, most=8)
BAD = (math.nan, math.inf, -math.inf, -1.0)


@pytest.mark.parametrize(
    ("requests", "tokens", "cached", "rate", "expected"),
    [
        (10.0, 1000.0, 0.0, 2500.0, 4),  # exactly four
        (10.0, 1001.0, 0.0, 2500.0, 5),
        (10.0, 1000.0, 0.5, 2500.0, 2),  # effective prompt length: what is cached is no work
        (10.0, 1000.0, 1.0, 2500.0, 2),
        (100.0, 1000.0, 0.0, 2500.0, 8),  # 40, but there are no more
        (0.1, 10.0, 0.0, 2500.0, 2),
    ],
)
def test_the_formula(requests: float, tokens: float, cached: float, rate: float, expected: int) -> None:
    assert (
        workers(Demand(requests_per_second=requests, tokens=tokens, cached_share=cached), rate, 3, POLICY) == expected
    )


@pytest.mark.parametrize(
    ("tokens", "cached", "rate"), list(product((0.0, math.nan), (0.0, math.nan), (0.0, math.nan, 5.0)))
)
def test_case_b10_no_traffic_at_all_goes_to_the_least(tokens: float, cached: float, rate: float) -> None:
    """Means over no requests are 0/0 somewhere; the pool shrinks all the same."""
    assert workers(Demand(requests_per_second=0.0, tokens=tokens, cached_share=cached), rate, 7, POLICY) == POLICY.least


@pytest.mark.parametrize("current", range(12))
def test_case_b10_metrics_that_are_gone_change_nothing(current: int) -> None:
    held = min(max(current, POLICY.least), POLICY.most)
    assert workers(None, 2500.0, current, POLICY) == held
    for bad in BAD:
        assert workers(Demand(requests_per_second=bad, tokens=10.0), 2500.0, current, POLICY) == held
        assert workers(Demand(requests_per_second=9.0, tokens=bad), 2500.0, current, POLICY) == held
        assert workers(Demand(requests_per_second=9.0, tokens=9.0, cached_share=bad), 2500.0, current, POLICY) == held
    for bad in (math.nan, 0.0, -1.0):
        assert workers(Demand(requests_per_second=9.0, tokens=10.0), bad, current, POLICY) == held


def test_case_b10_traffic_ends_then_metrics_go_then_both_come_back() -> None:
    busy = Demand(requests_per_second=10.0, tokens=1000.0)
    idle = Demand(requests_per_second=0.0, tokens=math.nan)
    size, seen = 2, []
    for demand in (busy, idle, None, None, busy, None):
        size = workers(demand, 2500.0, size, POLICY)
        seen.append(size)
    assert seen == [4, 2, 2, 2, 4, 4]


@given(*[st.floats()] * 4, st.integers(0, 100), st.booleans())
def test_always_a_number_of_workers(
    requests: float, tokens: float, cached: float, rate: float, now: int, gone: bool
) -> None:
    demand = None if gone else Demand(requests_per_second=requests, tokens=tokens, cached_share=cached)
    found = workers(demand, rate, now, POLICY)
    assert isinstance(found, int)
    assert POLICY.least <= found <= POLICY.most


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2)])
def test_bounds_that_make_no_sense(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="least"):
        ScalingPolicy(least=least, most=most)
