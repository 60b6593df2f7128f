"""The encode stage of one attempt: images to encode workers side by side, references to their embeddings back.

All parts are reserved at once or none: an encoder that has no room refuses, and then everything is given back before
another try. So a request never holds room on one encoder while it waits for another.
"""

import asyncio
import contextlib
import itertools
import random
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

import grpc
import msgspec

from common import telemetry
from common.errors import EmbeddingMissing, NoWorkers, Overloaded
from common.policies.encoding import Image, Part, assign
from common.telemetry import Telemetry
from epd.v1 import encode_pb2, types_pb2
from services.gateway.accounting import AttemptRecord, known
from services.gateway.call import CallFailed, WorkerCall
from services.gateway.fleet import Fleet
from services.gateway.media import where_sent
from services.gateway.preprocess import Prepared
from services.gateway.settings import GatewaySettings
from services.gateway.worker import Worker

_FIRST_BACKOFF_SECONDS = 0.02
_LONGEST_BACKOFF_SECONDS = 1.0
_TRIES = 4  # of one image, each on another encoder as long as there are others


class Mesh(Protocol):
    """What the stage needs of the orchestrator."""

    fleet: Fleet
    settings: GatewaySettings
    telemetry: Telemetry

    def may_retry(self, model: str, *, resume: bool = False) -> bool: ...


class Made(msgspec.Struct, frozen=True):
    """One encode call that has finished. Its call stays open: it is what keeps the embeddings for the puller."""

    worker: Worker
    part: int
    ticket: bytes
    images: tuple[Image, ...]
    finished: encode_pb2.EncodeFinished


class Encoding:
    """puller: the worker that will compute the prompt. exclude: workers that failed this request before."""

    def __init__(
        self,
        request: Prepared,
        key: types_pb2.RequestKey,
        record: AttemptRecord,
        mesh: Mesh,
        puller: Worker,
        exclude: frozenset[str],
    ) -> None:
        self._request = request
        self._key = key
        self._record = record
        self._mesh = mesh
        self._puller = puller
        self._exclude = exclude
        self._parts = itertools.count(1)
        self._calls: set[WorkerCall] = set()
        self.workers: list[Worker] = []  # those that hold the embeddings
        self._loop = asyncio.get_running_loop()

    @contextlib.asynccontextmanager
    async def embeddings(self) -> AsyncIterator[list[types_pb2.EmbeddingRef]]:
        """References in prompt order, none for a prompt without images; the embeddings are kept until this is left.

        Raises CallFailed (an image that cannot be read, an encoder that broke), NoWorkers, Overloaded.
        """
        media = self._request.media
        if not media:
            yield []
            return
        record = self._record
        record.encoding = self._loop.time()
        attributes = {telemetry.IMAGES: len(media), telemetry.IMAGE_TOKENS: sum(item.rows for item in media)}
        try:
            with telemetry.start_span(telemetry.ENCODE_IMAGES, attributes=attributes) as span:
                made = await self._encode([Image(item.index, item.key, item.rows) for item in media])
                self.workers = list({each.worker.worker_id: each.worker for each in made}.values())
                record.encode_workers = sorted(worker.worker_id for worker in self.workers)
                record.encode_hops = known(made[-1].finished.hops)
                record.cached_images = sum(each.finished.cached_images for each in made)
                span.set_attribute(telemetry.CACHED_IMAGES, record.cached_images)
                span.set_attribute(telemetry.WORKER, record.encode_workers)
            yield self._references(made)
        finally:
            for call in self._calls:
                call.close()

    async def _encode(self, images: list[Image]) -> list[Made]:
        """In the order in which they were made. Waits, bounded, for room."""
        end = self._loop.time() + self._mesh.settings.hold_seconds
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            try:
                return await self._make(images, self._exclude, _TRIES)
            except CallFailed as failure:
                if not isinstance(failure.error, Overloaded):
                    named = where_sent(failure.error, self._request.media)
                    raise CallFailed(named, failure.worker, exclude=failure.exclude) from None
                hint = failure.error.retry_after_seconds or 0.0
            for call in self._calls:
                call.close()
            self._calls.clear()
            if self._loop.time() + backoff > end:
                raise Overloaded("the encode workers are full", retry_after_seconds=max(1.0, hint))
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
            backoff = min(_LONGEST_BACKOFF_SECONDS, 2 * backoff)

    async def _make(self, images: Sequence[Image], exclude: frozenset[str], tries: int) -> list[Made]:
        # Once one was lost it may be the only one, and starting again.
        lost = self._key.attempt > 1 or tries < _TRIES
        settings = self._mesh.settings
        parts = await self._assign(images, exclude, settings.recovery_seconds if lost else settings.route_wait_seconds)
        made: list[Made] = []
        tasks = [asyncio.ensure_future(self._make_part(part, exclude, tries)) for part in parts]
        try:
            for ended in asyncio.as_completed(tasks):
                made += await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return made

    async def _assign(self, images: Sequence[Image], exclude: frozenset[str], wait_seconds: float) -> list[Part]:
        fleet = self._mesh.fleet
        exclude |= fleet.pairs.unreachable(self._puller)
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    encoders = [worker.encoder_view() for worker in fleet.all() if worker.encodes_for(self._puller)]
                    if parts := assign(images, encoders, exclude):
                        return parts
                    await fleet.changed()
        except TimeoutError:
            raise NoWorkers(
                f"no encode worker can take images for {self._request.model} now", retry_after_seconds=1.0
            ) from None

    async def _make_part(self, part: Part, exclude: frozenset[str], tries: int) -> list[Made]:
        """One encoder's part; by others when it fails, and by others too when it is slow: who is first counts."""
        worker = self._mesh.fleet.get(part.worker_id)
        assert worker is not None  # the snapshot is of this very moment
        without = exclude | {part.worker_id}
        mine = asyncio.ensure_future(self._call_worker(worker, part))
        tasks: set[asyncio.Future[list[Made]]] = {mine}
        try:
            await self._slow(worker, mine)
            if not mine.done() and tries > 1 and self._others(without) and self._may_retry():
                tasks.add(asyncio.ensure_future(self._make(part.images, without, 1)))
            failure: CallFailed | None = None
            while tasks:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is None:
                        return task.result()
                    if not isinstance(error, CallFailed) or not error.error.retryable:
                        raise error
                    failure = failure or error
            assert failure is not None
            if isinstance(failure.error, Overloaded) or tries <= 1 or not self._may_retry():
                raise failure
            self._mesh.telemetry.metrics.retries.labels(model=self._request.model, reason=failure.error.reason).inc()
            return await self._make(part.images, without, tries - 1)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _slow(self, worker: Worker, mine: asyncio.Future[Any]) -> None:
        """Returns when the call has ended, takes long, or its worker has fallen silent."""
        suspicion = self._loop.create_future()

        def suspected() -> None:
            if not suspicion.done():
                suspicion.set_result(None)

        worker.on_suspicion.add(suspected)
        try:
            timeout = self._mesh.settings.encode_hedge_seconds
            await asyncio.wait((mine, suspicion), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            worker.on_suspicion.discard(suspected)

    def _may_retry(self) -> bool:
        return self._mesh.may_retry(self._request.model)

    def _others(self, without: frozenset[str]) -> bool:
        return any(
            worker.worker_id not in without and worker.encodes_for(self._puller) for worker in self._mesh.fleet.all()
        )

    async def _call_worker(self, worker: Worker, part: Part) -> list[Made]:
        rows = sum(image.rows for image in part.images if image.index not in part.cached)
        with worker.charge(rows=rows):
            try:
                return [await self._call(worker, part.images, part.cached)]
            except CallFailed as failure:
                if not isinstance(failure.error, EmbeddingMissing):
                    raise
                return [await self._call(worker, part.images, frozenset())]  # evicted meanwhile

    async def _call(self, worker: Worker, images: tuple[Image, ...], cached: Iterable[int]) -> Made:
        number, ticket, settings = next(self._parts), secrets.token_bytes(16), self._mesh.settings
        key = types_pb2.RequestKey(
            request_id=self._key.request_id, leg=self._key.leg, attempt=self._key.attempt, part=number
        )
        media = {item.index: item for item in self._request.media}
        request = encode_pb2.EncodeRequest(
            key=key,
            target=worker.identity,
            model=self._request.model,
            tenant=self._request.tenant,
            ticket=ticket,
            puller=self._puller.identity,
            images=[
                encode_pb2.EncodeImage(
                    media_key=image.key,
                    data=b"" if image.index in cached else media[image.index].data,
                    rows=image.rows,
                    index=image.index,
                )
                for image in images
            ],
            priority=self._request.priority,
            cache_bytes=self._request.cache_bytes,
        )
        call = WorkerCall(
            worker,
            worker.encode.Encode(request),
            first_byte_seconds=settings.first_byte_seconds,
            stall_seconds=settings.stall_seconds,
        )
        self._calls.add(call)
        try:
            while True:
                message = await call.read()
                if message is grpc.aio.EOF:
                    raise call.lost("ended before the images were encoded")
                if message.HasField("finished"):
                    call.worked()
                    return Made(worker, number, ticket, images, message.finished)
        except BaseException:
            self._calls.discard(call)
            call.close()
            raise

    def _references(self, made: Iterable[Made]) -> list[types_pb2.EmbeddingRef]:
        media = {item.index: item for item in self._request.media}
        found = [
            types_pb2.EmbeddingRef(
                media_key=image.key,
                owner=each.worker.identity,
                address=each.worker.record.address,
                ticket=each.ticket,
                position=media[image.index].start,
                length=media[image.index].length,
                rows=image.rows,
                grid=media[image.index].grid,
                part=each.part,
            )
            for each in made
            for image in each.images
        ]
        return sorted(found, key=lambda reference: reference.position)


def places_only(reference: types_pb2.EmbeddingRef) -> types_pb2.EmbeddingRef:
    """For a worker that computes nothing from the embedding but names its blocks after it."""
    return types_pb2.EmbeddingRef(
        media_key=reference.media_key,
        position=reference.position,
        length=reference.length,
        rows=reference.rows,
        grid=reference.grid,
    )
