"""The vision tower: what the whole model makes of a picture, alone or among others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from PIL import Image

from common.errors import InvalidArgument, ModelNotFound
from common.models.vision.tower import VisionTower
from tests import oracle
from tests.checkpoints import tiny_checkpoint
from tests.unit.vision.conftest import noise

SIZES = [(90, 70), (56, 120), (31, 200), (200, 31), (112, 112), (90, 70), (3, 3)]


@pytest.fixture(scope="session")
def towers(checkpoints: Callable[[str], Path]) -> Callable[[Path], VisionTower]:
    made: dict[Path, VisionTower] = {}

    def get(directory: Path) -> VisionTower:
        if directory not in made:
            made[directory] = VisionTower(directory, torch.float32)
        return made[directory]

    return get


def stock_levels(directory: Path, image: Image.Image) -> torch.Tensor:
    """[levels, rows, hidden] from the whole model."""
    model, inputs = oracle.reference_vlm(directory), oracle.image_inputs(directory, [image])
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    with torch.inference_mode():
        out = model.get_image_features(**{name: inputs[name] for name in names if name in inputs}, return_dict=True)

    def flat(level: Any) -> torch.Tensor:
        level = torch.cat(list(level)) if isinstance(level, list | tuple) else level
        return level.reshape(-1, level.shape[-1])

    return torch.stack(
        [flat(level) for level in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))]
    )


def test_as_the_whole_model(checkpoint: Path, towers: Callable[[Path], VisionTower]) -> None:
    tower = towers(checkpoint)
    for number, size in enumerate(SIZES):
        image = noise(*size, seed=number)
        (made,) = tower.forward(tower.process([image]))
        assert made.shape == (3 if checkpoint.name == "qwen3_vl" else 1, tower.spec.rows(size), 64)
        assert torch.equal(made, stock_levels(checkpoint, image)), size


def test_together_as_alone(checkpoint: Path, towers: Callable[[Path], VisionTower]) -> None:
    """Pictures of several sizes in one forward, in their order."""
    tower = towers(checkpoint)
    images = [noise(*size, seed=number) for number, size in enumerate(SIZES)]
    processed = tower.process(images)
    together = tower.forward(processed)
    for number, each in enumerate(processed):
        (alone,) = tower.forward([each])
        assert together[number].shape == alone.shape
        torch.testing.assert_close(together[number], alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
    assert not torch.allclose(together[0], together[5], atol=0.01)  # one size, other pixels
    backwards = tower.forward(processed[::-1])
    torch.testing.assert_close(backwards[-1], together[0], rtol=0, atol=1e-5 * float(together[0].abs().max()))
    assert tower.forward([]) == []


def test_processing_alone_or_in_a_list(checkpoint: Path, towers: Callable[[Path], VisionTower]) -> None:
    tower = towers(checkpoint)
    images = [noise(*size, seed=number) for number, size in enumerate(SIZES[:4])]
    for image, listed in zip(images, tower.process(images), strict=True):
        (alone,) = tower.process([image])
        assert alone.rows == listed.rows == tower.spec.rows(image.size)
        assert alone.tensors.keys() == listed.tensors.keys()
        assert all(torch.equal(alone.tensors[name], listed.tensors[name]) for name in alone.tensors)


def test_another_number_of_rows_is_refused(checkpoint: Path, towers: Callable[[Path], VisionTower]) -> None:
    tower = towers(checkpoint)
    good, bad = tower.process([noise(90, 70), noise(60, 60)])
    bad = msgspec.structs.replace(bad, rows=bad.rows + 1)
    with pytest.raises(InvalidArgument, match="embedding rows"):
        tower.forward([good, bad])


def test_a_count_that_the_processor_does_not_make_is_refused(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = VisionTower(checkpoints("qwen2_vl"), torch.float32)
    monkeypatch.setattr(tower.spec, "rows", lambda _: 5)
    with pytest.raises(InvalidArgument, match="5 embedding rows"):
        tower.process([noise(90, 70)])


def test_flat_pictures(checkpoint: Path, towers: Callable[[Path], VisionTower]) -> None:
    """One colour all over: black, white and middle grey keep their rows."""
    tower = towers(checkpoint)
    for shade in (0, 127, 128, 255):
        image = Image.new("RGB", (90, 70), (shade,) * 3)
        (made,) = tower.forward(tower.process([image]))
        assert made.shape[1] == tower.spec.rows(image.size)
        assert bool(made.isfinite().all())


def test_bfloat16(checkpoint: Path) -> None:
    tower = VisionTower(checkpoint, torch.bfloat16)
    (made,) = tower.forward(tower.process([noise(90, 70)]))
    assert made.dtype == torch.bfloat16
    assert bool(made.isfinite().all())


def test_text_models_have_no_tower(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        VisionTower(tiny_checkpoint("llama", tmp_path), torch.float32)
