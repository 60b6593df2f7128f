"""Connections to owners, kept between pulls: one gRPC channel and one mapped pool for each life of a worker."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from common.transfer.key import Identity
from common.transfer.pool_memory import PoolMemory
from epd.v1 import transfer_pb2_grpc

MAX_IDLE = 32


class Peer:
    """One owner."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stub: Any = transfer_pb2_grpc.TransferServiceStub(channel)
        self.nonce = b""  # of its socket, once it was read
        self.memory: PoolMemory | None = None  # its pool, once it was mapped
        self.users = 0


class Peers:
    """A dead life's connections go when its successor is met; idle ones when there are too many."""

    def __init__(self, connect: Callable[[str, str], grpc.aio.Channel]) -> None:
        """connect(address, worker_id): with TLS, to the one that has a certificate of this worker."""
        self._connect = connect
        self._peers: dict[tuple[Identity, str], Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def use(self, address: str, owner: Identity) -> Iterator[Peer]:
        key = (owner, address)
        peer = self._peers.pop(key, None) or Peer(address, self._connect(address, owner.worker_id))
        self._peers[key] = peer  # the most recently used one is last
        peer.users += 1
        try:
            yield peer
        finally:
            peer.users -= 1
            self._tidy(owner)

    async def close(self) -> None:
        for peer in self._peers.values():
            self._close(peer)
        self._peers.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _tidy(self, latest: Identity) -> None:
        idle = [key for key, peer in self._peers.items() if not peer.users]
        others = [key for key in idle if key[0].worker_id == latest.worker_id and key[0] != latest]
        for key in {*others, *idle[: max(0, len(idle) - MAX_IDLE)]}:
            self._close(self._peers.pop(key))

    def _close(self, peer: Peer) -> None:
        if peer.memory:
            peer.memory.close()
        task = asyncio.get_running_loop().create_task(peer.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
