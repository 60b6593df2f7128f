"""Decoding and processing image files in a few threads, each image within its time."""

import heapq
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from common.encoder.messages import Encode
from common.errors import EpdError, InvalidArgument


@dataclass(slots=True, eq=False)
class Job:
    """One image on its way through the encoder. Times: seconds of the loop's clock."""

    command: Encode
    arrived: float
    started: float = 0.0  # in a thread
    ready: float = 0.0  # for its batch
    prepared: Any = None
    error: EpdError | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Higher priority first, then who came first."""
        return -self.command.priority, self.command.job


@dataclass(slots=True)
class Queue:
    """Jobs in order; dropping one costs a scan of a list that the pool's size bounds."""

    _heap: list[tuple[tuple[int, int], Job]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.order, job))

    def peek(self) -> Job:
        return self._heap[0][1]

    def pop(self) -> Job:
        return heapq.heappop(self._heap)[1]

    def drop(self, number: int) -> bool:
        """False when it is not here."""
        kept = [each for each in self._heap if each[1].command.job != number]
        dropped = len(kept) < len(self._heap)
        if dropped:
            self._heap = kept
            heapq.heapify(self._heap)
        return dropped


class Preparation:
    """Runs `prepare` for queued jobs, `threads` at a time.

    A thread cannot be stopped: a job whose time is over fails at once, and its thread is counted out until it is back.
    """

    def __init__(
        self,
        prepare: Callable[[bytes, int], Any],
        threads: int,
        seconds: float,
        wake: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wake: eventfd, written when a job is through; closed at the end."""
        self._prepare, self._limit, self._seconds, self._wake, self._clock = prepare, threads, seconds, wake, clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="epd-image")
        self._waiting = Queue()
        self._running: dict[Future[None], Job | None] = {}  # None: nobody waits for it any more

    @property
    def idle(self) -> bool:
        return not self._waiting and not any(self._running.values())

    def put(self, job: Job) -> None:
        self._waiting.put(job)

    def drop(self, number: int) -> bool:
        """False when the job is not here."""
        for future, job in self._running.items():
            if job is not None and job.command.job == number:
                self._running[future] = None
                return True
        return self._waiting.drop(number)

    def start(self, room: int) -> None:
        """Starts what threads are free for, at most `room` jobs."""
        while self._waiting and room > 0 and len(self._running) < self._limit:
            room -= 1
            job = self._waiting.pop()
            job.started = self._clock()
            future = self._pool.submit(self._run, job)
            self._running[future] = job
            future.add_done_callback(lambda _: os.eventfd_write(self._wake, 1))

    def take(self) -> list[Job]:
        """Jobs that are through, or out of time: with `prepared` or `error`.

        Raises RuntimeError when no thread has come back for long: only a new process helps.
        """
        now, found = self._clock(), []
        for future, job in list(self._running.items()):
            if future.done():
                del self._running[future]
                future.result()
            elif job is not None and now - job.started >= self._seconds:
                self._running[future] = None
                # Another object than the thread's, which may still write to its own.
                job = Job(job.command, job.arrived, job.started, now)
                job.error = InvalidArgument(f"the image took longer than {self._seconds:g} s to decode and process")
            else:
                continue
            if job is not None:
                found.append(job)
        if self._waiting and len(self._running) == self._limit and not any(self._running.values()):
            raise RuntimeError("every thread that decodes images hangs")
        return found

    def next_due(self) -> float | None:
        """Seconds until take() has something to say even if no thread comes back."""
        starts = [job.started for job in self._running.values() if job is not None]
        return max(0.0, min(starts) + self._seconds - self._clock()) if starts else None

    def close(self) -> None:
        """What hangs is left behind, and with it the descriptor that it would write to."""
        idle = all(future.done() for future in self._running)
        self._pool.shutdown(wait=idle)
        if idle:
            os.close(self._wake)

    def _run(self, job: Job) -> None:
        try:
            job.prepared = self._prepare(job.command.data, job.command.rows)
        except EpdError as error:
            job.error = error
        except Exception as error:  # a processor's own complaint about a picture; its text may hold anything
            job.error = InvalidArgument(f"the image cannot be processed ({type(error).__name__})")
        job.ready = self._clock()
