"""The measured service rate, and saying no in time."""

import math

import pytest

from common.policies.refusal import ServiceRate, hint, refuse, wait_seconds


def steady(rate, seconds, tokens=50.0, pause=0.1):
    """Something waits all the time, and `tokens` leave every `pause`."""
    for step in range(round(seconds / pause)):
        rate.served(step * pause, tokens)
    return seconds


def test_nothing_is_believed_at_first():
    rate = ServiceRate()
    assert rate.tokens_per_second(100.0, 10) is None
    rate.waits(100.0)
    assert rate.tokens_per_second(104.0, 10) is None
    assert rate.tokens_per_second(105.0, 10) is not None


@pytest.mark.parametrize("seconds", [5, 30])
def test_the_rate_is_what_leaves_while_something_waits(seconds):
    rate = ServiceRate()
    rate.waits(0.0)
    end = steady(rate, seconds)
    assert rate.tokens_per_second(end, 0) == pytest.approx(500, rel=0.1)
    rate.empty(end)
    rate.waits(end + 10)  # a pause without demand is no slowness
    assert rate.tokens_per_second(end + 10, 0) == pytest.approx(500, rel=0.1)


def test_standing_still_is_slow_but_not_an_end():
    rate = ServiceRate()
    rate.waits(0.0)
    assert rate.tokens_per_second(5.0, 100) == pytest.approx(100 / 3.161, rel=0.01)
    assert 0 < rate.tokens_per_second(60.0, 100) < 30


def test_a_rate_of_long_ago_is_forgotten():
    rate = ServiceRate()
    rate.waits(0.0)
    end = steady(rate, 10)
    rate.empty(end)
    rate.waits(end + 61)
    assert rate.tokens_per_second(end + 61.5, 10) is None


def test_the_smaller_of_both_bounds_counts():
    assert wait_seconds(100, 1000, 0.5, 100.0) == 2.0
    assert wait_seconds(900, 1000, 0.5, 100.0) == 10.0  # the others' wait is over by then
    assert wait_seconds(0, 1000, 0.5, 100.0) == 0.0
    assert wait_seconds(1, 1, 1.0, 0.0) == math.inf


def test_refused_only_when_it_cannot_be_met():
    assert refuse(2.0, 2.0) is None
    found = refuse(5.0, 2.0)
    assert found is not None
    assert (found.wait_seconds, found.retry_after_seconds) == (5.0, 3.0)
    assert refuse(math.inf, 2.0).retry_after_seconds == hint(math.inf) == 60.0
    assert hint(0.0) == 0.1
