"""Vision features of the training pictures, computed once: the tower is frozen, so they never change.

One file of CHUNK pictures, `features-<number>.npy`: float16 [CHUNK, 65, 1152], the class token first. Picture `i`
of chunk `n` has the seed `n * CHUNK + i`. A file appears complete or not at all, so an interrupted run goes on.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.progress import track
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from common.models.pictures import draw
from common.models.vision_tower import CONFIG, read_vision_tower

CHUNK = 250
LAYERS = (4, 8, 12)
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
BATCH = 25


def load_tower(onnx: Path) -> Dinov2Model:
    model = Dinov2Model(Dinov2Config(**{key: value for key, value in CONFIG.items() if key != "model_type"}))
    missing, unexpected = model.load_state_dict(read_vision_tower(onnx), strict=False)
    assert set(missing) <= {"embeddings.mask_token"}, missing
    assert not unexpected, unexpected
    model.eval().requires_grad_(False)
    return model


def pixels(images: Sequence[Image.Image]) -> Tensor:
    """[N, 3, 112, 112] float32, normalised as the model's image processor does."""
    array = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 255
    return (array - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)


@torch.inference_mode()
def features(tower: Dinov2Model, images: Sequence[Image.Image]) -> Tensor:
    """[N, 65, 1152] float32: three layers beside each other, as Llava does with a list of feature layers."""
    parts = []
    for first in range(0, len(images), BATCH):
        states = tower(pixels(images[first : first + BATCH]), output_hidden_states=True).hidden_states
        parts.append(torch.cat([states[layer] for layer in LAYERS], dim=-1))
    return torch.cat(parts)


def chunk_path(work: Path, number: int) -> Path:
    return work / f"features-{number:04}.npy"


def compute(work: Path, onnx: Path, pictures: int) -> None:
    """Write the chunks that are missing, up to `pictures`."""
    numbers = [n for n in range(-(-pictures // CHUNK)) if not chunk_path(work, n).exists()]
    if not numbers:
        return
    tower = load_tower(onnx)
    for number in track(numbers, description=f"vision features, {CHUNK} pictures each"):
        images = [draw(number * CHUNK + i).image for i in range(CHUNK)]
        path, scratch = chunk_path(work, number), work / f".features-{number}-{os.getpid()}.npy"
        np.save(scratch, features(tower, images).half().numpy())
        scratch.rename(path)
