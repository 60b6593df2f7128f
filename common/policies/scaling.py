"""How many workers a pool should have, from what was measured of it.

    prefill = ⌈prompts/s · prompt tokens · (1 − share cached) / tokens/s of one worker⌉
    decode  = ⌈prompts/s · output tokens / tokens/s of one worker⌉

after Dynamo's planner in its throughput mode. A pool without traffic has its least number. What was not measured, or
makes no sense, changes nothing: a blind scaler holds what is there. A pure function: a caller brings the figures.
"""

import math

import msgspec


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one pool, in workers. Raises ValueError unless 1 ≤ least ≤ most."""

    least: int = 1
    most: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"a pool has 1 ≤ least ≤ most workers, not {self.least} and {self.most}")


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived in an interval, means over its requests. Tokens are what one request brings to the pool: its
    prompt's for prefill, its output's for decode; cached_share of them, in [0, 1], needs no work."""

    requests_per_second: float
    tokens: float
    cached_share: float = 0.0

    def tokens_per_second(self) -> float:
        """NaN when the figures are not those of anything real. Means of no requests are of no account."""
        if self.requests_per_second == 0:
            return 0.0
        sound = self.requests_per_second > 0 and self.tokens >= 0 and 0 <= self.cached_share <= 1
        return self.requests_per_second * self.tokens * (1 - self.cached_share) if sound else math.nan


def workers(demand: Demand | None, worker_tokens_per_second: float, current: int, policy: ScalingPolicy) -> int:
    """Workers that the pool should have, within the policy's bounds.

    demand: None when metrics are gone. worker_tokens_per_second: what one worker does; of no account when no work
    came. current: how many there are.
    """
    needed = math.nan if demand is None else demand.tokens_per_second()
    if needed > 0:
        needed = needed / worker_tokens_per_second if worker_tokens_per_second > 0 else math.nan
    wanted = math.ceil(needed) if math.isfinite(needed) else current
    return min(max(wanted, policy.least), policy.most)
