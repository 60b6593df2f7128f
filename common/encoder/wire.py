"""Frames between a service and its encoder process, as those of an engine."""

import msgspec

from common.cache.keys import EmbeddingLayout
from common.encoder.messages import AnyAnswer, AnyCommand
from common.encoder.settings import EncoderSettings
from common.engine.settings import EngineSettings
from common.engine.wire import FrameReader, frame


class Launch(msgspec.Struct, frozen=True):
    """First frame on the socket, JSON: all that an encoder process is told."""

    engine: EngineSettings
    settings: EncoderSettings
    layout: EmbeddingLayout

    def encode(self) -> bytes:
        return frame(msgspec.json.encode(self))


def command_reader() -> FrameReader[AnyCommand]:
    return FrameReader(list[AnyCommand])


def answer_reader() -> FrameReader[AnyAnswer]:
    return FrameReader(list[AnyAnswer])
