"""The embedding cache: room, pins, eviction; by hand and by random histories."""

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.cache.keys import INDEX_KEY_BYTES
from common.encoder.cache import EmbeddingCache, Entry, Image, Reservation, State
from common.errors import NeverFits, Overloaded

BLOCK_ROWS = 4


def image(name: str, rows: int = 5) -> Image:
    return name.encode() * 32, rows


def cache(num_blocks: int = 8) -> EmbeddingCache:
    return EmbeddingCache(num_blocks, BLOCK_ROWS, np.zeros(num_blocks, np.uint64))


def encoded(made: EmbeddingCache, *images: Image) -> Reservation:
    reservation = made.reserve(images)
    for entry in reservation.new:
        made.finish(entry)
    return reservation


def clean(made: EmbeddingCache) -> None:
    assert made.check_integrity() == []


def test_second_call_hits() -> None:
    made = cache()
    first = encoded(made, image("a"), image("b"))
    assert (first.ready, len(first.new), made.held, made.free) == (0, 2, 4, 4)
    made.release(first)
    assert (made.cached, made.free, made.held) == (4, 4, 0)
    second = made.reserve([image("b"), image("a")])
    assert (second.ready, second.new) == (2, ())
    assert [entry.blocks for entry in second.entries] == [entry.blocks for entry in reversed(first.entries)]
    clean(made)


def test_an_image_twice_in_a_call_is_encoded_once() -> None:
    made = cache()
    reservation = encoded(made, image("a"), image("a"))
    assert len(reservation.new) == 1
    assert reservation.entries[0] is reservation.entries[1]
    assert made.held == 2
    clean(made)
    made.release(reservation)
    assert made.cached == 2
    clean(made)


def test_case_d9_larger_than_the_pool_is_refused_at_once() -> None:
    """One image alone, and two that would fit one after the other: never rescheduled for ever."""
    made = cache()
    with pytest.raises(NeverFits, match="33 rows"):
        made.reserve([image("a", 33)])
    with pytest.raises(NeverFits, match="40 rows"):
        made.reserve([image("a", 20), image("b", 20)])
    made.reserve([image("a", 32)])
    clean(made)


def test_all_or_nothing_and_never_a_queue() -> None:
    made = cache()
    held = encoded(made, image("a", 24))
    with pytest.raises(Overloaded) as refused:
        made.reserve([image("b", 4), image("c", 8)], retry_after_seconds=0.7)
    assert refused.value.retry_after_seconds == 0.7
    assert (made.free, made.has(image("b", 4))) == (2, False)
    made.release(held)
    made.reserve([image("b", 4), image("c", 8)])
    clean(made)


def test_the_least_recently_used_goes_first_and_pinned_ones_never() -> None:
    made = cache()
    for name in "abcd":
        made.release(encoded(made, image(name)))
    made.release(made.reserve([image("a")]))
    pinned = made.reserve([image("b")])
    encoded(made, image("e"), image("f"))
    assert [name for name in "abcdef" if made.has(image(name))] == ["a", "b", "e", "f"]
    assert pinned.entries[0].state is State.READY
    clean(made)


def test_images_of_the_call_itself_are_not_evicted_for_it() -> None:
    made = cache(6)
    made.release(encoded(made, image("a")))
    made.release(encoded(made, image("b")))
    encoded(made, image("c"))
    with pytest.raises(Overloaded):
        made.reserve([image("a"), image("b"), image("d")])
    reservation = made.reserve([image("a"), image("d")])
    assert reservation.ready == 1
    assert not made.has(image("b"))
    clean(made)


def test_new_owners_have_new_generations() -> None:
    made = cache(2)
    first = encoded(made, image("a"))
    before = [made.generation(block) for block in first.entries[0].blocks]
    made.release(first)
    made.release(made.reserve([image("a")]))
    assert [made.generation(block) for block in first.entries[0].blocks] == before
    encoded(made, image("b"))
    assert all(made.generation(block) > old for block, old in zip(first.entries[0].blocks, before, strict=True))


def test_a_wait_that_is_given_up_goes_on_for_others() -> None:
    made = cache()
    first, second = made.reserve([image("a")]), made.reserve([image("a")])
    assert second.new == ()
    assert made.release(first) == []  # somebody else waits
    assert made.release(second) == list(first.new)
    assert made.release(second) == []
    clean(made)
    made.fail(first.new[0])
    assert made.free == made.num_blocks
    clean(made)


def test_failed_images_leave_nothing() -> None:
    made = cache()
    reservation = made.reserve([image("a"), image("b")])
    made.fail(reservation.new[0])
    made.finish(reservation.new[1])
    clean(made)
    again = made.reserve([image("a")])
    assert again.new[0] is not reservation.new[0]
    assert made.release(reservation) == []
    clean(made)


def test_events_are_net_and_cut() -> None:
    made = cache(2)
    made.release(encoded(made, image("a")))
    assert made.events() == ([b"a" * INDEX_KEY_BYTES], [])
    made.release(encoded(made, image("b")))
    assert made.events() == ([b"b" * INDEX_KEY_BYTES], [b"a" * INDEX_KEY_BYTES])
    made.release(encoded(made, image("c")))
    made.release(encoded(made, image("b")))
    assert made.events() == ([], [])


class Histories(RuleBasedStateMachine):
    """Calls come, go and fail in any order; the encoder answers in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = cache(6)
        self.calls: list[Reservation] = []
        self.encoding: list[Entry] = []
        self.owners: dict[int, tuple[Entry, int]] = {}  # block → entry and its generation
        self.seen: set[bytes] = set()  # what a watcher knows

    @rule(images=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 16)), min_size=1, max_size=4))
    def reserve(self, images: list[tuple[str, int]]) -> None:
        free, cached = self.cache.free, self.cache.cached
        try:
            reservation = self.cache.reserve([image(name, rows) for name, rows in images])
        except (NeverFits, Overloaded) as error:
            refused: type[Exception] | None = type(error)
        else:
            refused = None
        distinct = {image(name, rows) for name, rows in images}
        never = sum(self.cache.blocks(rows) for _, rows in distinct) > self.cache.num_blocks
        assert (refused is NeverFits) == never
        if refused is not None:
            assert (self.cache.free, self.cache.cached) == (free, cached)
            return
        for entry in reservation.new:
            self.encoding.append(entry)
            for block in entry.blocks:
                generation = self.cache.generation(block)
                if block in self.owners:
                    former, old = self.owners[block]
                    assert former.state is State.GONE
                    assert generation > old
                self.owners[block] = entry, generation
        self.calls.append(reservation)

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.calls))
        self.calls.remove(call)
        for entry in self.cache.release(call):
            assert entry.state is State.ENCODING
            assert not any(entry in other.entries for other in self.calls)

    @precondition(lambda self: self.encoding)
    @rule(data=st.data(), well=st.booleans())
    def answer(self, data: st.DataObject, well: bool) -> None:
        entry = data.draw(st.sampled_from(self.encoding))
        self.encoding.remove(entry)
        (self.cache.finish if well else self.cache.fail)(entry)

    @rule()
    def watch(self) -> None:
        stored, removed = self.cache.events()
        assert not set(stored) & set(removed)
        assert not set(stored) & self.seen
        assert set(removed) <= self.seen
        self.seen = (self.seen - set(removed)) | set(stored)
        ready = {entry.image[0][:INDEX_KEY_BYTES] for entry, _ in self.owners.values() if entry.state is State.READY}
        assert self.seen == ready

    @invariant()
    def books_balance(self) -> None:
        clean(self.cache)
        assert self.cache.free + self.cache.cached + self.cache.held == self.cache.num_blocks
        for call in self.calls:  # nothing that somebody has pinned is another's
            for entry in call.entries:
                assert entry.state is State.GONE or all(self.owners[block][0] is entry for block in entry.blocks)

    def teardown(self) -> None:
        for call in self.calls:
            self.cache.release(call)
        for entry in self.encoding:
            self.cache.fail(entry)
        assert self.cache.held == 0
        clean(self.cache)


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis_settings(max_examples=100, stateful_step_count=30, deadline=None)
