"""From an image file to the RGB picture that an image processor takes. For encode workers: this decodes.

The one conversion, whatever the file is. When it changes, so must CONVERSION_VERSION in common/models/vision/spec.py, a
part of media keys.

1. The first frame of an animation or of several pages; the image itself where a preview comes with it.
2. To 8-bit RGB. Transparent pixels (an alpha channel, a transparent palette entry or colour) are composed on white.
   Palettes, greyscale, black and white, CMYK and YCbCr as Pillow converts them. 16-bit samples keep their high byte.
   Colour profiles are not applied. 32-bit integer, floating-point and Lab samples have no agreed range: refused.
3. Turned as its EXIF orientation says.
"""

import numpy as np
from PIL import Image

from common.errors import InvalidArgument
from common.media.header import open_header, orientation, probe
from common.media.limits import MediaLimits

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ALPHA = frozenset({"RGBA", "RGBa", "LA", "PA"})
_PLAIN = frozenset({"1", "L", "P", "RGB", "RGBX", "CMYK", "YCbCr"})


def open_image(data: bytes, limits: MediaLimits | None = None, field: str = "image") -> Image.Image:
    """The picture, mode RGB, of the size that `probe` tells. `field` names it in errors.

    Raises InvalidArgument as `probe` does, and for pixels that are damaged, cut off or of a kind without a conversion.
    """
    info = probe(data, limits, field)
    image = open_header(data, limits, field)
    turn = _TURNS.get(orientation(image, data))
    is_tiff = image.format == "TIFF"
    try:
        image.load()
    except Exception:  # as in open_header
        raise InvalidArgument(f"{field}: the {info.format} data is damaged or truncated", field=field) from None
    picture = _to_rgb(image, field)
    if turn is not None and not is_tiff:  # Pillow turns TIFF while it loads
        picture = picture.transpose(turn)
    if picture.size != (info.width, info.height):
        raise InvalidArgument(f"{field}: the {info.format} header and its data disagree about the size", field=field)
    return picture


def _to_rgb(image: Image.Image, field: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in _ALPHA or (image.mode in _PLAIN and "transparency" in image.info):
        picture = image.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    if image.mode in _PLAIN:
        return image.convert("RGB")
    raise InvalidArgument(f"{field}: images of mode {image.mode} are not supported", field=field)
