"""Encoder: what an encode worker's service knows of its encoder: the process, its pool, and what is in it for whom."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

import common.encoder.messages as msg
from common.cache.keys import EmbeddingLayout
from common.encoder.cache import EmbeddingCache, Entry, Reservation
from common.encoder.process import EncoderProcess
from common.encoder.settings import EncoderSettings
from common.engine.messages import Blocks
from common.engine.settings import EngineSettings
from common.errors import EmbeddingMissing, EngineFailed, EpdError, InvalidArgument, Overloaded, by_reason
from common.transfer.pool_memory import PoolMemory

_SHORTEST_HINT_SECONDS, _LONGEST_HINT_SECONDS = 0.05, 5.0
_FIRST_SECONDS_PER_ROW = 0.001  # a guess, until the first image is through


class ImageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a call. data: the file, empty when it is believed to be cached. index: in the client's request."""

    key: bytes
    data: bytes
    rows: int
    index: int


class EncodeTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the image that was ready last; no longer together than the wait for it."""

    queue_seconds: float = 0.0
    preprocess_seconds: float = 0.0
    forward_seconds: float = 0.0


class EncoderLoad(msgspec.Struct, frozen=True, kw_only=True):
    pending_images: int
    pending_rows: int
    free_rows: int
    cached_rows: int
    held_rows: int
    total_rows: int


class _Job:
    """One image with the process. Its future holds the answer, or the error to raise."""

    def __init__(self, entry: Entry, data: bytes, priority: int) -> None:
        self.entry, self.data, self.priority = entry, data, priority
        self.future: asyncio.Future[msg.Encoded | EpdError] = asyncio.get_running_loop().create_future()
        self.ended_at = 0.0


class EncodeCall:
    """One call's images, from `reserve` to `release`."""

    def __init__(self, reservation: Reservation, jobs: dict[_Job, int]) -> None:
        self.reservation = reservation
        self.jobs = jobs  # still to be waited for, each with the index that names it
        self.began = asyncio.get_running_loop().time()

    @property
    def cached_images(self) -> int:
        return self.reservation.ready

    @property
    def blocks(self) -> list[int]:
        """Of all images, in order."""
        return [block for entry in self.reservation.entries for block in entry.blocks]


class Encoder:
    """All methods belong to the event loop that launched it."""

    def __init__(self, process: EncoderProcess, settings: EncoderSettings) -> None:
        self.settings = settings
        self.cache = EmbeddingCache(process.pool.num_blocks, process.layout.block_rows, process.pool.generations)
        self.images = 0  # encoded in this life
        self._process = process
        self._jobs: dict[int, _Job] = {}
        self._by_entry: dict[Entry, _Job] = {}
        self._last_job = 0
        self._pending_bytes = 0
        self._seconds_per_row = _FIRST_SECONDS_PER_ROW
        self._lost: EngineFailed | None = None
        self._on_blocks: list[Callable[[Blocks], None]] = []
        self._on_load: list[Callable[[EncoderLoad], None]] = []
        process.on_answer = self._answered
        process.on_gone = self._gone

    @classmethod
    async def launch(cls, engine: EngineSettings, settings: EncoderSettings, *, in_thread: bool = False) -> Self:
        """See EncoderProcess.launch."""
        return cls(await EncoderProcess.launch(engine, settings, in_thread=in_thread), settings)

    @property
    def ready(self) -> msg.Ready:
        return self._process.ready

    @property
    def layout(self) -> EmbeddingLayout:
        return self._process.layout

    @property
    def pool(self) -> PoolMemory:
        return self._process.pool

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def closed(self) -> str:
        return await self._process.closed()

    async def close(self) -> None:
        await self._process.close()

    async def wait_progress(self, step: int, layers: int) -> None:
        """Embeddings are published whole: there is no progress to wait for."""

    # --- a call's images --------------------------------------------------------------------------------------------

    def reserve(
        self, images: Sequence[ImageRequest], priority: int = 0, *, tenant: str = "", cache_bytes: int = 0
    ) -> EncodeCall:
        """Room for all of a call's images, and the start of those that are not here. `release` it, however it ends.

        cache_bytes: of embeddings that the tenant may keep here; 0: no bound.
        Raises EmbeddingMissing for an image that is not here and came without its file, NeverFits, Overloaded,
        EngineFailed when the encoder is gone.
        """
        if self._lost is not None:
            raise self._lost
        files = {(image.key, image.rows): image.data for image in images if image.data}
        for image in images:
            if (image.key, image.rows) not in files and not self.cache.has((image.key, image.rows)):
                raise EmbeddingMissing(f"image {image.index} is not cached here; send its file", field="images")
        missing = sum(len(data) for image, data in files.items() if not self.cache.has(image))
        if self._pending_bytes and self._pending_bytes + missing > self.settings.max_pending_bytes:
            raise Overloaded(
                f"{self._pending_bytes} bytes of image files wait here; at most {self.settings.max_pending_bytes}",
                retry_after_seconds=self._hint(),
            )
        reservation = self.cache.reserve(
            [(image.key, image.rows) for image in images],
            retry_after_seconds=self._hint(),
            tenant=tenant.encode(),
            most=cache_bytes // self._block_bytes if cache_bytes else None,
        )
        for entry in reservation.new:
            job = self._by_entry[entry] = _Job(entry, files[entry.image], priority)
            self._pending_bytes += len(job.data)
            self._submit(job)
        self._changed()
        jobs: dict[_Job, int] = {}
        for entry, image in zip(reservation.entries, images, strict=True):
            if entry in self._by_entry:
                jobs.setdefault(self._by_entry[entry], image.index)
        return EncodeCall(reservation, jobs)

    async def encoded(self, call: EncodeCall) -> EncodeTimings:
        """Returns once every image is ready. Raises what is wrong with the first that fails, named by its index."""
        waiting = {job.future for job in call.jobs}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for job, index in call.jobs.items():
                if job.future in done and isinstance(error := job.future.result(), EpdError):
                    raise _named(error, index)
        if not call.jobs:
            return EncodeTimings()
        last = max(call.jobs, key=lambda job: job.ended_at)
        answer = last.future.result()
        assert isinstance(answer, msg.Encoded)
        return _within(answer, last.ended_at - call.began)

    def release(self, call: EncodeCall) -> None:
        """The call needs its images no more; ready ones stay cached, those only it waited for are given up.

        Idempotent.
        """
        for entry in self.cache.release(call.reservation):
            number = next(number for number, job in self._jobs.items() if job.entry is entry)
            self._process.send(msg.Drop(job=number))
        self._changed()

    # --- reports ----------------------------------------------------------------------------------------------------

    @property
    def load(self) -> EncoderLoad:
        rows = self.layout.block_rows
        return EncoderLoad(
            pending_images=len(self._jobs),
            pending_rows=sum(job.entry.image[1] for job in self._jobs.values()),
            free_rows=self.cache.free * rows,
            cached_rows=self.cache.cached * rows,
            held_rows=self.cache.held * rows,
            total_rows=self.cache.num_blocks * rows,
        )

    def on_blocks(self, callback: Callable[[Blocks], None]) -> None:
        """Calls back with every change of what is cached."""
        self._on_blocks.append(callback)

    def on_load(self, callback: Callable[[EncoderLoad], None]) -> None:
        self._on_load.append(callback)

    @property
    def _block_bytes(self) -> int:
        return self.layout.unit_bytes * self.layout.levels

    def check_integrity(self) -> list[str]:
        errors = self.cache.check_integrity()
        if {job.entry for job in self._jobs.values()} != set(self.cache.encoding()):
            errors.append("images being encoded and jobs of the encoder disagree")
        return errors

    def _hint(self) -> float:
        """When the images that are under way should be through."""
        seconds = self._seconds_per_row * sum(job.entry.image[1] for job in self._jobs.values())
        return min(max(seconds, _SHORTEST_HINT_SECONDS), _LONGEST_HINT_SECONDS)

    def _changed(self) -> None:
        stored, removed = self.cache.events()
        if stored or removed:
            for on_blocks in self._on_blocks:
                on_blocks(Blocks(stored=stored, removed=removed))
        load = self.load
        for on_load in self._on_load:
            on_load(load)

    # --- the process ------------------------------------------------------------------------------------------------

    def _submit(self, job: _Job) -> None:
        self._last_job += 1
        self._jobs[self._last_job] = job
        self._process.send(
            msg.Encode(
                job=self._last_job,
                data=job.data,
                rows=job.entry.image[1],
                blocks=job.entry.blocks,
                priority=job.priority,
            )
        )

    def _answered(self, answer: msg.AnyAnswer) -> None:
        assert not isinstance(answer, msg.Ready)
        job = self._jobs.pop(answer.job)
        match answer:
            case msg.Encoded():
                self.images += 1
                rows = job.entry.image[1]
                self._seconds_per_row += 0.1 * (answer.forward_seconds / rows - self._seconds_per_row)
                self.cache.finish(job.entry)
                self._end(job, answer)
            case msg.ImageFailed(reason=reason, message=message):
                self.cache.fail(job.entry)
                self._end(job, by_reason().get(reason, EpdError)(message))
            case msg.Dropped() if job.entry.pins:
                self._submit(job)  # somebody has come for it since
            case msg.Dropped():
                self.cache.fail(job.entry)
                self._end(job, EngineFailed("nobody waited for the image"))
        self._changed()

    def _end(self, job: _Job, answer: msg.Encoded | EpdError) -> None:
        del self._by_entry[job.entry]
        self._pending_bytes -= len(job.data)
        job.ended_at = job.future.get_loop().time()
        job.future.set_result(answer)

    def _gone(self, error: EngineFailed) -> None:
        self._lost = error
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            self.cache.fail(job.entry)
            self._end(job, error)


def _named(error: EpdError, index: int) -> EpdError:
    """The error of one image, in a request of several."""
    if not isinstance(error, InvalidArgument):
        return error
    return type(error)(f"image {index}: {error.message.removeprefix('image: ')}", field=f"images[{index}]")


def _within(answer: msg.Encoded, seconds: float) -> EncodeTimings:
    """What of an image's stages was in the last `seconds`: a call may join one that is under way."""
    forward = min(answer.forward_seconds, seconds)
    preprocess = min(answer.preprocess_seconds, seconds - forward)
    queue = max(0.0, min(answer.queue_seconds, seconds - forward - preprocess))
    return EncodeTimings(queue_seconds=queue, preprocess_seconds=preprocess, forward_seconds=forward)
