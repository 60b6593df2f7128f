"""What names an embedding, case D14: everything that it depends on, in 256 bits."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from common.cache.keys import media_key
from common.models.vision import spec as spec_module
from common.models.vision.spec import VisionSpec

RAW = bytes(range(96))


def png(mode: str, size: tuple[int, int], raw: bytes) -> bytes:
    file = io.BytesIO()
    Image.frombytes(mode, size, raw).save(file, "PNG")
    return file.getvalue()


def options(directory: Path) -> bytes:
    spec = VisionSpec.read(directory)
    assert spec is not None
    return spec.options


def test_case_d14_content_shape_and_mode() -> None:
    """Pictures of the same bytes in another shape or mode, and those that differ in one bit of one pixel."""
    pictures = [
        png("RGB", (4, 8), RAW),
        png("RGB", (8, 4), RAW),
        png("RGB", (32, 1), RAW),
        png("RGBA", (4, 6), RAW),
        png("L", (8, 12), RAW),
        png("RGB", (4, 8), RAW[:-1] + bytes([RAW[-1] ^ 1])),
        png("RGB", (4, 8), bytes([RAW[0] ^ 1]) + RAW[1:]),
    ]
    keys = [media_key(picture, b"options", b"") for picture in pictures]
    assert len(set(keys)) == len(pictures)
    assert media_key(png("RGB", (4, 8), RAW), b"options", b"") == keys[0]
    assert {len(key) for key in keys} == {32}  # 256 bits, nothing cut
    assert len({key[:16] for key in keys}) == len({key[16:] for key in keys}) == len(keys)


def test_case_d14_tenant_and_field_borders() -> None:
    keys = {
        media_key(b"ab", b"c", b"d"),
        media_key(b"a", b"bc", b"d"),
        media_key(b"ab", b"cd", b""),
        media_key(b"ab", b"", b"cd"),
        media_key(b"", b"c", b"dab"),
    }
    assert len(keys) == 5


CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "mean": {"preprocessor_config.json": {"image_mean": [0.1, 0.2, 0.3]}},
    "scale": {"preprocessor_config.json": {"rescale_factor": 0.01}},
    "filter": {"preprocessor_config.json": {"resample": 0}},
    "normalised": {"preprocessor_config.json": {"do_normalize": False}},
    "another option": {"preprocessor_config.json": {"an_option_of_tomorrow": 1}},
    "processor": {"processor_config.json": {"an_option_of_tomorrow": 1}},
    "weights": {"config.json": {"an_option_of_tomorrow": 1}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_case_d14_processor_options(change: str, checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert options(copy) == options(checkpoint)
    for name, fields in CHANGES[change].items():
        (copy / name).write_text(json.dumps(json.loads((copy / name).read_bytes()) | fields))
    assert options(copy) != options(checkpoint)
    assert media_key(RAW, options(copy), b"") != media_key(RAW, options(checkpoint), b"")


def test_case_d14_conversion_version(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = options(checkpoint)
    monkeypatch.setattr(spec_module, "CONVERSION_VERSION", spec_module.CONVERSION_VERSION + 1)
    assert options(checkpoint) != before


def test_models_have_keys_of_their_own(checkpoints: Callable[[str], Path]) -> None:
    assert len({options(checkpoints(name)) for name in ("llava", "llava_dinov2", "qwen2_vl", "qwen2_5_vl")}) == 4


def test_equal_options_in_another_order(checkpoint: Path, tmp_path: Path) -> None:
    """The order and spacing of a file, and who wrote it, do not matter."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    path = copy / "preprocessor_config.json"
    fields = json.loads(path.read_bytes()) | {"processor_class": "Anybody"}
    path.write_text(json.dumps(dict(reversed(fields.items())), indent=7))
    assert options(copy) == options(checkpoint)
