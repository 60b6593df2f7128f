"""Where a request's time went, whether it met its objectives, and which hop to blame when it did not.

Times are durations of one clock, the gateway's, or durations that workers measured; clocks of two machines are never
compared.

    TTFT  = sum of the hops on the way to the first token                      (+ unattributed)
    total = sum of those and of the hops on the way from there to the last one (+ unattributed)
    TPOT  = (last token − first token) / (tokens − 1) of the choice that ended last; 0 with one token
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from common import telemetry as names

# Share of the TTFT target that each hop may use up; the largest excess over its share is to blame. Ours, not published.
TTFT_SHARES: Mapping[str, float] = {
    names.GATEWAY_ADMIT: 0.02,
    names.GATEWAY_PREPROCESS: 0.04,
    names.GATEWAY_ROUTE: 0.02,
    names.ENCODE_RPC: 0.02,
    names.ENCODE_QUEUE: 0.03,
    names.ENCODE_PREPROCESS: 0.02,
    names.ENCODE_FORWARD: 0.10,
    names.PREFILL_RPC: 0.03,
    names.DECODE_RPC: 0.03,
    names.EMBEDDING_PULL: 0.01,
    names.PREFILL_QUEUE: 0.15,
    names.CACHE_LOOKUP: 0.01,
    names.PREFILL_FORWARD: 0.47,
    names.GATEWAY_EMIT: 0.02,
    names.UNATTRIBUTED: 0.03,
}
# The same for the time after the first token, whose target is TPOT target · (tokens − 1).
DECODE_SHARES: Mapping[str, float] = {
    names.TRANSFER_PULL: 0.03,
    names.DECODE_RESERVE: 0.02,
    names.DECODE_QUEUE: 0.02,
    names.DECODE_RPC: 0.02,
    names.DECODE_FIRST_STEP: 0.05,
    names.DECODE_STEPS: 0.82,
    names.GATEWAY_EMIT: 0.02,
    names.UNATTRIBUTED: 0.02,
}


class Hop(msgspec.Struct, frozen=True):
    name: str  # a span or hop name of common/telemetry.py
    seconds: float
    where: str  # worker_id, or "gateway"
    attempt: int = 0  # of those that sent tokens; the hops of two are kept apart


class SloTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_seconds: float = 0.5
    tpot_seconds: float = 0.05


class Verdict(msgspec.Struct, frozen=True):
    met: bool
    blame: str  # empty when met


def fill(measured_seconds: float, hops: Sequence[Hop]) -> list[Hop]:
    """The hops, made to add up to what was measured around them.

    Less: the rest becomes `unattributed`. More (a hop that overlapped another, or a coarse clock): the last hops are
    cut, since time cannot have been spent twice on the critical path.
    """
    left = max(0.0, measured_seconds)
    filled = []
    for hop in hops:
        seconds = min(max(0.0, hop.seconds), left)
        left -= seconds
        filled.append(msgspec.structs.replace(hop, seconds=seconds))
    return [*filled, Hop(names.UNATTRIBUTED, left, "gateway")] if left > 0 else filled


def merge(hops: Iterable[Hop]) -> list[Hop]:
    """One entry per name, place and attempt, in order of first appearance; unattributed last."""
    sums: dict[tuple[str, str, int], float] = {}
    for hop in hops:
        key = (hop.name, hop.where, hop.attempt)
        sums[key] = sums.get(key, 0.0) + hop.seconds
    merged = [Hop(name, seconds, where, attempt) for (name, where, attempt), seconds in sums.items()]
    return sorted(merged, key=lambda hop: hop.name == names.UNATTRIBUTED)


def tpot(first_seconds: float, last_seconds: float, tokens: int) -> float:
    """Mean seconds per token after the first."""
    return (last_seconds - first_seconds) / (tokens - 1) if tokens > 1 else 0.0


def judge(
    target: SloTarget,
    *,
    ttft_seconds: float,
    tpot_seconds: float,
    tokens: int,
    ttft_hops: Sequence[Hop],
    decode_hops: Sequence[Hop],
) -> Verdict:
    """TTFT is judged first: a request that missed both is blamed on what delayed its first token."""
    if ttft_seconds > target.ttft_seconds:
        return Verdict(False, blame(ttft_hops, TTFT_SHARES, target.ttft_seconds))
    if tpot_seconds > target.tpot_seconds:
        return Verdict(False, blame(decode_hops, DECODE_SHARES, target.tpot_seconds * (tokens - 1)))
    return Verdict(True, "")


def blame(hops: Iterable[Hop], shares: Mapping[str, float], target_seconds: float) -> str:
    """Name of the hop with the largest excess over its share of the target; a hop without a share has none to use up.

    The shares add up to at most 1, so a sum above the target has at least one hop in excess.
    """
    sums: dict[str, float] = {}
    for hop in hops:
        sums[hop.name] = sums.get(hop.name, 0.0) + hop.seconds
    excess = {name: seconds - shares.get(name, 0.0) * target_seconds for name, seconds in sums.items()}
    return max(excess, key=lambda name: excess[name], default=names.UNATTRIBUTED)
