"""Words both machines share: limits, what is readable, what a ticket is bound to, why things end."""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from common.sampling import ChoiceTokens
from common.transfer.key import Identity, TransferKey


class HandoffLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds; each is cut to the request's remaining time."""

    create_wait_seconds: float = 5.0  # a pull for an id that does not exist yet
    stall_seconds: float = 2.0  # no progress of the puller although data is ready
    room_seconds: float = 10.0  # in all, for a puller that says it waits for room
    unpulled_seconds: float = 5.0  # prefill has finished and nobody has pulled
    max_waiters: int = 1024
    max_tombstones: int = 4096


class Watermark(msgspec.Struct, frozen=True):
    """A region of a transfer: blocks before `blocks` in every layer, the others in layers before `layers`."""

    blocks: int = 0
    layers: int = 0

    def covers(self, other: "Watermark") -> bool:
        return self.blocks >= other.blocks and self.layers >= other.layers

    def join(self, other: "Watermark") -> "Watermark":
        return Watermark(max(self.blocks, other.blocks), max(self.layers, other.layers))


class Span(msgspec.Struct, frozen=True):
    """Blocks [first_block, first_block + block_count) in layers [first_layer, first_layer + layer_count)."""

    first_layer: int
    layer_count: int
    first_block: int
    block_count: int

    @property
    def units(self) -> int:
        """Blocks counted once a layer."""
        return self.layer_count * self.block_count


def spans_between(taken: Watermark, ready: Watermark, num_blocks: int, num_layers: int) -> Iterator[Span]:
    """What is in `ready` and not in `taken`, as at most two rectangles. Requires taken.layers <= ready.layers."""
    start = taken.blocks
    stop = max(start, ready.blocks)  # a puller's own hits may reach beyond what the owner has announced
    if stop > start and num_layers > taken.layers:
        yield Span(taken.layers, num_layers - taken.layers, start, stop - start)
    if num_blocks > stop and ready.layers > taken.layers:
        yield Span(taken.layers, ready.layers - taken.layers, stop, num_blocks - stop)


def inside(span: Span, ready: Watermark, num_blocks: int, num_layers: int) -> bool:
    """Whether all of a span may be read. Out-of-range spans never may."""
    last_block = span.first_block + span.block_count
    last_layer = span.first_layer + span.layer_count
    if min(span.first_layer, span.first_block) < 0 or min(span.layer_count, span.block_count) < 1:
        return False
    if last_block > num_blocks or last_layer > num_layers:
        return False
    return last_block <= ready.blocks or last_layer <= ready.layers


class Grant(msgspec.Struct, frozen=True):
    """What a ticket is bound to. The owner keeps it; the puller shows the same."""

    key: TransferKey
    ticket: bytes
    owner: Identity
    puller: Identity
    tenant: str


class Started(msgspec.Struct, frozen=True):
    """The owner's blocks in prompt order with their generations; token_count tokens will be in them."""

    token_count: int
    blocks: tuple[int, ...]
    generations: tuple[int, ...]


class Finished(msgspec.Struct, frozen=True):
    """The prompt is computed. token_hash: common.cache.keys.token_hash over its token_count tokens."""

    key: TransferKey
    token_count: int
    token_hash: bytes
    first: tuple[ChoiceTokens, ...] = ()

    @property
    def all_ended(self) -> bool:
        """Every choice ended with its first token: nothing is left to decode."""
        return bool(self.first) and all(choice.finish_reason for choice in self.first)


class End(StrEnum):
    """Why a publication ended."""

    DONE = "done"
    PULLER_LEFT = "the puller's stream ended"
    CANCELLED = "cancelled"
    FAILED = "prefill failed"
    SUPERSEDED = "a newer attempt took its place"
    STALLED = "the puller made no progress"
    UNPULLED = "nobody pulled"
    EXPIRED = "the request's time is over"


class Refusal(StrEnum):
    """Why a pull, read or publication is not accepted. Never says which secret was wrong."""

    UNKNOWN = "no such transfer"
    CREDENTIALS = "ticket, worker or tenant do not match"
    USED = "ticket already used"
    OVER = "the transfer is over"
    STALE = "a newer attempt exists"
    INCARNATION = "meant for another life of this worker"
    DUPLICATE = "already published"
    TOO_MANY = "too many pulls are waiting"
    NOT_READABLE = "outside of what is readable"
