"""A tenant's limits on a virtual clock: no minute ever holds more than allowed, and the hint is exact."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import NeverFits, RateLimited
from common.policies.limits import Amounts, MinuteWindow, Share, TenantLimits, Usage, check

REQUEST = Amounts(requests=1, in_flight=1)


def take(limits: TenantLimits, amounts: Amounts, usage: Usage, now: float) -> bool:
    try:
        check(limits, amounts, [usage], now)
    except RateLimited:
        return False
    usage.add(limits.counted(amounts), now)
    return True


@settings(deadline=None)
@given(
    limit=st.integers(1, 50),
    steps=st.lists(
        st.tuples(st.floats(0, 30, allow_nan=False), st.integers(1, 20), st.booleans()), min_size=1, max_size=80
    ),
    start=st.floats(0, 1e6, allow_nan=False),
)
def test_no_minute_holds_more_than_the_limit(limit: int, steps: list[tuple[float, int, bool]], start: float) -> None:
    """Also when some of it is given back: what is given back was not used."""
    limits, usage, now = TenantLimits(prompt_tokens_per_minute=limit), Usage(), start
    taken: list[tuple[float, int]] = []
    for pause, amount, given_back in steps:
        now += pause
        amounts = Amounts(prompt_tokens=min(amount, limit))
        if take(limits, amounts, usage, now):
            taken.append((now, amounts.prompt_tokens))
            if given_back and len(taken) > 1:
                at, back = taken.pop(-2)
                usage.release(Amounts(prompt_tokens=back), at, now)
    for first, _ in taken:
        assert sum(amount for at, amount in taken if first <= at < first + 60) <= limit


@settings(deadline=None)
@given(
    charges=st.lists(st.tuples(st.floats(0, 20), st.integers(1, 10)), min_size=1, max_size=30), more=st.integers(1, 20)
)
def test_the_hint_is_the_first_moment_with_room(charges: list[tuple[float, int]], more: int) -> None:
    limits, usage, now = TenantLimits(image_pixels_per_minute=20), Usage(), 1000.0
    for pause, amount in charges:
        now += pause
        take(limits, Amounts(image_pixels=amount), usage, now)
    if usage.used("image_pixels", now) + more <= 20:
        check(limits, Amounts(image_pixels=more), [usage], now)
        return
    with pytest.raises(RateLimited) as caught:
        check(limits, Amounts(image_pixels=more), [usage], now)
    refused = caught.value
    assert refused.field == "image_pixels_per_minute"
    assert refused.retry_after_seconds is not None
    assert 0 < refused.retry_after_seconds <= 61
    with pytest.raises(RateLimited):
        check(limits, Amounts(image_pixels=more), [usage], now + refused.retry_after_seconds - 0.01)
    check(limits, Amounts(image_pixels=more), [usage], now + refused.retry_after_seconds + 1e-6)


def test_every_limit_is_named_and_counts_alone() -> None:
    amounts = Amounts(requests=1, in_flight=1, prompt_tokens=5, image_pixels=7)
    for name, kind in (
        ("requests_per_minute", "requests"),
        ("requests_in_flight", "in_flight"),
        ("prompt_tokens_per_minute", "prompt_tokens"),
        ("image_pixels_per_minute", "image_pixels"),
    ):
        limits, usage = TenantLimits(**{name: 7}), Usage()
        assert limits.counted(amounts) == Amounts(**{kind: getattr(amounts, kind)})
        while take(limits, amounts, usage, 5.0):
            pass
        assert 7 - getattr(amounts, kind) < usage.used(kind, 5.0) <= 7
        with pytest.raises(RateLimited, match="limit of 7") as caught:
            check(limits, amounts, [usage], 5.0)
        assert caught.value.field == name
    check(TenantLimits(), amounts, [usage], 5.0)  # no bounds
    assert not TenantLimits(weight=2).counted(amounts)


def test_more_than_the_limit_never_fits() -> None:
    with pytest.raises(NeverFits, match=r"9 prompt tokens a minute .* limit of 8"):
        check(TenantLimits(prompt_tokens_per_minute=8), Amounts(prompt_tokens=9), [Usage()], 0.0)


def test_holds_end_and_charges_come_back() -> None:
    limits, usage = TenantLimits(requests_in_flight=1, requests_per_minute=2), Usage()
    assert take(limits, REQUEST, usage, 0.5)
    assert not take(limits, REQUEST, usage, 0.5)
    usage.release(Amounts(in_flight=1), 0.5, 0.5)  # it ended
    assert take(limits, REQUEST, usage, 0.6)
    usage.release(REQUEST, 0.6, 0.6)  # it failed
    assert take(limits, REQUEST, usage, 0.7)
    usage.release(Amounts(in_flight=1), 0.7, 0.7)
    assert not take(limits, REQUEST, usage, 60.9)
    assert take(limits, REQUEST, usage, 61.0)
    usage.release(Amounts(in_flight=1), 61.0, 61.0)
    assert not usage.idle(121.9)
    assert usage.idle(122.0)


@settings(deadline=None)
@given(limit=st.integers(0, 100), of=st.integers(1, 7))
def test_shares_add_up(limit: int, of: int) -> None:
    parts = [Share(rank, of).part(limit) for rank in range(of)]
    assert sum(parts) == limit
    assert max(parts) - min(parts) <= 1


def test_what_absent_gateways_may_take_is_taken() -> None:
    limits, here, there = TenantLimits(requests_in_flight=5), Usage(), Usage()
    there.in_flight = 1
    for _ in range(3):
        check(limits, REQUEST, [here], 0.0, absent=[(there, Share(1, 2))])
        here.in_flight += 1
    with pytest.raises(RateLimited):
        check(limits, REQUEST, [here], 0.0, absent=[(there, Share(1, 2))])
    with pytest.raises(RateLimited):
        check(limits, REQUEST, [here], 0.0, mine=Share(0, 2))
    check(limits, REQUEST, [here, there], 0.0)
    there.in_flight = 3  # more than its share
    with pytest.raises(RateLimited):
        check(limits, REQUEST, [Usage(), Usage()], 0.0, absent=[(there, Share(1, 2)), (there, Share(0, 2))])


def test_windows_stay_small() -> None:
    window = MinuteWindow()
    for i in range(100_000):
        window.charge(1, i / 100, i / 100)
        window.used(i / 100)
    assert len(window.bins()) <= 61


@pytest.mark.parametrize(
    "value",
    [{"requests_per_minute": -1}, {"weight": 0}, {"weight": float("inf")}, {"requests": 1}, {"cache_bytes": "much"}],
)
def test_bad_limits(value: dict) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, TenantLimits)
