"""Counts of the published configurations over many sizes, against transformers' image processors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    CLIPImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    LlavaImageProcessorPil,
    Qwen2VLImageProcessorPil,
    image_processing_backends,
)

from common.errors import InvalidArgument
from common.models.vision.families import Idefics3, InternVL, Llava, Qwen
from common.models.vision.files import VisionFiles

SIDES = st.integers(1, 12000)
MANY = settings(max_examples=400, deadline=None)


def files(architecture: str, image: dict, kind: str, **processor: object) -> VisionFiles:
    return VisionFiles(
        architecture=architecture, image_processor=kind, config={}, image=image, processor=processor, tokenizer={}
    )


@pytest.mark.parametrize(
    "image",
    [
        {},
        {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2},
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "merge_size": 2},
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "min_pixels": 200704, "max_pixels": None},
    ],
)
def test_qwen(image: dict) -> None:
    family = Qwen(files("Qwen2VLForConditionalGeneration", image, "Qwen2VL"))
    stock = Qwen2VLImageProcessorPil(**image)

    @MANY
    @given(SIDES, SIDES)
    def check(width: int, height: int) -> None:
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(InvalidArgument):
                family.rows(width, height)
        else:
            assert family.rows(width, height) * 4 == stock.get_number_of_image_patches(height, width)

    check()


@pytest.mark.parametrize("least_most", [(1, 12), (1, 6), (2, 12), (1, 1), (4, 4)])
def test_internvl(least_most: tuple[int, int]) -> None:
    least, most = least_most
    image = {"size": {"height": 448, "width": 448}, "min_patches": least, "max_patches": most}
    family = InternVL(files("InternVLForConditionalGeneration", image, "GotOcr2", image_seq_length=256))
    stock = GotOcr2ImageProcessorPil(**image, crop_to_patches=True)

    @MANY
    @given(SIDES, SIDES)
    def check(width: int, height: int) -> None:
        assert family.rows(width, height) == 256 * stock.get_number_of_image_patches(height, width)

    check()


@pytest.mark.parametrize(
    "image",
    [
        {},
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        {"size": {"longest_edge": 8192}, "max_image_size": {"longest_edge": 512}},
        {"size": {"height": 700, "width": 300}, "max_image_size": {"longest_edge": 364}},
        {"do_image_splitting": False},
    ],
)
def test_idefics3(image: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor itself runs, but over pictures that have a shape and no memory."""
    monkeypatch.setattr(image_processing_backends, "np_resize", lambda _, size, **__: blank(*size))
    family = Idefics3(files("Idefics3ForConditionalGeneration", image, "Idefics3", image_seq_len=64))
    stock = Idefics3ImageProcessorPil(**image, do_rescale=False, do_normalize=False, do_pad=False)

    @MANY
    @given(SIDES, SIDES)
    def check(width: int, height: int) -> None:
        made = stock([blank(height, width)], return_row_col_info=True, input_data_format="channels_first")
        rows, columns = made["rows"][0][0], made["cols"][0][0]
        assert family.tiles(width, height) == (rows, columns)
        assert family.rows(width, height) == 64 * len(made["pixel_values"][0])

    check()


@pytest.mark.parametrize(
    "image",
    [
        {},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {"size": {"height": 112, "width": 140}, "do_center_crop": False},
        {"size": {"shortest_edge": 112}, "do_center_crop": False},
        {"size": {"shortest_edge": 112}, "do_center_crop": False, "do_pad": True},
    ],
)
@pytest.mark.parametrize(("kind", "stock_kind"), [("CLIP", CLIPImageProcessorPil), ("Llava", LlavaImageProcessorPil)])
def test_llava(image: dict, kind: str, stock_kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "CLIP" and "do_pad" in image:
        image = {name: value for name, value in image.items() if name != "do_pad"}
    monkeypatch.setattr(image_processing_backends, "np_resize", lambda _, size, **__: blank(*size))
    family = Llava(files("LlavaForConditionalGeneration", image, kind, vision_feature_select_strategy="default"))
    stock = stock_kind(**image, do_rescale=False, do_normalize=False)

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 3000), st.integers(1, 3000))
    def check(width: int, height: int) -> None:
        made = stock([blank(height, width)], input_data_format="channels_first")["pixel_values"][0]
        assert family._processed(width, height) == made.shape[-2:]
        assert family.rows(width, height) == (made.shape[-2] // 14) * (made.shape[-1] // 14)

    check()


def blank(height: int, width: int) -> np.ndarray:
    """[3, height, width] over a single byte."""
    return np.broadcast_to(np.uint8(0), (3, height, width))
