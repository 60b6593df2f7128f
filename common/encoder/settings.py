"""How an encoder is set up. What it has in common with an engine (model, dtype, device, executor) is EngineSettings."""

import msgspec

from common.bounds import Positive, Seconds, Span
from common.media.limits import MIB, MediaLimits


class TimedVision(msgspec.Struct, frozen=True, kw_only=True):
    """Latency model of the `timed` encoder: seconds an image for preparation; base + per_row · rows for a batch."""

    preprocess_seconds: Seconds = 0.0
    base_seconds: Seconds = 0.002
    seconds_per_row: Seconds = 0.00005


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All knobs of one encoder."""

    rows: Positive = 16384  # of the pool: published, cached and being encoded
    batch_images: Positive = 8  # in one forward pass
    batch_rows: Positive = 4096  # in one forward pass of several images
    preprocess_threads: Positive = 2  # decoding files, resizing, normalising
    preprocess_seconds: Span = 10.0  # longest for one image; then it is refused
    max_pending_bytes: Positive = 256 * MIB  # files queued or under way; more are refused with Overloaded
    media: MediaLimits = MediaLimits()  # a call's images; gateways check the same
    timed: TimedVision = TimedVision()
