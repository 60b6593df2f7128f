"""Image files: all six formats, damaged in every way, through the header's reader and the encoder's preparation."""

import asyncio
import base64
import io
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import psutil
from PIL import Image

from common.encoder.vision_executor import VisionExecutor
from common.engine.settings import EngineSettings
from common.errors import EpdError, InvalidArgument
from common.media import data_uri
from common.media.header import FORMATS, probe
from common.media.images import open_image
from common.media.limits import MediaLimits
from common.models.config import embedding_layout
from tests.fuzz.messages import damaged
from tests.fuzz.oracle import Fault, check_words
from tests.fuzz.surface import Surface

LIMITS = MediaLimits(max_pixels=512 * 512, max_file_bytes=256 * 1024)
GROWN_BYTES = 1 << 30  # of the process, over a run: some pictures' worth
_SIZES = (0, 1, 2, 3, 4, 27, 28, 56, 255, 256, 512, 513, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF)


def _saved(mode: str, kind: str, size: tuple[int, int] = (60, 44), **options: Any) -> bytes:
    image = Image.linear_gradient("L").resize(size)
    out = io.BytesIO()
    (image.convert("RGB") if mode in ("CMYK", "P", "RGBA", "YCbCr") else image).convert(mode).save(out, kind, **options)
    return out.getvalue()


@cache
def files() -> tuple[bytes, ...]:
    """Good files of every format, and of the kinds within each."""
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "blue")]
    made = [
        *(_saved(mode, "PNG") for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")),
        _saved("RGB", "PNG", exif=exif),
        _saved("P", "PNG", transparency=0),
        *(_saved(mode, "JPEG") for mode in ("RGB", "L", "CMYK")),
        _saved("RGB", "JPEG", progressive=True, exif=exif),
        _saved("RGB", "WEBP", lossless=True, exif=exif),
        _saved("RGBA", "WEBP"),
        _saved("P", "GIF"),
        *(_saved(mode, "BMP") for mode in ("RGB", "L", "1", "P", "RGBA")),
        *(_saved(mode, "TIFF") for mode in ("RGB", "L", "1", "CMYK", "RGBA", "I;16", "F")),
        *(_saved("RGB", "TIFF", compression=name) for name in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg")),
        _saved("1", "TIFF", compression="group4"),
        _saved("RGB", "TIFF", exif=exif),
    ]
    for kind in ("GIF", "WEBP", "TIFF", "PNG"):
        out = io.BytesIO()
        frames[0].save(out, kind, save_all=True, append_images=frames[1:])
        made.append(out.getvalue())
    return tuple(made)


def _chunks(data: bytes) -> list[bytes]:
    """Of a PNG, each whole."""
    found, at = [], 8
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        found.append(data[at:end])
        at = end
    return found


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _reordered(rng: Random, data: bytes) -> bytes:
    chunks = _chunks(next(file for file in files() if file.startswith(b"\x89PNG")) if data[:4] != b"\x89PNG" else data)
    rng.shuffle(chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks[: rng.randint(1, len(chunks))] * rng.choice((1, 1, 2)))


def _bomb(rng: Random, _: bytes) -> bytes:
    """A small file that promises, or holds, far more than it should."""
    width, height = rng.choice(_SIZES), rng.choice(_SIZES)
    header = struct.pack(
        ">IIBBBBB", width, height, rng.choice((1, 8, 16)), rng.choice((0, 2, 3, 6)), 0, 0, rng.choice((0, 1))
    )
    zeros = zlib.compress(bytes(rng.choice((0, 10, 1 << 16, 1 << 22))))
    text = _chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(1 << 22))) if rng.random() < 0.3 else b""
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + text + _chunk(b"IDAT", zeros) + _chunk(b"IEND", b"")


def _header_lies(rng: Random, data: bytes) -> bytes:
    """Sizes and counts among the first bytes changed, in either order of bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(2, min(len(data) - 4, 120)), rng.choice((1, 2, 4))
        value = rng.choice(_SIZES) & ((1 << 8 * size) - 1)
        changed[at : at + size] = value.to_bytes(size, rng.choice(("big", "little")))
    if changed.startswith(b"\x89PNG"):  # so that more than the checksum is looked at
        changed[29:33] = struct.pack(">I", zlib.crc32(bytes(changed[12:29])))
    return bytes(changed)


def _spliced(rng: Random, data: bytes) -> bytes:
    other = rng.choice(files())
    return data[: rng.randrange(1, len(data))] + other[rng.randrange(len(other)) :]


def _padded(rng: Random, data: bytes) -> bytes:
    return data + rng.choice((b"\0", b"\xff", b"\x89PNG")) * rng.choice((1, 1000, LIMITS.max_file_bytes))


_WAYS: tuple[Callable[[Random, bytes], bytes], ...] = (
    damaged,
    damaged,
    _header_lies,
    _header_lies,
    _spliced,
    _reordered,
    _bomb,
    _padded,
)


class Pictures(Surface):
    name = "images"
    at_once = 2

    def __init__(self, checkpoint: Path) -> None:
        """checkpoint: of a model that takes images; its image processor is used."""
        engine = EngineSettings(model_dir=str(checkpoint), dtype="float32", device="cpu")
        layout = embedding_layout(engine)
        assert layout is not None
        self._executor = VisionExecutor(engine, layout, LIMITS)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fuzzed-image")
        self._memory = psutil.Process().memory_info().rss

    async def one(self, rng: Random) -> str:
        data = rng.choice(files())
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            data = rng.choice(_WAYS)(rng, data)
            if not data:
                break
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, data, rng)

    def _read(self, data: bytes, rng: Random) -> str:
        try:
            if rng.random() < 0.1:
                data = data_uri.parse(_uri(rng, data), LIMITS)
            info = probe(data, LIMITS)
            if info.format not in FORMATS or info.width * info.height > LIMITS.max_pixels:
                raise Fault(f"a picture of {info}")
            picture = open_image(data, LIMITS)
            if picture.mode != "RGB" or picture.size != (info.width, info.height):
                raise Fault(f"{picture.mode} {picture.size}, announced as {info}")
            self._executor.prepare(data, 0)
        except InvalidArgument as error:
            check_words(error.message)
            return "OK" if error.message.startswith("the image makes") else error.reason  # good, but of other rows
        except EpdError as error:
            raise Fault(f"{error.reason}: {error.message}") from error
        return "OK"

    async def alive(self) -> None:
        self._read_good()
        grown = psutil.Process().memory_info().rss - self._memory
        if grown > GROWN_BYTES:
            raise Fault(f"the process has grown by {grown >> 20} MiB")

    def _read_good(self) -> None:
        for data in files():
            if probe(data, LIMITS).format not in FORMATS:
                raise Fault("a good file is not read any more")


def _uri(rng: Random, data: bytes) -> str:
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    at = rng.randrange(len(uri))
    return rng.choice((uri, uri[:at], uri[:at] + rng.choice(("=", "%", "%4", "é", ",", ";", " ", "\0")) + uri[at:]))
