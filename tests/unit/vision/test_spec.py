"""Where images go in a prompt, against transformers' own Processors."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Gemma3Processor, Idefics3Processor, LlavaProcessor

from common.errors import InvalidArgument, ModelNotFound
from common.models.tokenizer import Tokenizer
from common.models.vision.spec import VisionSpec
from tests import oracle
from tests.checkpoints import tiny_checkpoint
from tests.unit.vision.conftest import noise
from tests.vlm_checkpoints import VLM_CHECKPOINTS

SIZES = [(70, 90), (56, 56), (200, 31), (31, 200), (1, 1), (3, 500), (500, 3), (57, 112), (1000, 999)]


def read(directory: Path) -> VisionSpec:
    spec = VisionSpec.read(directory)
    assert spec is not None
    return spec


def render(directory: Path, images: int) -> str:
    parts: list[dict[str, str]] = []
    for number in range(images):
        parts.append({"type": "image"})
        if number != 1:  # the second and the third are adjacent
            parts.append({"type": "text", "text": f"the fox {number}"})
    return Tokenizer(directory).render_chat([{"role": "user", "content": parts}])


def test_texts_are_the_stock_processors(checkpoint: Path) -> None:
    spec = read(checkpoint)
    images = [noise(*size) for size in SIZES]
    for size, text in zip(SIZES, oracle.image_texts(checkpoint, images), strict=True):
        assert spec.expand_text(f"a{spec.marker}b", [size]) == f"a{text}b", size
        assert text.count(spec.image_token) == spec.rows(size)


@pytest.mark.parametrize(
    ("name", "kind"), [("llava", LlavaProcessor), ("idefics3", Idefics3Processor), ("gemma3", Gemma3Processor)]
)
def test_prompts_are_the_stock_processors(name: str, kind: type, checkpoints: Callable[[str], Path]) -> None:
    """Those whose Processor can be made without torchvision, from text to token ids."""
    directory = checkpoints(name)
    _, pictures, _ = oracle._processing(directory)
    fields = json.loads((directory / "processor_config.json").read_bytes())
    fields.pop("processor_class")
    processor = kind(pictures, AutoTokenizer.from_pretrained(directory), **fields)
    spec, tokenizer, text = read(directory), Tokenizer(directory), render(directory, 3)
    stock = processor(images=[noise(*size) for size in SIZES[:3]], text=text, add_special_tokens=False)
    ours = tokenizer.encode(spec.expand_text(text, SIZES[:3]), add_special_tokens=False)
    assert ours == stock["input_ids"][0]


def test_token_ids_with_one_marker_token_an_image(checkpoint: Path) -> None:
    spec, tokenizer = read(checkpoint), Tokenizer(checkpoint)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ids = [*encode("one "), *encode(spec.marker), *encode("two"), *encode(spec.marker)]
    expanded = spec.expand_ids(ids, SIZES[:2], encode)
    texts = oracle.image_texts(checkpoint, [noise(*size) for size in SIZES[:2]])
    assert expanded == [*encode("one "), *encode(texts[0]), *encode("two"), *encode(texts[1])]
    assert spec.expand_ids(encode("no image"), [], encode) == encode("no image")
    with pytest.raises(InvalidArgument, match=r"2 image markers.*1 images") as caught:
        spec.expand_ids(ids, SIZES[:1], encode)
    assert caught.value.field == "prompt"


def test_places(checkpoint: Path) -> None:
    spec, tokenizer = read(checkpoint), Tokenizer(checkpoint)
    ids = tokenizer.encode(spec.expand_text(render(checkpoint, 3), SIZES[:3]), add_special_tokens=False)
    places = spec.place(ids, SIZES[:3])
    end = 0
    for size, place in zip(SIZES[:3], places, strict=True):
        inside = ids[place.start : place.start + place.length]
        assert place.start >= end
        assert inside[0] == inside[-1] == spec.image_token_id
        assert inside.count(spec.image_token_id) == place.rows == spec.rows(size)
        end = place.start + place.length
    assert spec.image_token_id not in ids[: places[0].start]
    assert spec.image_token_id not in ids[end:]
    if "qwen" in checkpoint.name:
        assert all(place.grid[0] * place.grid[1] * place.grid[2] == place.rows for place in places)
    else:
        assert all(place.grid == () for place in places)
    assert spec.splittable == (checkpoint.name != "gemma3")


@pytest.mark.parametrize(("markers", "images"), [(2, 1), (1, 2), (0, 1), (1, 0)])
def test_case_d8_markers_and_images_differ(markers: int, images: int, checkpoint: Path) -> None:
    spec = read(checkpoint)
    with pytest.raises(InvalidArgument, match=f"{markers} image markers.*{images} images") as caught:
        spec.expand_text("x".join([""] + [spec.marker] * markers), SIZES[:images])
    assert caught.value.field == "messages"


def test_case_d8_image_tokens_in_the_text_are_not_images(checkpoint: Path) -> None:
    spec, tokenizer = read(checkpoint), Tokenizer(checkpoint)
    text = spec.expand_text(spec.marker, SIZES[:1]) + spec.image_token
    with pytest.raises(InvalidArgument, match=f"{spec.rows(SIZES[0]) + 1} image tokens"):
        spec.place(tokenizer.encode(text, add_special_tokens=False), SIZES[:1])


def test_no_image_changes_nothing(checkpoint: Path) -> None:
    spec = read(checkpoint)
    assert spec.expand_text("only text", []) == "only text"
    assert spec.place([1, 2, 3], []) == []


def test_too_narrow_is_refused(checkpoints: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidArgument, match="at most 200"):
        read(checkpoints("qwen2_vl")).rows((2010, 10))
    assert read(checkpoints("qwen2_vl")).rows((2000, 10))


def test_text_models_have_none(tmp_path: Path) -> None:
    assert VisionSpec.read(tiny_checkpoint("llama", tmp_path)) is None
    with pytest.raises(ModelNotFound):
        VisionSpec.read(tmp_path / "nothing")


@pytest.mark.parametrize("name", VLM_CHECKPOINTS)
def test_file_layout_of_transformers_5(name: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    """The image processor inside processor_config.json, which then counts alone."""
    old, new = checkpoints(name), tmp_path / "new"
    shutil.copytree(old, new)
    processor = json.loads((new / "processor_config.json").read_bytes())
    pictures = json.loads((new / "preprocessor_config.json").read_bytes())
    (new / "processor_config.json").write_text(json.dumps(processor | {"image_processor": pictures}))
    (new / "preprocessor_config.json").unlink()
    before, after = read(old), read(new)
    assert [before.rows(size) for size in SIZES] == [after.rows(size) for size in SIZES]
    assert before.options == after.options


def test_older_names_of_image_processors(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "old"
    shutil.copytree(checkpoints("llava"), directory)
    path = directory / "preprocessor_config.json"
    path.write_text(json.dumps({"feature_extractor_type": "CLIPFeatureExtractor", "size": 56, "crop_size": 56}))
    (directory / "processor_config.json").unlink()
    assert read(directory).rows((90, 70)) == 16
    path.write_text(json.dumps({"image_processor_type": "DonutImageProcessor"}))
    with pytest.raises(InvalidArgument, match="DonutImageProcessor"):
        read(directory)
    path.unlink()
    with pytest.raises(InvalidArgument, match="preprocessor_config"):
        read(directory)


def test_no_torch_behind_it() -> None:
    code = (
        "import sys, common.models.vision.spec, common.models.vision.mrope;"
        "sys.exit(bool({'torch', 'transformers', 'PIL'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
