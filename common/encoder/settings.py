"""How an encoder is set up. What it has in common with an engine (model, dtype, device, executor) is EngineSettings."""

import msgspec

from common.media.limits import MIB, MediaLimits


class TimedVision(msgspec.Struct, frozen=True, kw_only=True):
    """Latency model of the `timed` encoder: seconds an image for preparation; base + per_row · rows for a batch."""

    preprocess_seconds: float = 0.0
    base_seconds: float = 0.002
    seconds_per_row: float = 0.00005


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All knobs of one encoder."""

    rows: int = 16384  # of the pool: published, cached and being encoded
    batch_images: int = 8  # in one forward pass
    batch_rows: int = 4096  # in one forward pass of several images
    preprocess_threads: int = 2  # decoding files, resizing, normalising
    preprocess_seconds: float = 10.0  # longest for one image; then it is refused
    max_pending_bytes: int = 256 * MIB  # files queued or under way; more are refused with Overloaded
    media: MediaLimits = MediaLimits()  # a call's images; gateways check the same
    timed: TimedVision = TimedVision()
