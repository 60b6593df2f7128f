"""The vision side of a model at work: pictures to embeddings, many at once."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from PIL import Image
from torch import Tensor

from common.errors import InvalidArgument, ModelNotFound
from common.models.vision.files import VisionFiles, read_files
from common.models.vision.partial import load_vision, weight_bytes
from common.models.vision.spec import VisionSpec

# What a model's Processor tells its image processor whatever the file says; _IDLE and these never meet a client.
_OPTIONS: dict[str, dict[str, Any]] = {
    "Idefics3": {"return_row_col_info": True},
    "GotOcr2": {"crop_to_patches": True},
    "Gemma3": {"do_convert_rgb": True, "do_pan_and_scan": False},
}


class Processed(msgspec.Struct, frozen=True):
    """One picture as the tower takes it. tensors: arguments of get_image_features, on the CPU. rows: of its
    embedding."""

    tensors: dict[str, Tensor]
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Pictures that can be stacked have the same."""
        return tuple(self.tensors["pixel_values"].shape[-3:])


class VisionTower:
    """Vision tower and projector of a checkpoint, no language weight. device: as torch names it.

    `process` may run in many threads; `forward` in one at a time.
    """

    def __init__(self, model_dir: str | Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        files, spec = read_files(model_dir), VisionSpec.read(model_dir)
        if files is None or spec is None:
            raise ModelNotFound("this model takes no images", field="model_dir")
        self.spec = spec
        self.device, self.dtype = torch.device(device), dtype
        self._model: Any = load_vision(model_dir, dtype).to(self.device)
        self._pixels: Callable[..., Any] = _image_processor(files, model_dir)
        self._options = _OPTIONS.get(files.image_processor, {})
        self._mixes = files.image_processor == "Qwen2VL"  # pictures of any size in one forward
        self._nested = files.image_processor == "Idefics3"
        self._running = threading.Lock()

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self._model)

    def process(self, images: Sequence[Image.Image]) -> list[Processed]:
        """Each picture (RGB, upright) by itself, so that pictures of several requests can form a batch.

        Raises InvalidArgument for one that the model cannot take.
        """
        return [self._process(image) for image in images]

    def _process(self, image: Image.Image) -> Processed:
        rows = self.spec.rows(image.size)
        found = self._pixels([image], return_tensors="pt", **self._options)
        names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
        processed = Processed({name: found[name] for name in names if name in found}, rows)
        grid = processed.tensors.get("image_grid_thw")
        if grid is not None and int(grid.prod()) != rows * self._model.visual.spatial_merge_size**2:
            raise _mismatch(image.size, rows)
        return processed

    @torch.inference_mode()
    def forward(self, batch: Sequence[Processed]) -> list[Tensor]:
        """[levels, rows, hidden] of each picture, on the device. Level 0 takes the place of the image tokens'
        embeddings, the others are Qwen3-VL's deepstack features.

        Raises InvalidArgument when the model makes another number of rows than the prompt will have.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, each in enumerate(batch):
            groups.setdefault(() if self._mixes else each.shape, []).append(number)
        found: dict[int, Tensor] = {}
        with self._running:
            for numbers in groups.values():
                made = self._together([batch[number] for number in numbers])
                found.update(zip(numbers, made, strict=True))
        return [found[number] for number in range(len(batch))]

    def _together(self, batch: list[Processed]) -> list[Tensor]:
        stacked = {
            name: torch.cat([each.tensors[name] for each in batch], dim=1 if self._nested else 0).to(self.device)
            for name in batch[0].tensors
        }
        stacked["pixel_values"] = stacked["pixel_values"].to(self.dtype)
        out = self._model.get_image_features(**stacked, return_dict=True)
        levels = torch.stack([_flat(level) for level in (out.pooler_output, *_deepstack(out))])
        rows = [each.rows for each in batch]
        if levels.shape[1] != sum(rows):
            raise InvalidArgument(
                f"the model makes {levels.shape[1]} embedding rows of {len(batch)} images whose prompt has {sum(rows)}",
                field="messages",
            )
        return list(levels.split(rows, dim=1))


def _image_processor(files: VisionFiles, model_dir: str | Path) -> Callable[..., Any]:
    """The checkpoint's own image processor in its Pillow form; torchvision is never needed."""
    kind = getattr(transformers, f"{files.image_processor}ImageProcessorPil")
    made: Callable[..., Any] = kind.from_pretrained(str(model_dir), local_files_only=True)
    return made


def _flat(level: Any) -> Tensor:
    """[rows, hidden] of all pictures, whether the model gives one tensor or one a picture."""
    found: Tensor = torch.cat(list(level)) if isinstance(level, list | tuple) else level
    return found.reshape(-1, found.shape[-1])


def _deepstack(out: Any) -> Sequence[Any]:
    return getattr(out, "deepstack_features", None) or ()


def _mismatch(size: tuple[int, int], rows: int) -> InvalidArgument:
    return InvalidArgument(
        f"an image of {size[0]} × {size[1]} pixels has not the {rows} embedding rows that its prompt has",
        field="messages",
    )
