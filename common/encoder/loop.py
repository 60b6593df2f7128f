"""The encoder's own loop, in a process or thread apart from the service's event loop."""

import logging
import os
import socket
import time

import numpy as np

from common.cache.keys import EmbeddingLayout
from common.encoder import messages as msg
from common.encoder.executor import ImageExecutor, Rows
from common.encoder.preparation import Job, Preparation, Queue
from common.encoder.settings import EncoderSettings
from common.encoder.wire import Launch, command_reader
from common.engine.wire import encode
from common.errors import EpdError
from common.process import readable
from common.transfer.pool_memory import PoolMemory

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


def load_executor(launch: Launch) -> ImageExecutor:
    """The executor that the settings name; only here is torch imported, and only when it is needed."""
    if launch.engine.executor == "timed":
        from common.encoder.timed_executor import TimedImageExecutor

        return TimedImageExecutor(launch.settings.timed, launch.layout)
    import torch

    from common.encoder.vision_executor import VisionExecutor

    torch.set_num_threads(launch.engine.threads)
    return VisionExecutor(launch.engine, launch.layout, launch.settings.media)


class EncoderLoop:
    """Files in, rows into the pool's blocks, until Shutdown or the service's end of the socket closes.

    One thread computes; images of several requests share a forward pass, those of higher priority first.
    """

    def __init__(
        self,
        sock: socket.socket,
        memory: PoolMemory,
        settings: EncoderSettings,
        layout: EmbeddingLayout,
        executor: ImageExecutor,
    ) -> None:
        self._sock = sock
        self._settings = settings
        self._executor = executor
        # [level, block, row, row bytes]
        row_bytes = layout.hidden_size * layout.itemsize
        self._pool = memory.data.reshape(layout.levels, memory.num_blocks, layout.block_rows, row_bytes)
        self._reader = command_reader()
        self._answers: list[msg.AnyAnswer] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._preparation = Preparation(
            executor.prepare, settings.preprocess_threads, settings.preprocess_seconds, self._wake
        )
        self._prepared = Queue()
        self._open = True

    def run(self) -> None:
        """Returns when it was told to end."""
        self._sock.setblocking(True)
        self._executor.warm_up()
        self._answers.append(msg.Ready(executor=self._executor.name, weight_bytes=self._executor.weight_bytes))
        self._flush()
        try:
            while self._open:
                self._read(None if not self._prepared else 0.0)
                for job in self._preparation.take():
                    if job.error is not None:
                        self._fail(job, job.error)
                    else:
                        self._prepared.put(job)
                # Prepared pictures are large: no more of them than the next two batches.
                self._preparation.start(2 * self._settings.batch_images - len(self._prepared))
                self._flush()
                if self._prepared:
                    self._encode(self._batch())
                    self._flush()
        except (BrokenPipeError, ConnectionResetError):
            log.info("the service is gone, the encoder ends")
        finally:
            self._preparation.close()

    def _read(self, timeout: float | None) -> None:
        """Handles all commands that are there; waits first, for one or for a thread, as long as told."""
        if timeout is None:
            timeout = self._preparation.next_due()
        ready = readable((self._sock, self._wake), timeout)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        while self._open and self._sock.fileno() in ready:
            data = self._sock.recv(_READ_BYTES)
            self._open = bool(data)
            for command in self._reader.feed(data):
                self._handle(command)
            ready = readable((self._sock,), 0)

    def _handle(self, command: msg.AnyCommand) -> None:
        match command:
            case msg.Encode():
                self._preparation.put(Job(command, time.monotonic()))
            case msg.Drop(job=number):
                # Only the forward pass writes to the blocks, so a job before it is given up at once.
                if self._preparation.drop(number) or self._prepared.drop(number):
                    self._answers.append(msg.Dropped(job=number))
            case msg.Shutdown():
                self._open = False

    def _batch(self) -> list[Job]:
        """The next images, one at least, as many as the bounds let in."""
        batch = [self._prepared.pop()]
        rows = batch[0].command.rows
        while self._prepared and len(batch) < self._settings.batch_images:
            rows += self._prepared.peek().command.rows
            if rows > self._settings.batch_rows:
                break
            batch.append(self._prepared.pop())
        return batch

    def _encode(self, batch: list[Job]) -> None:
        begin = time.monotonic()
        try:
            found = self._executor.forward([job.prepared for job in batch])
        except Exception as error:
            if len(batch) > 1:  # whose fault it is, each shows by itself
                for job in batch:
                    self._encode([job])
                return
            log.exception("an image failed in the forward pass")
            known = isinstance(error, EpdError)
            self._fail(batch[0], error if known else EpdError("the vision model failed on the image"))  # type: ignore[arg-type]
            return
        seconds = time.monotonic() - begin
        for job, rows in zip(batch, found, strict=True):
            self._write(job.command.blocks, rows)
            self._answers.append(
                msg.Encoded(
                    job=job.command.job,
                    queue_seconds=job.started - job.arrived + begin - job.ready,
                    preprocess_seconds=job.ready - job.started,
                    forward_seconds=seconds,
                )
            )

    def _write(self, blocks: list[int], rows: Rows) -> None:
        """What the last block holds beyond the rows is zero."""
        size = self._pool.shape[2]
        for number, block in enumerate(blocks):
            part = rows[:, number * size : (number + 1) * size]
            self._pool[:, block, : part.shape[1]] = part
            self._pool[:, block, part.shape[1] :] = np.uint8(0)

    def _fail(self, job: Job, error: EpdError) -> None:
        self._answers.append(msg.ImageFailed(job=job.command.job, reason=error.reason, message=error.message))

    def _flush(self) -> None:
        if self._answers:
            self._sock.sendall(encode(self._answers))
            self._answers.clear()


def run_encoder(sock: socket.socket, memory: PoolMemory, launch: Launch) -> None:
    """Loads the vision part and serves until the end. Blocking."""
    EncoderLoop(sock, memory, launch.settings, launch.layout, load_executor(launch)).run()
