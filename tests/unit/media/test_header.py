"""What a header tells, and what is refused before anything is decoded; case D6."""

import io
import tracemalloc
from typing import Any

import pytest
from PIL import Image, ImageFile

from common.errors import InvalidArgument
from common.media.header import probe, sniff
from common.media.limits import MediaLimits
from tests.unit.media.files import chunk, encoded, noise, png_of_size, quadrants, with_orientation

KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Any) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_known_by_its_bytes(kind: str) -> None:
    info = probe(encoded(quadrants(40, 20), kind))
    assert (info.format, info.width, info.height) == (kind, 40, 20)


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("value", range(1, 9))
def test_case_d4_size_is_that_of_the_turned_image(kind: str, value: int) -> None:
    info = probe(with_orientation(value, kind))
    assert (info.width, info.height) == ((16, 32) if value >= 5 else (32, 16))


@pytest.mark.usefixtures("no_decoding")
def test_case_d4_exif_behind_the_pixels_of_a_png() -> None:
    plain, turned = encoded(quadrants()), with_orientation(6, "PNG")
    start = turned.index(b"eXIf")
    content = turned[start + 4 : start + 4 + int.from_bytes(turned[start - 4 : start], "big")]
    late = plain[:-12] + chunk(b"eXIf", content) + plain[-12:]
    assert (probe(late).width, probe(late).height) == (16, 32)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, b"Exif\0\0II*\0\x08\0\0\0\xff\xff"])
def test_damaged_exif_data_turns_nothing(damage: bytes) -> None:
    data = encoded(quadrants())
    info = probe(data[:33] + chunk(b"eXIf", damage) + data[33:])
    assert (info.width, info.height) == (32, 16)


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize(
    ("width", "height"), [(8192, 8193), (30000, 30000), (2**31 - 1, 2**31 - 1), (8193, 8192), (13000, 13000)]
)
def test_case_d6_more_pixels_than_allowed(width: int, height: int) -> None:
    data = png_of_size(width, height)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match=str(8192 * 8192)) as caught:
            probe(data, field="images[3]")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert caught.value.field == "images[3]"


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP", "TIFF"])
def test_case_d6_pixel_limit_of_every_kind(kind: str) -> None:
    with pytest.raises(InvalidArgument, match="800"):
        probe(encoded(quadrants(32, 26), kind), MediaLimits(max_pixels=800))


def test_case_d6_more_bytes_than_allowed() -> None:
    data = encoded(noise(16, 16))
    assert probe(data, MediaLimits(max_file_bytes=len(data))).width == 16
    with pytest.raises(InvalidArgument, match=f"{len(data)} bytes; at most {len(data) - 1}"):
        probe(data, MediaLimits(max_file_bytes=len(data) - 1))


@pytest.mark.parametrize(("size", "words"), [((3, 100), "at least 4"), ((2004, 10), "200 times"), ((4, 801), "200")])
def test_sides(size: tuple[int, int], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        probe(encoded(quadrants(*size)))


def test_sides_that_are_just_allowed() -> None:
    assert probe(encoded(quadrants(2000, 10))).width == 2000
    assert probe(encoded(quadrants(4, 4))).height == 4


@pytest.mark.parametrize("size", [(0, 10), (10, 0)])
def test_no_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="image"):
        probe(png_of_size(*size))


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"\0" * 64,
        b"P6 4 4 255 " + b"x" * 48,
        b"RIFF\0\0\0\0",
    ],
)
def test_case_d3_no_image(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="PNG, JPEG, WEBP, GIF, BMP, TIFF"):
        probe(data)


def test_empty() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        probe(b"")


@pytest.mark.parametrize("kind", KINDS)
def test_case_d3_cut_off_in_the_header(kind: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{kind} header is damaged or truncated"):
        probe(encoded(kind=kind)[:12])


def test_formats_of_pillow_beyond_ours_stay_out() -> None:
    out = io.BytesIO()
    quadrants().save(out, "ICO", sizes=[(16, 16)])
    with pytest.raises(InvalidArgument):
        sniff(out.getvalue())


def test_a_photo_with_a_preview_is_a_jpeg() -> None:
    out = io.BytesIO()
    quadrants().save(out, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    info = probe(out.getvalue())
    assert (info.format, info.width, info.height) == ("JPEG", 32, 16)
