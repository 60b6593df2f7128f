"""The reading side: pulls a prompt's KV, or images' embeddings, into blocks of the own pool, early where it can."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from common import telemetry
from common.errors import EpdError
from common.policies.handoff.tables import Attempts
from common.policies.handoff.terms import HandoffLimits
from common.transfer.channel import RateLimit
from common.transfer.key import Identity, TransferKey
from common.transfer.layout import PoolLayout
from common.transfer.peers import Peers
from common.transfer.pool_memory import PoolMemory
from common.transfer.publications import refused
from common.transfer.pull import Pull
from common.transfer.pull_terms import PullResult, PullTarget, ReserveCall

__all__ = ["PullResult", "PullTarget", "Puller"]

COPY_THREADS = 2


class Puller:
    """All pulls into one pool of a worker."""

    def __init__(
        self,
        identity: Identity,
        pool: PoolMemory,
        layout: PoolLayout,
        connect: Callable[[str, str], grpc.aio.Channel],
        *,
        channels: Sequence[str] = ("shm", "grpc"),
        run_dir: str = "",
        bytes_per_second: float = 0.0,
        limits: HandoffLimits | None = None,
    ) -> None:
        """pool: mapped writable. connect(address, worker_id). channels: allowed ones, best first. run_dir: where owners
        of this host have their sockets, empty: no `shm`. bytes_per_second: throttle of all pulls together, 0: none."""
        self.identity = identity
        self.pool = pool
        self.layout = layout
        self.run_dir = run_dir
        self.channels = tuple(name for name in channels if name != "shm" or run_dir)
        self.limits = limits or HandoffLimits()
        self.rate_limit = RateLimit(bytes_per_second) if bytes_per_second else None
        self.threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="epd-copy")
        self._peers = Peers(connect)
        self._attempts = Attempts(self.limits)
        self._running: dict[TransferKey, asyncio.Task[Any]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def open_pulls(self) -> int:
        return len(self._running)

    async def pull(self, target: PullTarget, reserve: ReserveCall) -> PullResult:
        """Pulls one transfer. reserve(token_count) is awaited once the owner has blocks, and cancelled on failure.

        When this raises, cancelled included, nothing writes to the reserved blocks any more and the caller gives them
        back. Raises what `reserve` raised; TransferFailed and its kin; LayoutMismatch; WrongIncarnation;
        DeadlineExceeded; Overloaded; DuplicateRequest.
        """
        key = target.key
        if why := self._attempts.refusal(key):
            raise refused(why, key)
        older = self._attempts.begin(key)
        if older in self._running:
            self._running[older].cancel()  # a newer attempt ends it
        task = asyncio.current_task()
        assert task is not None
        self._running[key] = task
        try:
            with self._peers.use(target.address, target.owner) as peer:
                return await Pull(self, target, peer, reserve).run()
        except EpdError as error:
            telemetry.current().metrics.transfer_failures.labels(reason=error.reason).inc()
            raise
        finally:
            del self._running[key]
            self._attempts.end(key)

    def cancel(self, key: TransferKey) -> None:
        """Ends this attempt, also one that has not begun. Idempotent."""
        live = self._attempts.live_up_to(key)
        if live in self._running:
            self._running[live].cancel()
        self._attempts.end(key)

    def in_background(self, ending: Coroutine[Any, Any, None]) -> None:
        """For a stream's last words: nobody has to wait for them."""
        task = asyncio.get_running_loop().create_task(ending)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Cancels what runs and returns when nothing writes to the pool any more."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._peers.close()
        self.threads.shutdown(wait=True)
