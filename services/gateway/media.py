"""From the images of a request to what workers need of them."""

import msgspec


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt; see common.engine.messages.Media for start, length, rows and grid."""

    index: int  # in the request, from 0
    key: bytes  # common.cache.keys.media_key
    data: bytes  # the file as the client sent it
    start: int
    length: int
    rows: int
    grid: tuple[int, ...] = ()
