"""A request's time line on the gateway's clock, and the hops it adds up to.

The critical path is that of the choice that ended last: what came before routing, then its attempts one by one.
"""

from collections.abc import Iterable, Sequence

import msgspec

from common import telemetry as names
from common.policies import slo
from common.policies.slo import Hop, SloTarget, Verdict
from common.rpc import wire
from epd.v1 import generation_pb2, types_pb2

GATEWAY = "gateway"
# Of the hops of one attempt, in time: what failed before it and the back-off come first.
_ORDER = (
    names.GATEWAY_ADMIT,
    names.GATEWAY_PREPROCESS,
    names.GATEWAY_RETRY,
    names.GATEWAY_QUEUE,
    names.GATEWAY_ROUTE,
    names.ENCODE_RPC,
    names.ENCODE_QUEUE,
    names.ENCODE_PREPROCESS,
    names.ENCODE_FORWARD,
    names.PREFILL_RPC,
    names.EMBEDDING_PULL,
    names.PREFILL_QUEUE,
    names.CACHE_LOOKUP,
    names.PREFILL_FORWARD,
    names.DECODE_RESERVE,
    names.TRANSFER_PULL,
    names.DECODE_QUEUE,
    names.DECODE_FIRST_STEP,
    names.DECODE_RPC,
    names.DECODE_STEPS,
    names.GATEWAY_EMIT,
    names.UNATTRIBUTED,
)
_UP_TO_FIRST_TOKEN = frozenset({names.EMBEDDING_PULL, names.PREFILL_QUEUE, names.CACHE_LOOKUP, names.PREFILL_FORWARD})
_UP_TO_FIRST_STEP = frozenset({names.DECODE_RESERVE, names.TRANSFER_PULL, names.DECODE_QUEUE, names.DECODE_FIRST_STEP})


class AttemptRecord(msgspec.Struct, kw_only=True):
    """Instants in seconds of the event loop's clock; 0 means not reached."""

    attempt: int
    started: float  # before routing
    queued_seconds: float = 0.0  # of routing: waiting for room at workers
    encoding: float = 0.0  # encode workers called
    called: float = 0.0
    first: float = 0.0  # arrival of the first tokens: of prefill, or of decode when it computed the prompt
    first_step: float = 0.0  # arrival of the first tokens that decode made after those
    last: float = 0.0  # arrival of the last tokens
    failed: float = 0.0
    blocked_seconds: float = 0.0  # waiting for the client
    prefill_worker: str = ""
    decode_worker: str = ""
    encode_workers: list[str] = []
    encode_hops: list[Hop] = []  # of the encode call that ended last
    cached_images: int = 0
    hops: list[Hop] = []  # what the workers reported
    cached_tokens: int = 0
    transfer_bytes: int = 0
    transfer_channel: str = ""

    def add(self, hops: Iterable[types_pb2.HopTiming]) -> None:
        """Hops reported by a worker."""
        self.hops.extend(known(hops))

    def arrived(self, now: float) -> None:
        """Tokens have come."""
        if not self.first:
            self.first = now
        elif not self.first_step:
            self.first_step = now
        self.last = now


def known(hops: Iterable[types_pb2.HopTiming]) -> list[Hop]:
    """Names that we do not know are left to `unattributed`."""
    return [Hop(hop.name, wire.hop_seconds(hop), hop.where) for hop in hops if hop.name in _ORDER]


class TimeLine(msgspec.Struct, kw_only=True):
    """Instants of a whole request."""

    received: float
    admitted: float = 0.0
    prepared: float = 0.0
    first_sent: float = 0.0


def before_first_token(record: AttemptRecord) -> list[Hop]:
    """From the attempt's start to its first token."""
    own = [hop for hop in record.hops if hop.name in _UP_TO_FIRST_TOKEN]
    rest = record.first - record.called - sum(hop.seconds for hop in own)
    rpc = (
        Hop(names.PREFILL_RPC, rest, record.prefill_worker)
        if record.prefill_worker
        else Hop(names.DECODE_RPC, rest, record.decode_worker)
    )
    return [*_before_call(record), *own, rpc]


def _before_call(record: AttemptRecord) -> list[Hop]:
    """The queue, routing and, for images, the encode call that ended last."""
    routed = (record.encoding or record.called) - record.started
    routing = [
        Hop(names.GATEWAY_QUEUE, record.queued_seconds, GATEWAY),
        Hop(names.GATEWAY_ROUTE, routed - record.queued_seconds, GATEWAY),
    ]
    if not record.encoding:
        return routing
    rest = record.called - record.encoding - sum(hop.seconds for hop in record.encode_hops)
    where = record.encode_hops[0].where if record.encode_hops else GATEWAY
    return [
        *routing,
        *record.encode_hops,
        Hop(names.ENCODE_RPC, rest, where),
    ]


def after_first_token(record: AttemptRecord) -> list[Hop]:
    """From the attempt's first token to its last."""
    if not record.first_step:
        return []
    own = [hop for hop in record.hops if hop.name in _UP_TO_FIRST_STEP]
    gap = record.first_step - record.first
    spent = sum(hop.seconds for hop in own)
    window = record.last - record.first_step - record.blocked_seconds
    reported = [hop.seconds for hop in record.hops if hop.name == names.DECODE_STEPS]
    steps = min(window, reported[0]) if reported else window
    worker = record.decode_worker
    return [
        *slo.fill(gap, own)[: len(own)],
        Hop(names.DECODE_RPC, max(0.0, gap - spent) + max(0.0, window - steps), worker),
        Hop(names.DECODE_STEPS, steps, worker),
        Hop(names.GATEWAY_EMIT, record.blocked_seconds, GATEWAY),
    ]


def critical_path(line: TimeLine, records: Sequence[AttemptRecord], now: float) -> tuple[list[Hop], list[Hop]]:
    """(hops up to the first token, hops from there to `now`), each adding up to its part of the time line.

    An attempt that failed before its first token is all `gateway.retry`, a part of the attempt after it.
    """
    ttft = [
        Hop(names.GATEWAY_ADMIT, line.admitted - line.received, GATEWAY),
        Hop(names.GATEWAY_PREPROCESS, line.prepared - line.admitted, GATEWAY),
    ]
    rest: list[Hop] = []
    part = ttft
    ended = line.prepared
    number = 0  # attempts that broke off in mid-stream
    for record in records:
        if record.failed and not record.first:
            part.append(Hop(names.GATEWAY_RETRY, record.failed - ended, GATEWAY, number))
            ended = record.failed
            continue
        # From the failure before to this attempt's start: back-off. Before the first it is the way to the router.
        gap = names.GATEWAY_RETRY if record is not records[0] else names.GATEWAY_ROUTE
        part.append(Hop(gap, record.started - ended, GATEWAY, number))
        part.extend(_of(number, before_first_token(record)))
        if part is ttft:
            part.append(Hop(names.GATEWAY_EMIT, line.first_sent - record.first, GATEWAY))
            part = rest
        part.extend(_of(number, after_first_token(record)))
        ended = record.last
        if record.failed:
            number += 1
            part.append(Hop(names.GATEWAY_RETRY, record.failed - record.last, GATEWAY, number))
            ended = record.failed
    if part is rest:
        # Sending the first token went on beside the decode step, so only what is past both counts.
        rest.append(Hop(names.GATEWAY_EMIT, now - max(ended, line.first_sent), GATEWAY, number))
    first_sent = line.first_sent or now
    # Steps last: they are the ones that other hops overlap.
    rest.sort(key=lambda hop: hop.name == names.DECODE_STEPS)
    return _whole(first_sent - line.received, ttft), _whole(now - first_sent, rest)


def _whole(seconds: float, hops: list[Hop]) -> list[Hop]:
    return _in_order(hop for hop in slo.fill(seconds, hops) if hop.seconds > 0)


def _of(number: int, hops: Iterable[Hop]) -> list[Hop]:
    return [msgspec.structs.replace(hop, attempt=number) for hop in hops]


def _in_order(hops: Iterable[Hop]) -> list[Hop]:
    """In time, attempt by attempt; what no hop accounts for is last."""

    def place(hop: Hop) -> tuple[bool, int, int]:
        return hop.name == names.UNATTRIBUTED, hop.attempt, _ORDER.index(hop.name)

    return sorted(slo.merge(hops), key=place)


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request's figures."""

    ttft_seconds: float
    tpot_seconds: float
    total_seconds: float
    ttft_hops: list[Hop]
    total_hops: list[Hop]
    verdict: Verdict
    attempts: int
    prefill_worker: str
    decode_worker: str
    encode_workers: list[str]
    cached_tokens: int
    cached_images: int


def account(
    line: TimeLine, chains: Sequence[Sequence[AttemptRecord]], tokens: Sequence[int], target: SloTarget, now: float
) -> Account:
    """chains: the attempts of each choice; tokens: how many each choice got, in the same order."""
    slowest = max(range(len(chains)), key=lambda i: chains[i][-1].last if chains[i] else 0.0)
    records = chains[slowest]
    ttft_hops, decode_hops = critical_path(line, records, now)
    first = next((record for record in records if record.first), None)
    ttft = (line.first_sent or now) - line.received
    last = max((record.last for record in records), default=0.0)
    tpot = slo.tpot(first.first, last, tokens[slowest]) if first else 0.0
    verdict = slo.judge(
        target,
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        tokens=tokens[slowest],
        ttft_hops=ttft_hops,
        decode_hops=decode_hops,
    )
    final = records[-1] if records else AttemptRecord(attempt=0, started=0.0)
    return Account(
        ttft_seconds=ttft,
        tpot_seconds=tpot,
        total_seconds=now - line.received,
        ttft_hops=ttft_hops,
        total_hops=_in_order([*ttft_hops, *decode_hops]),
        verdict=verdict,
        attempts=max((record.attempt for chain in chains for record in chain), default=0),
        prefill_worker=final.prefill_worker,
        decode_worker=final.decode_worker,
        encode_workers=final.encode_workers,
        cached_tokens=first.cached_tokens if first else 0,
        cached_images=first.cached_images if first else 0,
    )


def to_proto(account: Account, trace_id: str) -> generation_pb2.Accounting:
    return generation_pb2.Accounting(
        trace_id=trace_id,
        ttft_seconds=account.ttft_seconds,
        total_seconds=account.total_seconds,
        tpot_seconds=account.tpot_seconds,
        ttft_hops=[wire.hop_to_proto(hop.name, hop.seconds, hop.where) for hop in account.ttft_hops],
        total_hops=[wire.hop_to_proto(hop.name, hop.seconds, hop.where) for hop in account.total_hops],
        attempts=account.attempts,
        slo_met=account.verdict.met,
        slo_blame=account.verdict.blame,
        prefill_worker=account.prefill_worker,
        decode_worker=account.decode_worker,
        encode_workers=account.encode_workers,
        cached_images=account.cached_images,
    )
