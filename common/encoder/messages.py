"""What goes between an encode worker's service and its encoder process, in msgpack over a socket.

Which blocks an image gets and how long it keeps them is the service's matter (cache.py): the process writes to the
blocks of a job until it has answered it, and never afterwards.
"""

import msgspec


class Command(msgspec.Struct, tag=True, kw_only=True):
    """Service to encoder."""


class Answer(msgspec.Struct, tag=True, kw_only=True):
    """Encoder to service."""


class Encode(Command):
    """Answers: Encoded, ImageFailed or, after a Drop, Dropped."""

    job: int
    data: bytes  # the file
    rows: int  # that it must have
    blocks: list[int]  # of the pool, for these rows
    priority: int = 0


class Drop(Command):
    """Nobody waits for the job any more. Answered with Dropped unless another answer is on its way."""

    job: int


class Shutdown(Command):
    pass


class Ready(Answer):
    """The model is loaded."""

    executor: str
    weight_bytes: int


class Encoded(Answer):
    """The rows are in the blocks. Durations of this image; those of a batch count for each image in it."""

    job: int
    queue_seconds: float  # for a thread, and then for its batch
    preprocess_seconds: float
    forward_seconds: float


class ImageFailed(Answer):
    """reason is one of common.errors."""

    job: int
    reason: str
    message: str


class Dropped(Answer):
    job: int


AnyCommand = Encode | Drop | Shutdown
AnyAnswer = Ready | Encoded | ImageFailed | Dropped
