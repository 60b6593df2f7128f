"""What goes into a pull and what comes out."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import msgspec

from common.cache.keys import KvLayout
from common.engine.messages import Reserved
from common.policies.handoff.terms import HandoffLimits
from common.sampling import ChoiceTokens
from common.transfer.channel import RateLimit
from common.transfer.key import Identity, TransferKey
from common.transfer.pool_memory import PoolMemory

ReserveCall = Callable[[int], Awaitable[Reserved]]


class PullTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What to pull, from whom. token_ids: all whose KV is expected, prompt and resumed output."""

    key: TransferKey
    ticket: bytes
    owner: Identity
    address: str  # host:port of the owner's gRPC server
    tenant: str
    token_ids: Sequence[int]
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
    reserved: Reserved | None
    exposed_seconds: float  # from hearing that prefill has finished until ready to commit
    total_seconds: float


class Home(Protocol):
    """What a pull needs of its Puller."""

    identity: Identity
    pool: PoolMemory
    layout: KvLayout
    run_dir: str
    channels: tuple[str, ...]
    limits: HandoffLimits
    rate_limit: RateLimit | None

    @property
    def threads(self) -> Executor: ...

    def in_background(self, ending: Coroutine[Any, Any, None]) -> None: ...
