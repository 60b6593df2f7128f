"""WorkerService: load and block events for gateways, and the worker's state for people."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import msgspec
import psutil

from common.cache.block_log import BlockChange, BlockLog
from common.engine.messages import Blocks, LoadReport
from common.errors import InvalidArgument
from common.registry.record import ADAPTER_NAME
from common.rpc import wire
from common.rpc.worker_context import WorkerContext
from common.tasks import first
from epd.v1 import worker_pb2, worker_pb2_grpc

LOAD_INTERVAL_SECONDS = 0.1
BEAT_SECONDS = 0.25


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """Watches are bounded by the log, not by their reader: a slow one is caught up by a snapshot."""

    def __init__(
        self,
        worker: WorkerContext,
        *,
        open_publications: Callable[[], int],
        open_pulls: Callable[[], int],
        open_spans: Callable[[], int],
        loop_lag_p99: Callable[[], float],
        answers: Callable[[], bool] = lambda: True,
    ) -> None:
        """answers: whether the engine does; a worker whose engine hangs must not look alive."""
        self._worker = worker
        self._log = BlockLog()
        self._load_changed = asyncio.Event()
        self._open_publications, self._open_pulls, self._open_spans = open_publications, open_pulls, open_spans
        self._loop_lag_p99, self._answers = loop_lag_p99, answers
        if worker.language is not None:
            worker.language.on_blocks(self._on_blocks)
            worker.language.on_load(lambda _: self.touch())
        if worker.vision is not None:
            worker.vision.on_blocks(self._on_blocks)
            worker.vision.on_load(lambda _: self.touch())

    def _on_blocks(self, event: Blocks) -> None:
        self._log.apply(event.stored, event.removed)

    def touch(self) -> None:
        """Load, or draining, has changed."""
        self._load_changed.set()
        self._load_changed = asyncio.Event()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        # A cursor of an earlier life means nothing here.
        cursor = request.from_sequence if request.incarnation == self._worker.record.incarnation else 0
        fresh = True
        adapters = worker_pb2.Adapters()  # as the gateway knows them
        while True:
            blocks_changed, load_changed = self._log.changed(), self._load_changed
            if fresh or cursor != self._log.sequence:
                for change in self._log.after(cursor):
                    yield worker_pb2.WatchResponse(blocks=_blocks(change))
                    cursor = change.sequence
            if (held := self._adapters()) != adapters:
                adapters = held
                yield worker_pb2.WatchResponse(adapters=held)
            yield worker_pb2.WatchResponse(load=self._load(self._language_load()))
            while fresh or not await _within(BEAT_SECONDS, blocks_changed.wait(), load_changed.wait()):
                fresh = False
                if self._answers():
                    yield worker_pb2.WatchResponse(beat=worker_pb2.Beat())
            await asyncio.sleep(LOAD_INTERVAL_SECONDS)  # at most 10 messages of each kind a second

    async def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetStatusResponse:
        language, vision, record = self._worker.language, self._worker.vision, self._worker.record
        load, errors, weights = LoadReport(), list[str](), dict[str, int]()
        if language is not None:
            inspected = await language.inspect()
            load, errors, weights["language"] = inspected.load, list(inspected.errors), language.ready.weight_bytes
        if vision is not None:
            errors += vision.check_integrity()
            weights["vision"] = vision.ready.weight_bytes
        return worker_pb2.GetStatusResponse(
            identity=wire.identity_to_proto(self._worker.identity),
            roles=record.roles,
            layout=wire.layout_to_proto(record.layout),
            load=self._load(load),
            healthy=not errors and not self._worker.draining,
            integrity_errors=errors,
            open_publications=self._open_publications(),
            open_pulls=self._open_pulls(),
            open_spans=self._open_spans(),
            executor=record.executor,
            engine_steps=load.steps,
            loop_lag_p99_seconds=self._loop_lag_p99(),
            resident_bytes=resident_bytes(),
            embedding_layout=wire.embedding_layout_to_proto(vision.layout) if vision is not None else None,
            weight_bytes=weights,
            adapters=self._adapters().adapters,
        )

    async def ServeAdapter(
        self, request: worker_pb2.ServeAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ServeAdapterResponse:
        adapters = self._worker.adapters
        if adapters is None:
            raise InvalidArgument("this worker computes no text, so it takes no adapters", field="lora_path")
        if request.name and not re.fullmatch(ADAPTER_NAME, request.name):
            raise InvalidArgument("this cannot be an adapter's name", field="lora_name")
        named = await adapters.serve(request.path, name=request.name, model=request.model, checksum=request.checksum)
        adapter = worker_pb2.Adapter(checksum=named.adapter, name=request.name, model=named.model)
        return worker_pb2.ServeAdapterResponse(adapter=adapter)

    async def DropAdapter(
        self, request: worker_pb2.DropAdapterRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.DropAdapterResponse:
        if self._worker.adapters is not None:
            await self._worker.adapters.drop(request.name)
        return worker_pb2.DropAdapterResponse()

    def _adapters(self) -> worker_pb2.Adapters:
        found = self._worker.adapters
        if found is None:
            return worker_pb2.Adapters()
        named = {each.adapter for each in found.names.values()}
        listed = [
            worker_pb2.Adapter(checksum=each.adapter, name=name, model=each.model)
            for name, each in sorted(found.names.items())
        ]
        listed += [worker_pb2.Adapter(checksum=adapter) for adapter in sorted(found.held - named)]
        return worker_pb2.Adapters(adapters=listed)

    def _language_load(self) -> LoadReport:
        return self._worker.language.load if self._worker.language is not None else LoadReport()

    def _load(self, load: LoadReport) -> worker_pb2.Load:
        vision = self._worker.vision.load if self._worker.vision is not None else None
        return worker_pb2.Load(
            **(msgspec.structs.asdict(vision) if vision is not None else {}),
            running=load.running,
            waiting=load.waiting,
            pending_prefill_tokens=load.pending_prefill_tokens,
            active_blocks=load.active_blocks,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            held_blocks=load.held_blocks,
            total_blocks=load.total_blocks,
            draining=self._worker.draining,
        )


async def _within(seconds: float, *coroutines: Coroutine[Any, Any, Any]) -> bool:
    """Whether one of them ends in time."""
    try:
        async with asyncio.timeout(seconds):
            await first(*coroutines)
    except TimeoutError:
        return False
    return True


def resident_bytes() -> int:
    """Of this process and its descendants, so the engine's too; pages that they share count for each."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def _blocks(change: BlockChange) -> worker_pb2.BlockEvents:
    return worker_pb2.BlockEvents(
        sequence=change.sequence,
        snapshot_start=change.snapshot_start,
        snapshot_end=change.snapshot_end,
        stored=change.stored,
        removed=change.removed,
    )
