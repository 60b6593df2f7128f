"""Threads that decode images: what hangs in one is given up, and the others go on."""

import os
import threading
from collections.abc import Callable

import pytest

from common.encoder.messages import Encode
from common.encoder.preparation import Job, Preparation, Queue
from common.errors import InvalidArgument
from common.process import readable

PATIENCE_SECONDS = 20.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def job(number: int, data: bytes = b"x", priority: int = 0) -> Job:
    return Job(Encode(job=number, data=data, rows=1, blocks=[0], priority=priority), 0.0)


class Bench:
    """`b"hang"` hangs until `let_go`, `b"bug"` is a processor's own complaint."""

    def __init__(self, threads: int) -> None:
        self.clock, self.let_go = Clock(), threading.Event()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.preparation = Preparation(self._prepare, threads, 10.0, self.wake, self.clock)

    def _prepare(self, data: bytes, rows: int) -> bytes:
        if data == b"hang":
            self.let_go.wait(PATIENCE_SECONDS)
        if data == b"bug":
            raise ValueError("with the client's data in it")
        return data

    def through(self, count: int) -> list[Job]:
        found: list[Job] = []
        while len(found) < count:
            assert readable((self.wake,), PATIENCE_SECONDS)
            os.eventfd_read(self.wake)
            found += self.preparation.take()
            self.preparation.start(8)
        return found


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(threads: int) -> Bench:
        made.append(Bench(threads))
        return made[-1]

    yield make
    for each in made:
        each.let_go.set()
        each.preparation.close()


def test_in_order_of_priority(bench: Callable[[int], Bench]) -> None:
    made = bench(1)
    for number, priority in enumerate((0, 0, 5)):
        made.preparation.put(job(number, b"%d" % number, priority))
    made.preparation.start(8)
    assert [each.prepared for each in made.through(3)] == [b"2", b"0", b"1"]
    assert made.preparation.idle


def test_no_more_than_there_is_room_for(bench: Callable[[int], Bench]) -> None:
    made = bench(2)
    made.preparation.put(job(1))
    made.preparation.start(0)
    assert made.preparation.take() == []
    assert not made.preparation.idle


def test_what_takes_too_long_is_refused_and_the_others_go_on(bench: Callable[[int], Bench]) -> None:
    made = bench(2)
    made.preparation.put(job(1, b"hang"))
    made.preparation.start(8)
    made.clock.now = 4.0
    assert made.preparation.take() == []
    assert made.preparation.next_due() == 6.0
    made.clock.now = 10.0
    (late,) = made.preparation.take()
    assert isinstance(late.error, InvalidArgument)
    assert "10 s" in late.error.message
    made.preparation.put(job(2))
    made.preparation.start(8)
    (good,) = made.through(1)
    assert (good.command.job, good.error) == (2, None)
    made.let_go.set()


def test_when_every_thread_hangs_only_a_new_process_helps(bench: Callable[[int], Bench]) -> None:
    made = bench(1)
    made.preparation.put(job(1, b"hang"))
    made.preparation.start(8)
    made.clock.now = 10.0
    made.preparation.take()
    made.preparation.put(job(2))
    with pytest.raises(RuntimeError):
        made.preparation.take()


def test_a_processors_own_words_are_not_passed_on(bench: Callable[[int], Bench]) -> None:
    made = bench(1)
    made.preparation.put(job(1, b"bug"))
    made.preparation.start(8)
    (failed,) = made.through(1)
    assert isinstance(failed.error, InvalidArgument)
    assert "ValueError" in failed.error.message
    assert "data" not in failed.error.message


def test_dropped_anywhere(bench: Callable[[int], Bench]) -> None:
    made = bench(1)
    made.preparation.put(job(1, b"hang"))
    made.preparation.start(8)
    made.preparation.put(job(2))
    assert made.preparation.drop(1)
    assert made.preparation.drop(2)
    assert not made.preparation.drop(2)
    made.let_go.set()
    made.preparation.put(job(3))
    assert [each.command.job for each in made.through(1)] == [3]


def test_queue_drops_what_is_in_it() -> None:
    queue = Queue()
    for number in range(4):
        queue.put(job(number))
    assert queue.drop(1)
    assert not queue.drop(1)
    assert [queue.pop().command.job for _ in range(3)] == [0, 2, 3]
