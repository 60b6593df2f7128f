"""Image files made by the tests."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


def quadrants(width: int = 32, height: int = 16) -> Image.Image:
    """Red, green above blue, yellow: every turn of it is told from every other."""
    image = Image.new("RGB", (width, height))
    for i, colour in enumerate(COLOURS):
        left, top = i % 2 * (width // 2), i // 2 * (height // 2)
        image.paste(colour, (left, top, left + width // 2, top + height // 2))
    return image


def encoded(image: Image.Image | None = None, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    (image or quadrants()).save(out, kind, **options)
    return out.getvalue()


def with_orientation(value: int, kind: str = "JPEG", image: Image.Image | None = None) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    lossless: dict[str, Any] = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}.get(kind, {})
    return encoded(image, kind, exif=exif, **lossless)


def chunk(kind: bytes, content: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of_size(width: int, height: int) -> bytes:
    """A header that promises so many pixels; there are none."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def data_uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
