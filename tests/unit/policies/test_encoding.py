"""Which encoder makes which embedding, against brute force."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from common.policies.encoding import EncoderView, Image, Part, assign


def encoder(worker_id: str, pending: int = 0, total: int = 1000, cached: tuple[bytes, ...] = ()) -> EncoderView:
    return EncoderView(
        worker_id=worker_id, total_rows=total, pending_rows=pending, cached=frozenset(key[:16] for key in cached)
    )


def images(*rows: int) -> list[Image]:
    return [Image(index, bytes([index]) * 32, count) for index, count in enumerate(rows)]


def indexes(parts: list[Part] | None) -> dict[str, list[int]]:
    return {part.worker_id: [image.index for image in part.images] for part in parts or []}


def makespan(parts: list[Part], encoders: list[EncoderView]) -> int:
    busy = {each.worker_id: each.pending_rows for each in encoders}
    for part in parts:
        busy[part.worker_id] += sum(image.rows for image in part.images if image.index not in part.cached)
    return max(busy[part.worker_id] for part in parts)


@given(st.integers(1, 8), st.integers(1, 5))
def test_equal_images_take_the_rounded_up_share(n: int, k: int) -> None:
    """EPDServe: the speed-up of n images on k encoders is n / ⌈n/k⌉."""
    encoders = [encoder(f"e{i}") for i in range(k)]
    parts = assign(images(*[64] * n), encoders)
    assert parts is not None
    assert makespan(parts, encoders) == 64 * -(-n // k)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.lists(st.integers(0, 100), min_size=1, max_size=3))
def test_every_image_once_and_close_to_the_best(rows: list[int], pending: list[int]) -> None:
    encoders = [encoder(f"e{i}", pending=busy) for i, busy in enumerate(pending)]
    parts = assign(images(*rows), encoders)
    assert parts is not None
    assert sorted(itertools.chain(*indexes(parts).values())) == list(range(len(rows)))
    assert all(list(part.images) == sorted(part.images, key=lambda image: image.index) for part in parts)

    def ends(choice: tuple[int, ...]) -> int:
        busy = list(pending)
        for where, count in zip(choice, rows, strict=True):
            busy[where] += count
        return max(busy[where] for where in choice)

    best = min(ends(choice) for choice in itertools.product(range(len(pending)), repeat=len(rows)))
    assert makespan(parts, encoders) <= 4 / 3 * best + max(pending)


def test_cached_images_go_where_they_are_and_cost_nothing() -> None:
    asked = images(64, 64, 64)
    parts = assign(asked, [encoder("e0"), encoder("e1", pending=10_000, cached=(asked[1].key,))])
    assert indexes(parts) == {"e0": [0, 2], "e1": [1]}
    assert {part.worker_id: part.cached for part in parts or []} == {"e0": frozenset(), "e1": frozenset({1})}


def test_copies_of_a_picture_stay_together() -> None:
    key = b"k" * 32
    parts = assign([Image(i, key, 64) for i in range(4)], [encoder("e0"), encoder("e1")])
    assert len(parts or []) == 1


def test_excluded_encoders_are_the_last_resort() -> None:
    asked = images(64, 64)
    assert indexes(assign(asked, [encoder("e0"), encoder("e1")], {"e0"})) == {"e1": [0, 1]}
    assert indexes(assign(asked, [encoder("e0")], {"e0"})) == {"e0": [0, 1]}
    assert assign(asked, []) is None


def test_an_image_goes_to_a_pool_that_can_hold_it() -> None:
    asked = images(500, 10)
    assert indexes(assign(asked, [encoder("e0", total=100), encoder("e1", total=600, pending=900)])) == {
        "e1": [0],
        "e0": [1],
    }
    # Larger than any: the largest refuses it by name.
    assert indexes(assign(images(5000), [encoder("e0", total=100), encoder("e1", total=600)])) == {"e1": [0]}


def test_a_picture_comes_back_to_the_same_encoder() -> None:
    encoders = [encoder(f"e{i}") for i in range(4)]
    asked = images(*[64] * 32)
    first = {image.index: indexes(assign([image], encoders)) for image in asked}
    again = {image.index: indexes(assign([image], list(reversed(encoders)))) for image in asked}
    assert first == again
    assert len({next(iter(where)) for where in first.values()}) == 4  # and they spread
