"""From the images of a request to what workers need of them: file, key, place in the prompt. No pixel is decoded."""

import asyncio
import re
from collections.abc import Mapping, Sequence

import msgspec

from common.cache.keys import MediaSpan, media_key
from common.errors import EpdError, InvalidArgument
from common.media import data_uri
from common.media.header import probe
from common.media.limits import MediaLimits
from common.media.remote import RemoteImages
from common.models.vision.spec import Placement, Size
from epd.v1 import generation_pb2

_NUMBERED = re.compile(r"images\[([0-9]{1,6})\]")


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One image of a prompt; see common.engine.messages.Media for start, length, rows and grid."""

    index: int  # in the request, from 0
    key: bytes  # common.cache.keys.media_key
    data: bytes  # the file as the client sent it
    start: int
    length: int
    rows: int
    pixels: int = 0
    grid: tuple[int, ...] = ()
    field: str = ""  # where the client has put it, for errors

    @property
    def span(self) -> MediaSpan:
        return MediaSpan(self.key, self.start, self.length)


class Source(msgspec.Struct, frozen=True):
    """An image as the client sent it. field: where, for errors."""

    field: str
    image: generation_pb2.Image


class Picture(msgspec.Struct, frozen=True):
    """An image file whose header was read. size: (width, height) in pixels, after EXIF transposition."""

    data: bytes
    size: Size
    field: str = ""


def sources(request: generation_pb2.GenerateRequest) -> list[Source]:
    """A request's images in prompt order. Raises InvalidArgument naming one that is empty or in the wrong place."""
    if request.WhichOneof("prompt") != "chat":
        found = [Source(f"images[{i}]", image) for i, image in enumerate(request.images)]
    elif request.images:
        raise InvalidArgument("images of a chat go into its content parts, not into images", field="images")
    else:
        found = [
            Source(f"messages[{i}].content[{j}]", part.image)
            for i, message in enumerate(request.chat.messages)
            for j, part in enumerate(message.content)
            if part.WhichOneof("part") == "image"
        ]
    for source in found:
        if source.image.WhichOneof("source") is None:
            raise InvalidArgument(f"{source.field}: an image needs data or a url", field=source.field)
    return found


def where_sent(error: EpdError, media: Sequence[MediaItem]) -> EpdError:
    """An encode worker's error, which names an image by its number, with the place where the client has put it."""
    number = _NUMBERED.fullmatch(error.field)
    if number is None or not isinstance(error, InvalidArgument):
        return error
    item = next((each for each in media if each.index == int(number[1])), None)
    if item is None or not item.field:
        return error
    detail = error.message.removeprefix(f"image {item.index}: ")
    return InvalidArgument(f"{item.field}: {detail}", field=item.field)


async def fetch(found: Sequence[Source], remote: RemoteImages) -> dict[int, bytes]:
    """Files of the images that are URLs, by their place in `found`. Raises InvalidArgument as RemoteImages does."""
    wanted = {
        i: source
        for i, source in enumerate(found)
        if source.image.WhichOneof("source") == "url" and not data_uri.is_data_uri(source.image.url)
    }
    tasks = {i: asyncio.ensure_future(remote.fetch(each.image.url, each.field)) for i, each in wanted.items()}
    try:
        return {i: await task for i, task in tasks.items()}
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


def read(found: Sequence[Source], fetched: Mapping[int, bytes], limits: MediaLimits) -> list[Picture]:
    """Files and sizes. Raises InvalidArgument naming the image that is beyond a limit, or none at all."""
    pictures: list[Picture] = []
    total = 0
    for i, source in enumerate(found):
        data = fetched[i] if i in fetched else _data(source, limits)
        total += len(data)
        limits.check_total(total, source.field)
        info = probe(data, limits, source.field)
        pictures.append(Picture(data, (info.width, info.height), source.field))
    return pictures


def items(
    pictures: Sequence[Picture], placements: Sequence[Placement], options: bytes, salt: bytes
) -> tuple[MediaItem, ...]:
    """options: of VisionSpec. salt: the tenant's."""
    return tuple(
        MediaItem(
            index=i,
            key=media_key(picture.data, options, salt),
            data=picture.data,
            start=place.start,
            length=place.length,
            rows=place.rows,
            pixels=picture.size[0] * picture.size[1],
            grid=place.grid,
            field=picture.field,
        )
        for i, (picture, place) in enumerate(zip(pictures, placements, strict=True))
    )


def _data(source: Source, limits: MediaLimits) -> bytes:
    if source.image.WhichOneof("source") == "data":
        return source.image.data
    return data_uri.parse(source.image.url, limits, source.field)
