"""Three-fold positions, against transformers' get_rope_index."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from common.engine.messages import Media
from common.models.tokenizer import Tokenizer
from common.models.vision.mrope import mrope_positions
from common.models.vision.spec import VisionSpec
from tests import oracle
from tests.unit.vision.conftest import noise


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    "sizes",
    [[(70, 90)], [(70, 90), (400, 30), (30, 400)], [(120, 120)] * 2, [(64, 64), (300, 200)]],
    ids=["one", "three", "twice the same", "two"],
)
@pytest.mark.parametrize("text", ["{}", "one two {}", "{} three", "a{}the quick brown fox"])
def test_positions(name: str, sizes: list[tuple[int, int]], text: str, checkpoints: Callable[[str], Path]) -> None:
    directory = checkpoints(name)
    spec, tokenizer, model = VisionSpec.read(directory), Tokenizer(directory), oracle.reference_vlm(directory).model
    assert spec is not None
    marker = f"<|vision_start|>{spec.marker}<|vision_end|>"
    images = {1: marker, 2: marker + marker, 3: f"{marker}{marker}x{marker}"}[len(sizes)]
    prompt = spec.expand_text(text.replace("{}", images), sizes)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    places = spec.place(ids, sizes)
    media = [Media(key=b"", start=p.start, length=p.length, rows=p.rows, grid=p.grid) for p in places]
    tokens = torch.tensor([ids])
    grids = oracle.image_inputs(directory, [noise(*size) for size in sizes])["image_grid_thw"]
    theirs, theirs_delta = model.get_rope_index(
        input_ids=tokens, mm_token_type_ids=(tokens == spec.image_token_id).long(), image_grid_thw=grids
    )
    positions, delta = mrope_positions(len(ids), media)
    assert positions.dtype == np.int64
    assert positions.tolist() == theirs[:, 0].tolist()
    assert delta == int(theirs_delta)


def test_text_alone_counts() -> None:
    positions, delta = mrope_positions(5, [])
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0
