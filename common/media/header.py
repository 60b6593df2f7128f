"""What an image file says of itself, read from its header: no pixel is decoded here."""

import io
import logging
import warnings
from typing import Any

import msgspec

# Importing a plugin registers its format. Without all six, Image.open would import every plugin that Pillow has.
from PIL import (  # noqa: F401
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from common.errors import InvalidArgument
from common.media.limits import MediaLimits

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_PNG = b"\x89PNG\r\n\x1a\n"
_MAGIC = (
    (_PNG, "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)
_SIDEWAYS = range(5, 9)  # EXIF orientations that exchange width and height

# Pillow warns of half of what it refuses; our own limit is lower and refuses.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# What is wrong with a file is told to whoever sent it. At DEBUG, Pillow also logs what the tags of a file say.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """width and height in pixels, after EXIF transposition. mode: Pillow's, of the pixels as they are stored."""

    format: str  # one of FORMATS
    width: int
    height: int
    mode: str


def probe(data: bytes, limits: MediaLimits | None = None, field: str = "image") -> ImageInfo:
    """Format and size of an image file. `field` names it in errors.

    Raises InvalidArgument: empty, too many bytes, no image of FORMATS, a damaged or truncated header, a size beyond the
    limits. What the client says of the type, or a file's name, plays no part.
    """
    image = open_header(data, limits, field)
    width, height = image.size
    if orientation(image, data) in _SIDEWAYS and not turned_by_pillow(image):
        width, height = height, width
    return ImageInfo(format=sniff(data, field), width=width, height=height, mode=image.mode)


def open_header(data: bytes, limits: MediaLimits | None, field: str) -> Image.Image:
    """The image with nothing but its header read. Raises as `probe` does."""
    limits = limits or MediaLimits()
    limits.check_file(len(data), field)
    found = sniff(data, field)
    try:
        image = Image.open(io.BytesIO(data), formats=[found])
    except Image.DecompressionBombError:
        raise InvalidArgument(f"{field}: the image has more than {limits.max_pixels} pixels", field=field) from None
    except Exception:  # Pillow's parsers end in nearly any error when a file is damaged; its text may quote the file
        raise InvalidArgument(f"{field}: the {found} header is damaged or truncated", field=field) from None
    limits.check_size(*image.size, field)
    return image


def sniff(data: bytes, field: str = "image") -> str:
    """One of FORMATS, by the first bytes. Raises InvalidArgument."""
    if not data:
        raise InvalidArgument(f"{field}: the image is empty", field=field)
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    raise InvalidArgument(f"{field}: the data is no image of a known type; known: {', '.join(FORMATS)}", field=field)


def orientation(image: Image.Image, data: bytes) -> int:
    """The EXIF (or XMP) orientation, 1 to 8; 1 where there is none that can be read. Decodes nothing.

    image: of `open_header(data)`.
    """
    try:
        if image.format == "PNG" and "exif" not in image.info and (late := _late_png_exif(data)):
            image.info["exif"] = b"Exif\0\0" + late
        # Not image.getexif(): PNG's decodes the pixels first, in search of what _late_png_exif finds.
        value: Any = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF data, as above; the picture is still fine
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def turned_by_pillow(image: Image.Image) -> bool:
    """TIFF's orientation tag is a part of the format: Pillow has exchanged width and height in the header already."""
    return isinstance(image, TiffImagePlugin.TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2


def _late_png_exif(data: bytes) -> bytes:
    """Content of the eXIf chunk, which may come after the pixels: length, type, content, checksum of each chunk."""
    at = len(_PNG)
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind == b"eXIf":
            return data[at + 8 : at + 8 + length]
        at += 12 + length
    return b""
