"""How many blocks of embeddings a tenant keeps: its own images go first, nobody else's do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.encoder.cache import EmbeddingCache, Image, Reservation
from common.errors import Overloaded

BLOCK_ROWS = 4
A, B = b"a", b"b"


def cache(num_blocks: int = 8) -> EmbeddingCache:
    return EmbeddingCache(num_blocks, BLOCK_ROWS, np.zeros(num_blocks, np.uint64))


def image(tenant: bytes, number: int, blocks: int = 2) -> Image:
    return tenant + number.to_bytes(31), blocks * BLOCK_ROWS


def encoded(made: EmbeddingCache, tenant: bytes, *images: Image, most: int | None = None) -> Reservation:
    reservation = made.reserve(images, tenant=tenant, most=most)
    for entry in reservation.new:
        made.finish(entry)
    assert made.check_integrity() == []
    return reservation


def kept(made: EmbeddingCache, tenant: bytes) -> int:
    return sum(made.has(image(tenant, number)) for number in range(40))


def test_a_flood_pushes_out_its_own_images_alone() -> None:
    made = cache(8)
    made.release(encoded(made, B, image(B, 0), image(B, 1)))
    for number in range(20):
        made.release(encoded(made, A, image(A, number), most=4))
        assert made.check_integrity() == []
    assert kept(made, B) == 2
    assert made.has(image(A, 19))
    assert made.has(image(A, 18))
    assert kept(made, A) == 2
    for number in range(20):  # without a limit it does
        made.release(encoded(made, A, image(A, number)))
    assert kept(made, B) == 0


def test_what_is_pinned_stays_and_counts() -> None:
    made = cache(8)
    first = encoded(made, A, image(A, 0), most=2)
    second = encoded(made, A, image(A, 1), most=2)
    assert kept(made, A) == 2
    made.release(first)
    assert kept(made, A) == 1  # more than it may keep: gone at once
    made.release(second)
    assert kept(made, A) == 1
    with pytest.raises(Overloaded):
        encoded(made, B, image(B, 0, 4)) and encoded(made, B, image(B, 1, 5))
    assert made.check_integrity() == []


def test_images_that_a_call_needs_are_not_evicted_for_it() -> None:
    made = cache(8)
    made.release(encoded(made, A, image(A, 0), most=2))
    again = encoded(made, A, image(A, 0), image(A, 1), most=2)
    assert again.ready == 1
    made.release(again)
    assert made.check_integrity() == []
    assert kept(made, A) == 1


def test_an_image_that_failed_is_nobodys() -> None:
    made = cache(8)
    reservation = made.reserve([image(A, 0)], tenant=A, most=2)
    made.fail(reservation.new[0])
    made.release(reservation)
    assert made.check_integrity() == []
    assert made.free == 8


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 12), st.sampled_from([None, 1, 2, 4])), max_size=50))
def test_no_tenant_keeps_more_than_its_last_limit(steps: list[tuple[bytes, int, int | None]]) -> None:
    made = cache(10)
    last: dict[bytes, int | None] = {}
    for tenant, number, most in steps:
        new = not made.has(image(tenant, number))
        made.release(encoded(made, tenant, image(tenant, number), most=most))
        assert made.check_integrity() == []
        if new:
            last[tenant] = most
        if (limit := last.get(tenant)) is not None:
            assert 2 * kept(made, tenant) <= max(limit, 0) or not new
