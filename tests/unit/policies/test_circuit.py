"""The circuit of a peer: opens, lets few through after a while, closes; never for good."""

import random

import pytest

from common.policies.circuit import Circuit, CircuitPolicy, State

POLICY = CircuitPolicy(failures=3, share=0.5, window=10, open_seconds=1.0, longest_seconds=8.0, jitter=0.5, probes=2)


def circuit(draw: float = 0.0, policy: CircuitPolicy = POLICY) -> Circuit:
    return Circuit(policy, lambda: draw)


def trip(one: Circuit, now: float) -> None:
    for i in range(POLICY.failures):
        one.failed(now + i / 100, now + i / 100)
    assert one.state(now + 0.02) is State.OPEN


def test_opens_after_failures_in_a_row() -> None:
    one = circuit()
    for at in (1.0, 2.0):
        assert not one.failed(at, at)
    one.succeeded(2.5, 2.5)  # the row begins anew
    for at in (3.0, 4.0):
        assert not one.failed(at, at)
    assert one.allows(4.0)
    assert one.failed(5.0, 5.0)
    assert not one.allows(5.0)


def test_opens_when_half_of_many_calls_fail() -> None:
    one = circuit()
    opened = []
    for i in range(20):
        opened.append(one.failed(i, i))
        one.succeeded(i + 0.5, i + 0.5)
    assert opened.index(True) == 5  # the first failure with a full window: five of ten failed


def test_one_event_counts_once() -> None:
    """Twenty calls that ran when the worker was cut off are one failure, not twenty."""
    one = circuit()
    for i in range(20):
        assert not one.failed(1.0 + i / 100, 2.0 + i / 1000)
    assert one.state(3.0) is State.CLOSED


@pytest.mark.parametrize(("draw", "length"), [(0.0, 1.0), (1.0, 0.5)])
def test_half_open_after_the_back_off_lets_few_through(draw: float, length: float) -> None:
    one = circuit(draw)
    trip(one, 0.0)
    assert one.until == pytest.approx(0.02 + length)
    later = one.until
    assert one.state(later) is State.HALF_OPEN
    assert one.began(later)
    assert one.allows(later)
    assert one.began(later)
    assert not one.allows(later)  # two probes
    one.ended(True)  # without a verdict
    assert one.allows(later)


def test_a_success_closes_and_a_failure_opens_for_longer() -> None:
    one = circuit()
    trip(one, 0.0)
    lengths = []
    now = one.until
    for _ in range(6):
        assert one.failed(now, now)
        lengths.append(one.until - now)
        now = one.until
    assert lengths == pytest.approx([2.0, 4.0, 8.0, 8.0, 8.0, 8.0])
    assert one.succeeded(now, now + 0.1)
    assert one.state(now + 0.1) is State.CLOSED
    trip(one, now + 0.2)  # soon after: it goes on where it was
    assert one.until - (now + 0.22) == pytest.approx(8.0)
    assert one.succeeded(one.until, one.until)
    late = one.until + POLICY.longest_seconds + 1
    trip(one, late)
    assert one.until - (late + 0.02) == pytest.approx(1.0)


def test_calls_from_before_do_not_decide() -> None:
    """A long stream that began before the circuit opened says nothing about now, and takes no probe's place."""
    one = circuit()
    assert not one.began(0.0)
    trip(one, 1.0)
    assert not one.succeeded(0.0, 5.0)
    assert one.state(5.0) is State.HALF_OPEN
    assert not one.failed(0.5, 5.0)
    assert one.allows(5.0)


def test_never_for_good() -> None:
    """Whatever happens, a call is let through at the latest after the longest back-off."""
    rng = random.Random(4)
    one = Circuit(POLICY, rng.random)
    now, running = 0.0, []
    for _ in range(5000):
        now += rng.random()
        if one.allows(now) and len(running) < 5:
            running.append((now, one.began(now)))
        elif running:
            began, probe = running.pop(rng.randrange(len(running)))
            one.ended(probe)
            rng.choice((one.failed, one.failed, one.succeeded))(began, now)
        assert one.until <= now + POLICY.longest_seconds
    for _, probe in running:
        one.ended(probe)
    assert one.allows(now + POLICY.longest_seconds)
