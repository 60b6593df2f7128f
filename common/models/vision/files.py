"""The files of a checkpoint that say how its pictures are processed, in the layouts of transformers 4 and 5."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.errors import InvalidArgument, ModelNotFound
from common.models.text_config import VISION_ARCHITECTURES

# Fields that say who wrote a file or only matter to another caller: two files that differ in them process alike.
_IDLE = (
    *("auto_map", "processor_class", "return_tensors", "data_format", "input_data_format", "device"),
    "return_row_col_info",
)

# Image processors by architecture, the one that transformers takes for want of a name first.
_IMAGE_PROCESSORS = {
    "LlavaForConditionalGeneration": ("Llava", "CLIP", "Siglip", "Bit"),
    "Qwen2VLForConditionalGeneration": ("Qwen2VL",),
    "Qwen2_5_VLForConditionalGeneration": ("Qwen2VL",),
    "Qwen3VLForConditionalGeneration": ("Qwen2VL",),
    "Idefics3ForConditionalGeneration": ("Idefics3",),
    "InternVLForConditionalGeneration": ("GotOcr2",),
    "Gemma3ForConditionalGeneration": ("Gemma3",),
}


class VisionFiles(msgspec.Struct, frozen=True, kw_only=True):
    """config: config.json. image: fields of the image processor. processor: fields of the processor around it.
    tokenizer: tokenizer_config.json. image_processor: its kind, such as CLIP."""

    architecture: str
    image_processor: str
    config: dict[str, Any]
    image: dict[str, Any]
    processor: dict[str, Any]
    tokenizer: dict[str, Any]

    @property
    def vision(self) -> Mapping[str, Any]:
        """vision_config of config.json."""
        return self.config.get("vision_config") or {}

    def token(self, name: str, default: str) -> str:
        """Text of a special token that the tokenizer knows by an extra name, such as image_token."""
        extra = self.tokenizer.get("extra_special_tokens")
        found = self.tokenizer.get(name) or (extra.get(name) if isinstance(extra, dict) else None)
        if isinstance(found, dict):
            found = found.get("content")
        return found if isinstance(found, str) and found else default

    def flag(self, name: str, default: bool = True) -> bool:
        """An option of the image processor; null means its default."""
        value = self.image.get(name)
        return default if value is None else bool(value)

    def whole(self, name: str, default: int) -> int:
        """A positive integer among the image processor's options; null means its default."""
        return positive(self.image.get(name), name, default)


def read_files(model_dir: str | Path) -> VisionFiles | None:
    """None for a text model. Raises ModelNotFound without config.json, InvalidArgument for files that are not JSON or
    when there is no preprocessor_config.json nor a processor_config.json that holds an image processor."""
    root = Path(model_dir)
    config = _read(root / "config.json")
    if config is None:
        raise ModelNotFound("the model directory has no config.json", field="model_dir")
    architecture = str(next(iter(config.get("architectures") or ["none named"])))
    if architecture not in VISION_ARCHITECTURES:
        return None
    processor = _read(root / "processor_config.json") or {}
    # transformers 5 nests the image processor here, and then reads no other file.
    image = processor.get("image_processor") or _read(root / "preprocessor_config.json")
    if not isinstance(image, dict):
        raise InvalidArgument(
            "the model directory has no preprocessor_config.json; write one with "
            "AutoImageProcessor.from_pretrained(directory).save_pretrained(directory)",
            field="model_dir",
        )
    return VisionFiles(
        architecture=architecture,
        image_processor=_kind(image, architecture),
        config=config,
        image={name: value for name, value in image.items() if name not in _IDLE},
        processor={
            name: value for name, value in processor.items() if name not in _IDLE and not isinstance(value, dict)
        },
        tokenizer=_read(root / "tokenizer_config.json") or {},
    )


def positive(value: object, name: str, default: int) -> int:
    """A positive integer, or the default for None. Raises InvalidArgument for anything else."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise InvalidArgument(f"image processor: {name} must be a positive integer, got {value!r}", field="model_dir")
    return value


def sides(value: object, name: str) -> tuple[int, int]:
    """(height, width) of a size that fixes both: {"height", "width"}, a pair, or the side of a square."""
    if isinstance(value, Mapping) and {"height", "width"} <= set(value):
        return positive(value["height"], name, 0), positive(value["width"], name, 0)
    if isinstance(value, list | tuple) and len(value) == 2:
        return positive(value[0], name, 0), positive(value[1], name, 0)
    if isinstance(value, int):
        return positive(value, name, 0), positive(value, name, 0)
    raise InvalidArgument(f"image processor: {name} must name height and width", field="model_dir")


def _kind(image: Mapping[str, Any], architecture: str) -> str:
    """CLIP for CLIPImageProcessor, CLIPImageProcessorFast and the older CLIPFeatureExtractor."""
    known = _IMAGE_PROCESSORS[architecture]
    name = str(image.get("image_processor_type") or image.get("feature_extractor_type") or known[0])
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name)
    if kind not in known:
        raise InvalidArgument(
            f"image processor {name} is not supported for {architecture}; supported are "
            + ", ".join(f"{each}ImageProcessor" for each in known),
            field="model_dir",
        )
    return kind


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{path.name} is not JSON", field="model_dir") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{path.name} is not a JSON object", field="model_dir")
    return found
