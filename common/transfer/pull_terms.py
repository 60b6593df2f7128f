"""What goes into a pull and what comes out."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import msgspec

from common.policies.handoff.terms import HandoffLimits
from common.sampling import ChoiceTokens
from common.transfer.channel import RateLimit
from common.transfer.key import Identity, TransferKey
from common.transfer.layout import PoolLayout
from common.transfer.pool_memory import PoolMemory


class Room(Protocol):
    """Blocks of the puller's pool in the transfer's order; the first hit_blocks are right already."""

    @property
    def blocks(self) -> Sequence[int]: ...

    @property
    def hit_blocks(self) -> int: ...


ReserveCall = Callable[[int], Awaitable[Room]]


class PullTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What to pull, from whom.

    token_count: tokens whose KV, or rows of the images whose embeddings, are expected. content_hash: token_hash or
    embedding_hash of them, made here: what differs is refused.
    """

    key: TransferKey
    ticket: bytes
    owner: Identity
    address: str  # host:port of the owner's gRPC server
    tenant: str
    token_count: int
    content_hash: bytes
    num_blocks: int
    deadline_seconds: float


class PullResult(msgspec.Struct, frozen=True, kw_only=True):
    """Every check passed.

    moved False: all choices ended with their first token, so not all blocks were moved and they must not be committed:
    cancel the reservation (`reserved` is None when there is none).
    """

    first: list[ChoiceTokens]
    bytes_read: int
    channel: str
    moved: bool
    reserved: Room | None
    exposed_seconds: float  # from hearing that prefill has finished until ready to commit
    total_seconds: float


class Home(Protocol):
    """What a pull needs of its Puller."""

    identity: Identity
    pool: PoolMemory
    layout: PoolLayout
    run_dir: str
    channels: tuple[str, ...]
    limits: HandoffLimits
    rate_limit: RateLimit | None

    @property
    def threads(self) -> Executor: ...

    def in_background(self, ending: Coroutine[Any, Any, None]) -> None: ...
