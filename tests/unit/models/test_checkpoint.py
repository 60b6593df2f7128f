"""Refusals of directories that cannot be served, each with what to do, and the manifest."""

import json
from pathlib import Path

import pytest

from common.errors import InvalidArgument, ModelNotFound
from common.models.checkpoint import MANIFEST, check_checkpoint, verify_manifest, write_manifest
from common.models.fetch import find_model, get_model, list_models


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that passes; the weights' content is not looked at."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_complete_directory_passes(model: Path) -> None:
    check_checkpoint(model)
    assert find_model(str(model)) == model
    assert find_model("tiny", model.parent) == model
    assert get_model(str(model), model.parent) == model


def refusal(path: Path) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check_checkpoint(path)
    return caught.value.message


def test_missing_directory(tmp_path: Path) -> None:
    assert "no directory" in refusal(tmp_path / "absent")


def test_missing_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "no config.json" in refusal(model)


def test_gguf_alone(model: Path) -> None:
    (model / "config.json").unlink()
    (model / "m.gguf").touch()
    assert "epd models convert" in refusal(model)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_damaged_config(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    assert "JSON" in refusal(model)


def test_unknown_architecture_is_named_with_the_known_ones(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    message = refusal(model)
    assert "MambaForCausalLM" in message
    assert "Qwen3ForCausalLM" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth"])
def test_pickles_alone(model: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).touch()
    message = refusal(model)
    assert "pickles" in message
    assert "save_pretrained" in message


def test_no_weights_at_all(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "no *.safetensors" in refusal(model)


def test_missing_shard(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model-00002-of-00002.safetensors" in refusal(model)
    (model / "model-00002-of-00002.safetensors").touch()
    check_checkpoint(model)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": []}'])
def test_damaged_index(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    assert "damaged" in refusal(model)


def test_missing_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal(model)


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="SmolLM2-135M-Instruct"):
        find_model("gpt-none", tmp_path)


def test_a_model_of_the_catalog_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="epd models get SmolLM2-135M-Instruct"):
        find_model("SmolLM2-135M-Instruct", tmp_path)


def test_manifest_finds_every_change(model: Path) -> None:
    assert verify_manifest(model) == [f"{MANIFEST} is missing or damaged"]
    write_manifest(model, name="tiny", source="x==1", source_sha256="0", converter="c", license="MIT")
    assert verify_manifest(model) == []
    (model / "model.safetensors").write_bytes(b"weightS")
    (model / "tokenizer.json").unlink()
    assert verify_manifest(model) == ["model.safetensors has changed", "tokenizer.json is missing"]
    (model / MANIFEST).write_text("{")
    assert verify_manifest(model) == [f"{MANIFEST} is missing or damaged"]


def test_listing_shows_what_is_here_and_what_can_be_fetched(model: Path) -> None:
    found = {entry.name: entry for entry in list_models(model.parent)}
    assert found["tiny"].path == model
    assert found["tiny"].size > 0
    assert found["SmolLM2-135M-Instruct"].path is None
