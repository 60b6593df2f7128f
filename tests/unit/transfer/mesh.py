"""Both sides of a transfer in one process: real loopback gRPC, real pools, an engine whose steps the test takes."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from common.cache.keys import KvLayout, token_hash
from common.engine.messages import Reserved
from common.policies.handoff.terms import HandoffLimits
from common.rpc.interceptor import ServerInterceptor
from common.sampling import ChoiceTokens
from common.transfer.channel_shm import ShmServer
from common.transfer.key import Identity, TransferKey
from common.transfer.pool_memory import PoolMemory
from common.transfer.publications import Publication, PublicationTable
from common.transfer.puller import Puller, PullResult, PullTarget
from common.transfer.service import TransferService
from common.transfer.tables import PublicationTables
from epd.v1 import transfer_pb2_grpc

LAYERS, BLOCK_SIZE, POOL_BLOCKS = 4, 16, 32
LAYOUT = KvLayout(
    model="m", revision="r", dtype="float32", num_layers=LAYERS, num_kv_heads=2, head_dim=8, block_size=BLOCK_SIZE
)
TICKET = b"t" * 16
TENANT = "acme"
PULLER = Identity("decode-0", "d1")
TOKENS = list(range(100, 170))  # 70 tokens: five blocks, the last one partial
BLOCKS = [3, 4, 9, 1, 20]
PATIENCE_SECONDS = 20.0  # a failing test ends, a passing one never waits for it

_requests = itertools.count()


def new_key(attempt: int = 1, part: int = 0) -> TransferKey:
    return TransferKey(next(_requests).to_bytes(16, "big"), 0, attempt, part)


def plain_channel(address: str, _: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address)


def first_token(finish_reason: str | None = None) -> list[ChoiceTokens]:
    return [ChoiceTokens(choice=0, token_ids=[7], finish_reason=finish_reason)]


def prompt(token_ids: Sequence[int]) -> dict[str, Any]:
    """What a PullTarget says of a prompt."""
    blocks = -(-len(token_ids) // BLOCK_SIZE)
    return {"token_count": len(token_ids), "content_hash": token_hash(token_ids), "num_blocks": blocks}


class FakeEngine:
    """Pool and progress of an engine; the test computes."""

    def __init__(self, layout: KvLayout = LAYOUT) -> None:
        self.layout = layout
        self.pool = PoolMemory.create(layout.num_layers, POOL_BLOCKS, layout.unit_bytes)
        self.pool.generations[:] = np.arange(POOL_BLOCKS) + 1000
        self._moved = asyncio.Condition()

    def fill(self, blocks: Sequence[int], seed: int = 1) -> None:
        shape = (self.layout.num_layers, len(blocks), self.layout.unit_bytes)
        self.pool.data[:, blocks] = np.random.default_rng(seed).integers(1, 256, shape, np.uint8)

    async def reach(self, step: int, layers: int = LAYERS) -> None:
        self.pool.set_progress(step, layers)
        async with self._moved:
            self._moved.notify_all()

    async def wait_progress(self, step: int, layers: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self.pool.progress() >= (step, layers))


class Table(PublicationTable):
    """Wakes whoever waits for something to happen to a publication."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.happened = asyncio.Condition()
        self._notices: set[asyncio.Task[None]] = set()

    def _carry_out(self, outcome: Any) -> None:
        super()._carry_out(outcome)
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    async def _notify(self) -> None:
        async with self.happened:
            self.happened.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), self.happened:
            await self.happened.wait_for(condition)

    def state(self, key: TransferKey) -> Any:
        return self._table.owners.get(key)


class OwnerSide:
    """A prefill worker without its prefill service."""

    def __init__(self, run_dir: Path | None, limits: HandoffLimits, layout: KvLayout, name: str, life: str) -> None:
        self.identity = Identity(name, life)
        self.engine = FakeEngine(layout)
        self.table = Table(self.identity, self.engine, limits=limits)
        tables = PublicationTables(kv=self.table)
        self.shm = ShmServer(run_dir, tables) if run_dir else None
        self.service = TransferService(tables, nonce=self.shm.nonce if self.shm else b"")
        self.server = grpc.aio.server(interceptors=[ServerInterceptor()])
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(self.service, self.server)
        self.address = ""
        self.releases = 0

    async def start(self, port: int = 0) -> "OwnerSide":
        self.address = f"127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self.server.start()
        if self.shm:
            await self.shm.start()
        return self

    async def stop(self) -> None:
        self.table.shut_down()
        if self.shm:
            await self.shm.stop()
        await self.server.stop(0)

    def publish(self, key: TransferKey, *, deadline_seconds: float = 60.0, ticket: bytes = TICKET) -> Publication:
        return self.table.publish(
            key,
            ticket,
            puller=PULLER,
            tenant=TENANT,
            deadline_seconds=deadline_seconds,
            on_release=self._released,
        )

    def _released(self) -> None:
        self.releases += 1

    def start_computing(self, publication: Publication, blocks: Sequence[int] = BLOCKS) -> None:
        generations = [int(self.engine.pool.generations[block]) for block in blocks]
        publication.started(blocks, generations, len(TOKENS))

    def compute_all(self, publication: Publication, finish_reason: str | None = None) -> None:
        """The whole prompt at once."""
        self.engine.fill(BLOCKS)
        self.start_computing(publication)
        publication.finished(first_token(finish_reason), len(TOKENS), token_hash(TOKENS))


class PullerSide:
    """A decode worker without its decode service."""

    def __init__(self, puller: Puller, pool: PoolMemory) -> None:
        self.puller = puller
        self.pool = pool
        self.room = asyncio.Event()
        self.room.set()
        self.hit_blocks = 0
        self.reserved_for: list[int] = []
        self.blocks = [11, 10, 5, 6, 7]

    async def reserve(self, token_count: int) -> Reserved:
        self.reserved_for.append(token_count)
        await self.room.wait()
        spare = [30]  # the engine adds one a choice
        return Reserved(
            seq="s", blocks=self.blocks + spare, generations=[0] * 6, hit_blocks=self.hit_blocks, wait_seconds=0.0
        )

    def target(self, owner: OwnerSide, key: TransferKey, **changes: Any) -> PullTarget:
        fields: dict[str, Any] = {
            "key": key,
            "ticket": TICKET,
            "owner": owner.identity,
            "address": owner.address,
            "tenant": TENANT,
            "deadline_seconds": 60.0,
            **prompt(changes.pop("token_ids", TOKENS)),
        }
        return PullTarget(**{**fields, **changes})

    def pull(self, owner: OwnerSide, key: TransferKey, **changes: Any) -> "asyncio.Task[PullResult]":
        async def run() -> PullResult:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return await self.puller.pull(self.target(owner, key, **changes), self.reserve)

        return asyncio.create_task(run())

    def has(self, owner: OwnerSide, blocks: slice = slice(None), layers: slice = slice(None)) -> bool:
        """Whether these of the prompt's blocks are here, byte for byte."""
        mine = self.pool.data[layers][:, self.blocks[blocks]]
        return np.array_equal(mine, owner.engine.pool.data[layers][:, BLOCKS[blocks]]) and bool(mine.all())


class Mesh:
    """Makes both sides and takes them down."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._ends: list[Callable[[], Awaitable[None]]] = []

    async def owner(
        self,
        *,
        limits: HandoffLimits | None = None,
        layout: KvLayout = LAYOUT,
        shm: bool = True,
        name: str = "prefill-0",
        life: str = "p1",
        port: int = 0,
    ) -> OwnerSide:
        side = OwnerSide(self.run_dir if shm else None, limits or HandoffLimits(), layout, name, life)
        await side.start(port)
        self._ends.append(side.stop)
        return side

    def puller(
        self, channel: str = "shm", *, bytes_per_second: float = 0.0, limits: HandoffLimits | None = None
    ) -> PullerSide:
        channels = ("shm", "grpc") if channel == "shm" else (channel,)
        pool = PoolMemory.create(LAYERS, POOL_BLOCKS, LAYOUT.unit_bytes)
        puller = Puller(
            PULLER,
            pool,
            LAYOUT,
            plain_channel,
            channels=channels,
            run_dir=str(self.run_dir),
            bytes_per_second=bytes_per_second,
            limits=limits,
        )
        self._ends.append(puller.close)
        return PullerSide(puller, pool)

    async def close(self) -> None:
        for end in reversed(self._ends):
            await end()
