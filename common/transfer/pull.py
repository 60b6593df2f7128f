"""One pull under way.

Feeds the pure machine (common/policies/handoff/puller.py) with what the owner's stream, the reservation and the copies
report, and carries out what it decides. Cancelled anywhere, it first waits for its own copies.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from common import errors
from common.policies.handoff import puller as machine
from common.policies.handoff.terms import Finished, Started, Watermark, spans_between
from common.rpc import wire
from common.rpc.errors import from_rpc
from common.transfer.channel import BlockMap, Channel, split
from common.transfer.channel_grpc import GrpcChannel
from common.transfer.channel_shm import ShmChannel, ShmClient
from common.transfer.layout import show_layout
from common.transfer.peers import Peer
from common.transfer.pool_memory import PoolMemory
from common.transfer.pull_terms import Home, PullResult, PullTarget, ReserveCall, Room
from epd.v1 import transfer_pb2 as pb

log = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20  # read at once; the owner hears of progress after each
TURN_SECONDS = 0.02
WAITING_ACK_SECONDS = 0.5  # how often the owner hears that there is no room yet
CLOSE_SECONDS = 2.0  # for the owner to end the stream after done


class Pull:
    def __init__(self, home: Home, target: PullTarget, peer: Peer, reserve: ReserveCall) -> None:
        self._home, self._target, self._peer, self._reserve = home, target, peer, reserve
        self._now = asyncio.get_running_loop().time
        self._begin = self._finished_at = self._heard_at = self._now()
        expected = machine.Target(
            target.key, target.token_count, target.content_hash, target.num_blocks, home.layout.num_layers
        )
        self._machine = machine.open_pull(expected, self._begin, self._begin + target.deadline_seconds, home.limits)
        self._events: deque[machine.Event] = deque()
        self._wake = asyncio.Event()
        self._cause: BaseException | None = None  # of a failure, when it was not the machine's own finding
        self._tasks: dict[str, asyncio.Task[Any]] = {}  # stream, reserve, copy
        self._reserved: Room | None = None
        self._shm: ShmClient | None = None
        self._channel: Channel | None = None
        self._chosen = ""
        self._bytes = 0
        self._out: asyncio.Queue[pb.PullRequest] = asyncio.Queue()

    async def run(self) -> PullResult:
        """See Puller.pull."""
        cancelled: asyncio.CancelledError | None = None
        self._tasks["stream"] = asyncio.create_task(self._stream())
        while not self._machine.terminal:
            try:
                await self._wait()
            except asyncio.CancelledError as error:
                cancelled = error
                self._put(machine.Cancel())
            while self._events:
                self._step(self._events.popleft())
            self._step(machine.Tick())
        end = self._now()
        self._home.in_background(self._close())
        if cancelled:
            raise cancelled
        finished = self._machine.finished
        if self._machine.failure is not None or finished is None:
            raise self._failure()
        return PullResult(
            first=list(finished.first),
            bytes_read=self._bytes,
            channel=self._channel.name if self._channel else self._chosen,
            moved=self._machine.taken.covers(self._machine.everything),
            reserved=self._reserved,
            exposed_seconds=end - self._finished_at,
            total_seconds=end - self._begin,
        )

    # --- the machine ------------------------------------------------------------------------------------------------

    def _put(self, event: machine.Event) -> None:
        self._events.append(event)
        self._wake.set()

    async def _wait(self) -> None:
        """For an event or the machine's next due time; while waiting for room the owner is told from time to time."""
        due = machine.next_due(self._machine)
        if self._machine.reserving:
            due = min(self._heard_at + WAITING_ACK_SECONDS, due or float("inf"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(due):
                await self._wake.wait()
        self._wake.clear()
        if self._machine.reserving and self._now() >= self._heard_at + WAITING_ACK_SECONDS:
            self._acknowledge(self._machine.taken, waiting=True)

    def _step(self, event: machine.Event) -> None:
        self._machine, actions = machine.step(self._machine, event, self._now())
        for action in actions:
            match action:
                case machine.Reserve(token_count):
                    self._heard_at = self._now()
                    self._spawn("reserve", self._get_room(token_count), self._room_ended)
                case machine.Copy(taken, ready):
                    self._spawn("copy", self._copy(taken, ready), self._copy_ended)
                case machine.CancelReserve():
                    self._tasks["reserve"].cancel()
                case machine.CancelCopy():
                    self._tasks["copy"].cancel()
                case machine.SendAck(taken):
                    self._acknowledge(taken)
                case machine.SendDone():
                    self._out.put_nowait(pb.PullRequest(done=pb.PullDone()))
                case machine.CloseStream():
                    self._tasks["stream"].cancel()

    def _spawn(self, name: str, work: Coroutine[Any, Any, Any], ended: Callable[[asyncio.Task[Any]], None]) -> None:
        # A callback, since a task that is cancelled before its first step never runs its own code.
        task = self._tasks[name] = asyncio.create_task(work)
        task.add_done_callback(ended)

    def _failed(self, error: BaseException) -> str:
        self._cause = self._cause or error
        return type(error).__name__

    def _failure(self) -> BaseException:
        """The error to raise: one that tells the gateway to make the tensor again, or what is not to be repaired so.
        It names the owner unless that has explained itself: then the way between the two is at fault."""
        why, owner = self._machine.failure or "", self._target.owner.worker_id
        cause = self._cause
        if cause is None:
            late = self._now() >= self._machine.deadline
            return errors.DeadlineExceeded(why) if late else errors.TransferFailed(why, peer=owner)
        if not isinstance(cause, errors.EpdError):
            return cause
        if type(cause) in (errors.Unavailable, errors.Cancelled, errors.EpdError):
            return errors.TransferFailed(f"the owner's stream broke: {cause.message}", peer=owner)
        return cause

    # --- the stream to the owner ------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        try:
            await self._talk()
            self._put(machine.StreamEnd("the owner ended the stream"))
        except grpc.aio.AioRpcError as error:
            self._put(machine.StreamEnd(self._failed(from_rpc(error))))
        except (errors.EpdError, OSError) as error:
            self._put(machine.StreamEnd(self._failed(error)))

    async def _talk(self) -> None:
        opening = await self._opening()
        call = self._peer.stub.Pull(timeout=self._target.deadline_seconds)
        writing = asyncio.create_task(self._write(call, opening))
        try:
            async for response in call:
                self._put(self._heard(response))
        finally:
            writing.cancel()
            call.cancel()  # the lease ends now; without effect when it has ended

    async def _opening(self) -> pb.PullOpen:
        """Finds out first whether the owner's socket is here: then `shm` can be offered."""
        home, target = self._home, self._target
        if "shm" in home.channels and self._peer.memory is None:
            self._shm = await ShmClient.connect(home.run_dir, target.owner)
            self._peer.nonce = self._shm.nonce if self._shm else b""
        opening = pb.PullOpen(
            key=wire.key_to_proto(target.key),
            ticket=target.ticket,
            owner=wire.identity_to_proto(target.owner),
            puller=wire.identity_to_proto(home.identity),
            channels=[name for name in home.channels if name != "shm" or self._peer.nonce],
            tenant=target.tenant,
            host_nonce=self._peer.nonce,
        )
        show_layout(opening, home.layout)
        return opening

    async def _write(self, call: Any, opening: pb.PullOpen) -> None:
        request = pb.PullRequest(open=opening)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reading side tells why
            while True:
                await call.write(request)
                if request.WhichOneof("event") == "done":
                    await call.done_writing()
                    return
                request = await self._out.get()

    def _heard(self, response: pb.PullResponse) -> machine.Event:
        match response.WhichOneof("event"):
            case "opened":
                self._chosen = response.opened.channel
                if self._chosen not in self._home.channels:
                    raise errors.TransferFailed("the owner chose a channel that was not offered")
                return machine.Opened()
            case "started":
                told = response.started
                return machine.Start(Started(told.token_count, tuple(told.block_ids), tuple(told.generations)))
            case "ready":
                return machine.Ready(Watermark(response.ready.complete_blocks, response.ready.layers_done))
            case "finished":
                self._finished_at = self._now()
                told = response.finished
                first = tuple(wire.all_from_proto(told.first))
                key = wire.key_from_proto(told.key)
                return machine.Finish(Finished(key, told.token_count, told.token_hash, first))
        raise errors.TransferFailed("the owner sent an unknown message")

    def _acknowledge(self, taken: Watermark, *, waiting: bool = False) -> None:
        self._heard_at = self._now()
        ack = pb.PullAck(
            bytes_read=self._bytes,
            complete_blocks=taken.blocks,
            layers_done=taken.layers,
            waiting_for_room=waiting,
        )
        self._out.put_nowait(pb.PullRequest(ack=ack))

    async def _close(self) -> None:
        """After the result: lets the owner hear `done`, within bounds."""
        stream = self._tasks["stream"]
        await asyncio.wait([stream], timeout=CLOSE_SECONDS)
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        if self._shm:
            self._shm.close()

    # --- room and copies --------------------------------------------------------------------------------------------

    async def _get_room(self, token_count: int) -> Room:
        return await self._reserve(token_count)

    def _room_ended(self, task: asyncio.Task[Room]) -> None:
        if task.cancelled():
            self._put(machine.ReserveFailed("cancelled"))
        elif error := task.exception():
            self._put(machine.ReserveFailed(self._failed(error)))
        else:
            self._reserved = task.result()
            self._put(machine.Reserved(self._reserved.hit_blocks))

    async def _copy(self, taken: Watermark, ready: Watermark) -> None:
        layout = self._home.layout
        limit = self._home.rate_limit
        # On a slow link small pieces in turns, so that every pull that shares it is seen to make progress.
        piece = min(PIECE_BYTES, limit.bytes_in(TURN_SECONDS)) if limit else PIECE_BYTES
        if self._channel is None:
            self._channel = await self._open_channel()
        for span in spans_between(taken, ready, self._machine.target.num_blocks, layout.num_layers):
            for part in split(span, layout.unit_bytes, piece):
                self._bytes += await self._channel.read([part])
                self._acknowledge(taken)

    def _copy_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._put(machine.CopyFailed("cancelled"))
        elif error := task.exception():
            self._put(machine.CopyFailed(self._failed(error)))
        else:
            self._put(machine.Copied())

    async def _open_channel(self) -> Channel:
        """The one the owner chose; `grpc` when the owner's pool cannot be mapped after all."""
        home, target, started = self._home, self._target, self._machine.started
        assert started is not None
        assert self._reserved is not None
        blocks = BlockMap(started.blocks, started.generations, tuple(self._reserved.blocks[: len(started.blocks)]))
        if self._chosen == "shm":
            try:
                source = await self._map_pool()
                if max(blocks.source) >= source.num_blocks:
                    raise errors.TransferFailed("the owner announced blocks that it does not have")
                return ShmChannel(source, home.pool, blocks, home.threads, home.rate_limit)
            except errors.Unavailable:
                log.warning("the pool of %s cannot be mapped; its blocks travel by gRPC", target.owner.worker_id)
        return GrpcChannel(self._peer.stub, target.key, target.ticket, home.pool, blocks, home.threads, home.rate_limit)

    async def _map_pool(self) -> PoolMemory:
        """Raises Unavailable when the owner does not give it."""
        peer, home = self._peer, self._home
        if peer.memory is None:
            if self._shm is None:
                raise errors.Unavailable("no socket")
            memory = await self._shm.attach(self._target.key, self._target.ticket)
            if (memory.num_layers, memory.unit_bytes) != (home.pool.num_layers, home.pool.unit_bytes):
                memory.close()
                raise errors.TransferFailed("the owner's pool has another shape than it said")
            peer.memory = memory
        return peer.memory
