"""Time sums, verdicts and blame, by hand and for any hops."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import telemetry as names
from common.policies.slo import DECODE_SHARES, TTFT_SHARES, Hop, SloTarget, blame, fill, judge, merge, tpot

seconds = st.floats(0, 10)
hops = st.lists(st.builds(Hop, st.sampled_from(sorted(TTFT_SHARES)), seconds, st.just("w")), max_size=8)


@settings(deadline=None)
@given(seconds, hops)
def test_filled_hops_add_up_to_what_was_measured(measured: float, found: list[Hop]) -> None:
    filled = fill(measured, found)
    assert sum(hop.seconds for hop in filled) == pytest.approx(measured, abs=1e-9)
    assert all(hop.seconds >= 0 for hop in filled)
    for before, after in zip(found, filled, strict=False):
        assert after.seconds <= before.seconds


def test_fill_by_hand() -> None:
    found = [Hop("a", 1.0, "w"), Hop("b", 2.0, "w")]
    assert fill(4.0, found) == [*found, Hop(names.UNATTRIBUTED, 1.0, "gateway")]
    assert fill(2.5, found) == [Hop("a", 1.0, "w"), Hop("b", 1.5, "w")]
    assert fill(3.0, found) == found


@settings(deadline=None)
@given(hops)
def test_merge_keeps_the_sum(found: list[Hop]) -> None:
    merged = merge(found)
    assert sum(hop.seconds for hop in merged) == pytest.approx(sum(hop.seconds for hop in found))
    assert len({(hop.name, hop.where) for hop in merged}) == len(merged)
    assert names.UNATTRIBUTED not in [hop.name for hop in merged[:-1]]


def test_tpot() -> None:
    assert tpot(1.0, 3.0, 5) == 0.5
    assert tpot(1.0, 1.0, 1) == 0.0


def test_shares_leave_no_room_for_a_miss_without_blame() -> None:
    assert sum(TTFT_SHARES.values()) <= 1.0 + 1e-9
    assert sum(DECODE_SHARES.values()) <= 1.0 + 1e-9


def test_blame_is_the_largest_excess_over_the_share_not_the_largest_hop() -> None:
    # Target 0.5 s: forward may take 0.235, the queue 0.075.
    found = [Hop(names.PREFILL_FORWARD, 0.40, "p"), Hop(names.PREFILL_QUEUE, 0.25, "p")]
    assert blame(found, TTFT_SHARES, 0.5) == names.PREFILL_QUEUE  # 0.175 over against 0.165
    assert blame([Hop(names.GATEWAY_RETRY, 0.3, "gateway"), *found], TTFT_SHARES, 0.5) == names.GATEWAY_RETRY


def verdict(ttft: float, per_token: float, tokens: int = 11):
    return judge(
        SloTarget(ttft_seconds=0.5, tpot_seconds=0.05),
        ttft_seconds=ttft,
        tpot_seconds=per_token,
        tokens=tokens,
        ttft_hops=[Hop(names.PREFILL_FORWARD, ttft, "p")],
        decode_hops=[Hop(names.TRANSFER_PULL, 0.01, "d"), Hop(names.DECODE_STEPS, per_token * (tokens - 1), "d")],
    )


@pytest.mark.parametrize(
    ("ttft", "per_token", "expected"),
    [
        (0.5, 0.05, (True, "")),
        (0.6, 0.05, (False, names.PREFILL_FORWARD)),
        (0.5, 0.06, (False, names.DECODE_STEPS)),
        (0.6, 0.06, (False, names.PREFILL_FORWARD)),
    ],
)
def test_judge(ttft: float, per_token: float, expected: tuple[bool, str]) -> None:
    found = verdict(ttft, per_token)
    assert (found.met, found.blame) == expected


@settings(deadline=None)
@given(hops, st.floats(0.01, 5))
def test_a_miss_always_has_a_hop_in_excess(found: list[Hop], target: float) -> None:
    if sum(hop.seconds for hop in found) <= target * 1.0001:
        return
    name = blame(found, TTFT_SHARES, target)
    spent = sum(hop.seconds for hop in found if hop.name == name)
    assert spent > TTFT_SHARES[name] * target
