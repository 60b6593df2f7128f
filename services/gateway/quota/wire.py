"""Quota messages from and to what the policy uses."""

import math

from common.errors import EpdError, InvalidArgument, by_reason
from common.policies.limits import WINDOW_SECONDS, Amounts, Usage
from epd.v1 import quota_pb2 as pb

_REASONS = by_reason()


def amounts_to_proto(amounts: Amounts) -> pb.QuotaAmounts:
    return pb.QuotaAmounts(**dict(amounts.items()))


def amounts_from_proto(message: pb.QuotaAmounts) -> Amounts:
    return Amounts(
        requests=message.requests,
        in_flight=message.in_flight,
        prompt_tokens=message.prompt_tokens,
        image_pixels=message.image_pixels,
    )


def age_from_proto(seconds: float) -> float:
    """Seconds before now, not negative. Raises InvalidArgument for what is no number."""
    if not math.isfinite(seconds):
        raise InvalidArgument("age_seconds must be a number", field="age_seconds")
    return max(0.0, seconds)


def state_to_proto(tenant: str, usage: Usage, now: float) -> pb.QuotaState:
    """A second's charges get the age of their end: they never count for a shorter time there than here."""
    seconds: dict[int, dict[str, int]] = {}
    for kind, window in usage.windows.items():
        window.used(now)
        for second, amount in window.bins():
            seconds.setdefault(second, {})[kind] = amount
    bins = [
        pb.QuotaBin(age_seconds=max(0.0, now - second - 1), amounts=pb.QuotaAmounts(**amounts))
        for second, amounts in sorted(seconds.items())
    ]
    return pb.QuotaState(tenant=tenant, in_flight=usage.in_flight, charges=bins)


def usage_from_proto(message: pb.QuotaState, now: float) -> Usage:
    """Raises InvalidArgument."""
    if len(message.charges) > WINDOW_SECONDS + 1:
        raise InvalidArgument(f"a state has at most {WINDOW_SECONDS + 1} charges", field="charges")
    usage = Usage()
    usage.in_flight = message.in_flight
    for charge in message.charges:
        at = now - age_from_proto(charge.age_seconds)
        for kind, window in usage.windows.items():
            window.charge(getattr(charge.amounts, kind), at, now)
    return usage


def refused_to_proto(error: EpdError) -> pb.QuotaRefused:
    return pb.QuotaRefused(
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_seconds=error.retry_after_seconds or 0.0,
    )


def refused_from_proto(message: pb.QuotaRefused) -> EpdError:
    kind = _REASONS.get(message.reason, EpdError)
    return kind(message.message, field=message.field, retry_after_seconds=message.retry_after_seconds or None)
