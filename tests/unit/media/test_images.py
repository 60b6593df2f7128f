"""The one conversion to RGB, pixel by pixel; cases D3, D4, D5."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from common.errors import InvalidArgument
from common.media.header import probe
from common.media.images import open_image
from tests.unit.media.files import chunk, encoded, noise, quadrants, with_orientation

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


def pixels(data: bytes) -> np.ndarray:
    image = open_image(data)
    assert image.mode == "RGB"
    info = probe(data)
    assert image.size == (info.width, info.height)
    return np.asarray(image)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_decoded(kind: str) -> None:
    options: dict[str, Any] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}.get(kind, {})
    found = pixels(encoded(quadrants(), kind, **options))
    assert np.abs(found.astype(int) - np.asarray(quadrants())).max() <= (4 if kind == "JPEG" else 0)


TURNED = {
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("value", TURNED)
def test_case_d4_exif_orientation(kind: str, value: int) -> None:
    found = pixels(with_orientation(value, kind))
    expected = TURNED[value](np.asarray(quadrants()))
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= 4


def test_case_d4_exif_behind_the_pixels_of_a_png() -> None:
    plain, turned = encoded(quadrants()), with_orientation(6, "PNG")
    start = turned.index(b"eXIf")
    content = turned[start + 4 : start + 4 + int.from_bytes(turned[start - 4 : start], "big")]
    late = plain[:-12] + chunk(b"eXIf", content) + plain[-12:]
    assert (pixels(late) == np.rot90(np.asarray(quadrants()), -1)).all()


def uniform(mode: str, colour: Any, kind: str = "PNG", **options: Any) -> bytes:
    return encoded(Image.new(mode, (8, 8), colour), kind, **options)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (uniform("RGBA", (255, 0, 0, 0)), (255, 255, 255)),
        (uniform("RGBA", (255, 0, 0, 255)), (255, 0, 0)),
        (uniform("RGBA", (255, 0, 0, 51)), (255, 204, 204)),
        (uniform("RGBA", (0, 0, 0, 51), "WEBP", lossless=True), (204, 204, 204)),
        (uniform("LA", (0, 51)), (204, 204, 204)),
        (uniform("LA", (100, 255)), (100, 100, 100)),
        (uniform("L", 7), (7, 7, 7)),
        (uniform("L", 7, transparency=7), (255, 255, 255)),
        (uniform("RGB", (1, 2, 3), transparency=(1, 2, 3)), (255, 255, 255)),
        (uniform("RGB", (1, 2, 3), transparency=(1, 2, 4)), (1, 2, 3)),
        (uniform("1", 1), (255, 255, 255)),
        (uniform("1", 0), (0, 0, 0)),
        (uniform("I;16", 0x1234), (0x12, 0x12, 0x12)),
        (uniform("I;16", 0xFFFF), (255, 255, 255)),
        (uniform("I;16", 0x80FF, "TIFF"), (0x80, 0x80, 0x80)),
        (uniform("CMYK", (0, 255, 255, 0), "TIFF"), (255, 0, 0)),
        (uniform("CMYK", (0, 0, 0, 255), "JPEG", quality=100), (0, 0, 0)),
    ],
)
def test_case_d5_modes(data: bytes, expected: tuple[int, int, int]) -> None:
    assert np.unique(pixels(data).reshape(-1, 3), axis=0).tolist() == [list(expected)]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_case_d5_transparent_palette_entry(kind: str) -> None:
    image = Image.new("P", (8, 8), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(1, (0, 0, 4, 8))
    found = pixels(encoded(image, kind, transparency=1))
    assert (found[:, :4] == 255).all()
    assert (found[:, 4:] == (255, 0, 0)).all()


def test_case_d5_palette_without_transparency() -> None:
    image = quadrants().convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    assert (pixels(encoded(image)) == np.asarray(quadrants())).all()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_case_d5_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    options = {"lossless": True} if kind == "WEBP" else {}
    found = pixels(encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options))
    assert (found == (255, 0, 0)).all()


@pytest.mark.parametrize("mode", ["F", "I"])
def test_case_d5_samples_without_a_range_are_refused(mode: str) -> None:
    with pytest.raises(InvalidArgument, match=f"mode {mode} "):
        open_image(encoded(Image.new(mode, (8, 8)), "TIFF"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_case_d3_cut_off_data(kind: str, part: float) -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    data = encoded(noise(64, 64), kind)
    with pytest.raises(InvalidArgument, match=f"images\\[1\\]: the {kind} .*damaged or truncated"):
        open_image(data[: int(len(data) * part)], field="images[1]")


def test_damaged_pixels_are_refused() -> None:
    data = bytearray(encoded(noise(64, 64)))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(InvalidArgument, match="PNG data is damaged"):
        open_image(bytes(data))


def test_the_same_file_gives_the_same_pixels() -> None:
    data = encoded(noise(40, 24), "JPEG")
    assert (pixels(data) == pixels(io.BytesIO(data).getvalue())).all()
