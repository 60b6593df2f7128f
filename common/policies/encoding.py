"""Which encode worker makes which image's embedding: a pure function over a snapshot of the fleet.

Images of one request go to several encoders at once (EPDServe's intra-request parallelism): n equal images on k idle
encoders take ⌈n/k⌉ encodings instead of n. An image whose embedding an encoder has goes there and costs nothing.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence

import msgspec

from common.cache.keys import INDEX_KEY_BYTES

ENCODE = "encode"


class EncoderView(msgspec.Struct, frozen=True, kw_only=True):
    """One routable encode worker as the gateway sees it. Rows are of its embedding pool."""

    worker_id: str
    total_rows: int
    pending_rows: int = 0  # queued or under way
    cached: Collection[bytes] = frozenset()  # media keys, cut to INDEX_KEY_BYTES


class Image(msgspec.Struct, frozen=True):
    index: int  # in the request
    key: bytes
    rows: int


class Part(msgspec.Struct, frozen=True):
    """What one encoder does of a request. cached: indexes of images whose embedding it has already."""

    worker_id: str
    images: tuple[Image, ...]
    cached: frozenset[int]


def assign(
    images: Sequence[Image], encoders: Iterable[EncoderView], exclude: Collection[str] = frozenset()
) -> list[Part] | None:
    """Every image to one encoder, so that the last is ready soonest; None when there is no encoder to ask.

    Largest first, each to the encoder that is then done first (Graham's LPT rule, at most 4/3 of the best makespan).
    Copies of an image stay together. Of equals, rendezvous hashing decides, so that a picture tends to come back to
    where it was. Excluded encoders are used only when there are no others. Raises nothing: an image that is larger than
    every pool goes to the largest, which refuses it by name.
    """
    able = sorted(encoders, key=lambda encoder: encoder.worker_id)
    able = [encoder for encoder in able if encoder.worker_id not in exclude] or able
    if not able:
        return None
    busy = {encoder.worker_id: encoder.pending_rows for encoder in able}
    place: dict[bytes, str] = {}
    hits: set[bytes] = set()
    for image in sorted(images, key=lambda image: (-image.rows, image.index)):
        if image.key in place:
            continue
        holders = [encoder for encoder in able if image.key[:INDEX_KEY_BYTES] in encoder.cached]
        if holders:
            hits.add(image.key)
        largest = max(encoder.total_rows for encoder in able)
        room = holders or [encoder for encoder in able if encoder.total_rows >= min(image.rows, largest)]
        best = min(room, key=lambda encoder: (busy[encoder.worker_id], _rendezvous(image.key, encoder.worker_id)))
        place[image.key] = best.worker_id
        busy[best.worker_id] += 0 if holders else image.rows
    parts: dict[str, list[Image]] = {}
    for image in sorted(images, key=lambda image: image.index):
        parts.setdefault(place[image.key], []).append(image)
    return [
        Part(worker_id, tuple(mine), frozenset(image.index for image in mine if image.key in hits))
        for worker_id, mine in parts.items()
    ]


def _rendezvous(key: bytes, worker_id: str) -> bytes:
    return hashlib.sha256(key + worker_id.encode()).digest()
