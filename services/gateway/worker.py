"""One life of one worker as the gateway knows it: channel, liveness, load, cached blocks, what was sent just now."""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import Callable, Iterator, Sequence

import grpc

from common.cache.keys import KvLayout
from common.policies.circuit import Circuit, CircuitPolicy
from common.policies.encoding import ENCODE, EncoderView
from common.policies.routing import DECODE, PREFILL, WorkerView
from common.registry.record import ADAPTER_NAME, WorkerRecord
from common.rpc.tls import handshake_refusal
from epd.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encode_pb2_grpc,
    prefill_pb2_grpc,
    trace_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from services.gateway.block_index import BlockIndex
from services.gateway.names import Adapter
from services.gateway.token_stream import TokenStream

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_SECONDS = 0.05
_LAST_BACKOFF_SECONDS = 2.0
TELL_SECONDS = 5.0  # for a worker to take a word about a running call
_MAX_ADAPTERS = 1024  # of one worker; what it says beyond them is not kept
_WATCH_FIRST_SECONDS = 2.0  # for the first message of a watch


def keys_id(layout: KvLayout) -> str:
    """Equal for workers that name the same tokens by the same block keys."""
    return f"{layout.model}\0{layout.revision}\0{layout.block_size}"


class Charge:
    """Work that was sent to a worker and is perhaps not in its reported load yet."""

    __slots__ = ("blocks", "report", "rows", "tokens")

    def __init__(self, report: int, tokens: int, blocks: int, rows: int) -> None:
        self.report, self.tokens, self.blocks, self.rows = report, tokens, blocks, rows


class Worker:
    """`up` while its Watch stream is there. A call that nobody answers marks it down at once; the watch is then tried
    again with back-off until the registry forgets this life, so being down is never for good. Neither is an open
    circuit, of calls that fail although somebody is there, nor a suspicion, of one that has fallen silent.
    """

    def __init__(
        self,
        record: WorkerRecord,
        changed: Callable[[], None],
        loaded: Callable[[], None],
        connect: Callable[[str, str], grpc.aio.Channel],
        policy: CircuitPolicy | None = None,
    ) -> None:
        self.record = record
        self._clock = asyncio.get_running_loop().time
        self.circuit = Circuit(policy or CircuitPolicy(), random.random)
        self._retry: asyncio.TimerHandle | None = None  # the circuit's
        self.suspected = False  # of being stopped or cut off
        self.beats = False  # it tells that it lives even when there is nothing else to tell
        self.on_suspicion: set[Callable[[], None]] = set()  # of those who may do something else meanwhile
        self.on_stuck: set[Callable[[], None]] = set()  # of those who should go elsewhere then
        self.identity = types_pb2.WorkerIdentity(worker_id=record.worker_id, incarnation=record.incarnation)
        self.keys_id = keys_id(record.layout)
        self.compat_id = record.compat_id
        self.up = False
        self.gone = False
        self.load = worker_pb2.Load()
        self.adapter_names: dict[str, Adapter] = {}
        self.adapters: frozenset[str] = frozenset()  # checksums; unnamed ones too, for what runs already
        self.index = BlockIndex(record.worker_id, record.num_blocks + record.embedding_rows)
        self._changed, self._loaded = changed, loaded
        self._charges: set[Charge] = set()
        self._attempts = 0  # that use the channel now
        self._unused = asyncio.Event()
        self._unused.set()
        self._reports = 0
        self._refusal = ""  # why its certificate was not accepted
        self.heard_at = self._clock()  # when the watch last told something
        self._channel = connect(record.address, record.worker_id)
        self.encode = encode_pb2_grpc.EncodeServiceStub(self._channel)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self.trace = trace_pb2_grpc.TraceServiceStub(self._channel)
        self.service = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self.tokens = TokenStream(self.decode, record.worker_id) if DECODE in record.roles else None
        self._telling: set[grpc.aio.Call] = set()
        self._watch: grpc.aio.Call | None = None
        self._task = asyncio.create_task(self._keep_watching(), name=f"watch-{record.worker_id}")

    @property
    def worker_id(self) -> str:
        return self.record.worker_id

    @property
    def routable(self) -> bool:
        """Whether new work may go there."""
        return not self.away and not self.load.draining and not self.record.draining

    @property
    def away(self) -> str:
        """Why it gets nothing now though it does not want to leave; empty when it does."""
        if self.gone or not self.up:
            return "down"
        if self.suspected:
            return "silent"
        now = self._clock()
        return "" if self.circuit.allows(now) else f"circuit {self.circuit.state(now)}"

    def view(self, unreachable: frozenset[str] = frozenset()) -> WorkerView:
        """What the router sees: the reported load and what was sent since. unreachable: owners it cannot pull from."""
        record = self.record
        return WorkerView(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            roles=record.roles,
            compat_id=self.compat_id,
            keys_id=self.keys_id,
            block_size=record.layout.block_size,
            num_blocks=record.num_blocks,
            max_context=record.max_context,
            pending_prefill_tokens=self.load.pending_prefill_tokens + sum(c.tokens for c in self._charges),
            active_blocks=self.load.active_blocks + sum(c.blocks for c in self._charges),
            free_blocks=self._free_blocks(),
            cached=self.index.keys,
            unreachable=unreachable,
            adapters=self.adapters,
        )

    def encoder_view(self) -> EncoderView:
        return EncoderView(
            worker_id=self.worker_id,
            total_rows=self.record.embedding_rows,
            pending_rows=self.load.pending_rows + sum(c.rows for c in self._charges),
            cached=self.index.keys,
        )

    def encodes_for(self, other: "Worker") -> bool:
        """Whether its embeddings are what the other worker's prompts need."""
        mine, theirs = self.record.embedding_layout, other.record.layout
        return (
            self.routable
            and ENCODE in self.record.roles
            and mine is not None
            and (mine.model, mine.revision, mine.dtype) == (theirs.model, theirs.revision, theirs.dtype)
        )

    def _free_blocks(self) -> int | None:
        load = self.load
        if not load.total_blocks:
            return None
        if load.waiting and PREFILL not in self.record.roles:
            return 0  # reservations queue there already
        return max(0, load.free_blocks + load.cached_blocks - sum(c.blocks for c in self._charges))

    @contextlib.contextmanager
    def charge(self, tokens: int = 0, blocks: int = 0, rows: int = 0) -> Iterator[None]:
        """Counts prefill tokens, decode blocks and rows to encode here until the worker's reports surely include them,
        or the end."""
        charge = Charge(self._reports, tokens, blocks, rows)
        probe = self.circuit.began(self._clock())
        self._charges.add(charge)
        self._attempts += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._charges.discard(charge)
            self.circuit.ended(probe)
            if probe:
                self._changed()
            self._attempts -= 1
            if not self._attempts:
                self._unused.set()

    def tell_finished(self, request: decode_pb2.FinishRequest) -> None:
        """Ends choices of a running decode call; fire and forget."""
        call = self.decode.Finish(request, timeout=TELL_SECONDS)
        self._telling.add(call)
        call.add_done_callback(self._telling.discard)

    def mark_down(self, why: str) -> None:
        """A call has shown that nobody answers there."""
        if self.up:
            _log.warning("worker %s is down: %s", self.worker_id, why)
            self._set_up(False)
        if self._watch is not None:
            self._watch.cancel()

    def call_failed(self, began: float) -> None:
        """A call that began then has failed in a way that speaks against this worker."""
        now = self._clock()
        if self.circuit.failed(began, now):
            _log.warning("worker %s: calls fail, no more for %.1f s", self.worker_id, self.circuit.until - now)
            if self._retry is not None:
                self._retry.cancel()
            self._retry = asyncio.get_running_loop().call_at(self.circuit.until, self._changed)
            self._changed()

    def call_worked(self, began: float) -> None:
        if self.circuit.succeeded(began, self._clock()):
            _log.info("worker %s: calls succeed again", self.worker_id)
            self._changed()

    def suspect(self, suspected: bool) -> None:
        """It has fallen silent, or has been heard again."""
        if suspected == self.suspected:
            return
        self.suspected = suspected
        _log.warning("worker %s %s", self.worker_id, "has fallen silent" if suspected else "is heard again")
        self._changed()
        if suspected:
            for callback in list(self.on_suspicion):
                callback()

    def give_up(self) -> None:
        """It has been silent for too long for those who wait for it."""
        for callback in list(self.on_stuck):
            callback()

    def mark_draining(self) -> None:
        if not self.load.draining:
            self.load.draining = True
            self._changed()

    def mark_gone(self) -> None:
        """Another life answers at this address, so this one is over; the registry will say so too."""
        if not self.gone:
            self.gone = True
            self._changed()

    async def close(self) -> None:
        """Channel and watch stay for the attempts that use it. Cancelled: closes it at once."""
        try:
            await self._unused.wait()
        finally:
            self._task.cancel()
            if self._retry is not None:
                self._retry.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._set_up(False)
            if self.tokens is not None:
                await self.tokens.close()
            await self._channel.close()

    def _set_up(self, up: bool) -> None:
        if self.up != up:
            self.up = up
            self._changed()

    async def _keep_watching(self) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            was_up = False
            try:
                was_up = await self._follow()
            except grpc.aio.AioRpcError as error:
                was_up = self.up
                self._note_refusal(handshake_refusal(error.details() or ""))
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    _log.warning("watch of worker %s ended: %s", self.worker_id, error.code().name)
            except TimeoutError:
                _log.warning("worker %s does not answer", self.worker_id)
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
            except Exception:  # whatever a foreign peer sent: this worker only, and not for good
                _log.exception("watch of worker %s failed", self.worker_id)
            finally:
                self._watch = None
            self._set_up(False)
            backoff = _FIRST_BACKOFF_SECONDS if was_up else min(_LAST_BACKOFF_SECONDS, 2 * backoff)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    def _note_refusal(self, refusal: tuple[str, str] | None) -> None:
        """Says so, once for each reason: whoever answers at this address is not whom the registry promised."""
        if refusal and refusal[0] != self._refusal:
            _log.error("%s, registered as worker %s, is refused: %s", self.record.address, self.worker_id, refusal[1])
        self._refusal = refusal[0] if refusal else ""

    async def _follow(self) -> bool:
        """Reads one watch; returns when it ended or a gap showed. Whether the worker was up meanwhile."""
        request = worker_pb2.WatchRequest(from_sequence=self.index.sequence, incarnation=self.record.incarnation)
        watch = self._watch = self.service.Watch(request)
        self.index.begin()
        try:
            async with asyncio.timeout(_WATCH_FIRST_SECONDS):
                message = await watch.read()
            told = False  # of adapters; a worker without any says nothing of them
            while message is not grpc.aio.EOF:
                told |= message.WhichOneof("event") == "adapters"
                if not self._apply(message):
                    return True
                # The snapshot or the missed events come before the load, so a worker that is up has its index.
                if message.WhichOneof("event") == "load":
                    if not told and self.adapters:
                        self._on_adapters(())
                    self._set_up(True)
                message = await watch.read()
            return self.up
        finally:
            watch.cancel()

    def _apply(self, message: worker_pb2.WatchResponse) -> bool:
        """False when block events were missed."""
        self.heard_at = self._clock()
        self.suspect(False)
        match message.WhichOneof("event"):
            case "load":
                self._on_load(message.load)
            case "blocks":
                return self.index.apply(message.blocks)
            case "beat":
                self.beats = True
            case "adapters":
                self._on_adapters(message.adapters.adapters)
        return True

    def _on_adapters(self, adapters: Sequence[worker_pb2.Adapter]) -> None:
        self.adapters = frozenset(each.checksum for each in adapters[:_MAX_ADAPTERS])
        self.adapter_names = {
            each.name: Adapter(each.checksum, each.model)
            for each in adapters[:_MAX_ADAPTERS]
            if re.fullmatch(ADAPTER_NAME, each.name) and each.model in self.record.names
        }
        self._changed()

    def _on_load(self, load: worker_pb2.Load) -> None:
        self._reports += 1
        # The next report after a charge may have left before the work arrived; the one after it has not.
        self._charges = {charge for charge in self._charges if charge.report + 2 > self._reports}
        changed = load.draining != self.load.draining
        self.load = load
        if changed:
            self._changed()
        self._loaded()
