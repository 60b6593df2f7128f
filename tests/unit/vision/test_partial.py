"""Parts of a checkpoint: equal to the whole model's, and nothing of the other part is read."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from common.errors import InvalidArgument
from common.models.vision import partial
from common.models.vision.partial import load_language, load_vision, weight_bytes
from tests import oracle
from tests.checkpoints import tiny_checkpoint
from tests.vlm_checkpoints import VLM_CHECKPOINTS

# Names in files that were published before transformers 5, from those of today's modules.
OLD_NAMES: dict[str, Callable[[str], str]] = {
    "llava": lambda name: _old_llava(name).replace("vision_tower.", "vision_tower.vision_model."),
    "llava_dinov2": lambda name: _old_dinov2(_old_llava(name)),
    "gemma3": lambda name: _old_llava(name).replace("vision_tower.", "vision_tower.vision_model."),
    "internvl": lambda name: _old_llava(name),
    "qwen2_vl": lambda name: name.replace("model.visual.", "visual.").replace("model.language_model.", "model."),
    "qwen2_5_vl": lambda name: name.replace("model.visual.", "visual.").replace("model.language_model.", "model."),
    "qwen3_vl": lambda name: name,
    "idefics3": lambda name: name,
}


def _old_llava(name: str) -> str:
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.replace("model.language_model.", "language_model.model.").removeprefix("model.")


def _old_dinov2(name: str) -> str:
    for new, old in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        name = name.replace(f"attention.{new}", f"attention.attention.{old}") if "vision_tower" in name else name
    return name.replace("attention.o_proj", "attention.output.dense") if "vision_tower" in name else name


def whole(directory: Path) -> tuple[Any, Any, str]:
    """The stock model, its text model, and the latter's name."""
    model = oracle.reference_vlm(directory)
    name = "text_model" if hasattr(model.model, "text_model") else "language_model"
    return model, getattr(model.model, name), name


def tensors(module: nn.Module, without: str = "") -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
        if not without or not name.startswith(without)
    }


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def assert_parts_are_the_whole(directory: Path, reference: Path) -> None:
    model, text, name = whole(reference)
    language, vision = load_language(directory, torch.float32), load_vision(directory, torch.float32)
    assert_same(tensors(language.model), tensors(text))
    assert torch.equal(language.lm_head.weight, model.lm_head.weight)
    assert_same(tensors(vision), tensors(model.model, without=f"{name}."))


@pytest.fixture
def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names, as in the file, of every tensor read."""
    names: list[str] = []
    real = partial.safe_open

    class Recording:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._file = real(*args, **options)

        def __enter__(self) -> "Recording":
            self._inside = self._file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

        def keys(self) -> list[str]:
            return list(self._inside.keys())

        def get_tensor(self, name: str) -> torch.Tensor:
            names.append(name)
            return self._inside.get_tensor(name)

    monkeypatch.setattr(partial, "safe_open", Recording)
    return names


def test_parts_are_the_whole(checkpoint: Path) -> None:
    assert_parts_are_the_whole(checkpoint, checkpoint)


def test_the_text_model_computes_the_same(checkpoint: Path) -> None:
    model, text, _ = whole(checkpoint)
    language = load_language(checkpoint, torch.float32)
    ids, embeds = torch.tensor([[5, 40, 300, 7]]), torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        theirs = model.lm_head(text(inputs_embeds=embeds, use_cache=False).last_hidden_state)
        ours = language.lm_head(language.model(inputs_embeds=embeds, use_cache=False).last_hidden_state)
        assert torch.equal(ours, theirs)
        assert torch.equal(language.embed_tokens(ids), text.get_input_embeddings()(ids))


def test_nothing_else_is_read_or_held(checkpoint: Path, read_names: list[str]) -> None:
    model, text, name = whole(checkpoint)
    language = load_language(checkpoint, torch.float32)
    first = set(read_names)
    read_names.clear()
    vision = load_vision(checkpoint, torch.float32)
    assert first.isdisjoint(read_names)
    assert first | set(read_names) == set(load_file(checkpoint / "model.safetensors"))
    for part in (language, vision):
        assert not any(tensor.is_meta for tensor in tensors(part).values())
        assert not any(parameter.requires_grad for parameter in part.parameters())
        assert not part.training
    assert language.weight_bytes + weight_bytes(vision) == weight_bytes(model)
    head = 0 if model.lm_head.weight is text.embed_tokens.weight else model.lm_head.weight.nbytes
    assert language.weight_bytes == weight_bytes(text) + head
    assert not any(name in each for each in tensors(vision))


def test_names_of_todays_modules(checkpoint: Path, tmp_path: Path) -> None:
    """transformers saves some models under older names; a file with the modules' own is as good."""
    stored = {name: tensor.clone() for name, tensor in whole(checkpoint)[0].state_dict().items()}
    assert_parts_are_the_whole(_copy(checkpoint, tmp_path, stored), checkpoint)


@pytest.mark.parametrize("name", VLM_CHECKPOINTS)
def test_names_of_older_files(name: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    reference = checkpoints(name)
    model, _, _ = whole(reference)
    stored = {OLD_NAMES[name](key): value.contiguous() for key, value in model.state_dict().items()}
    if name == "llava_dinov2":
        stored.pop("language_model.lm_head.weight")  # tied
        assert any("attention.attention.query" in key for key in stored)
    copy = _copy(reference, tmp_path, stored)
    assert_parts_are_the_whole(copy, reference)


def test_shards(checkpoint: Path, tmp_path: Path, read_names: list[str]) -> None:
    """Weights spread over files in no order, with an index; a stray file beside them is not read."""
    stored = load_file(checkpoint / "model.safetensors")
    shards = [dict(list(stored.items())[start::3]) for start in range(3)]
    copy = _copy(checkpoint, tmp_path, {"stray": torch.zeros(1)})
    (copy / "model.safetensors").rename(copy / "consolidated.safetensors")
    index = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(shard, copy / file)
        index |= dict.fromkeys(shard, file)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_parts_are_the_whole(copy, checkpoint)
    assert "stray" not in read_names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, checkpoint: Path) -> None:
    """Buffers keep the dtypes that they have when transformers loads the whole model."""
    theirs = type(oracle.reference_vlm(checkpoint)).from_pretrained(checkpoint, dtype=dtype)
    name = whole(checkpoint)[2]
    assert_same(tensors(load_language(checkpoint, dtype).model), tensors(getattr(theirs.model, name)))
    assert_same(tensors(load_vision(checkpoint, dtype)), tensors(theirs.model, without=f"{name}."))
    assert torch.get_default_dtype() == torch.float32


def test_tied_embeddings_are_one_tensor(checkpoints: Callable[[str], Path]) -> None:
    tied, untied = (load_language(checkpoints(name), torch.float32) for name in ("llava_dinov2", "llava"))
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight
    assert untied.weight_bytes - tied.weight_bytes == untied.lm_head.weight.nbytes


@pytest.mark.parametrize("missing", ["layers.1.mlp", "linear_2.bias", "lm_head"])
def test_what_is_missing_is_named(missing: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    stored = load_file(checkpoints("llava") / "model.safetensors")
    copy = _copy(checkpoints("llava"), tmp_path, {key: value for key, value in stored.items() if missing not in key})
    load = load_vision if missing.startswith("linear") else load_language
    with pytest.raises(InvalidArgument, match=missing):
        load(copy, torch.float32)


def test_text_models_have_no_parts(tmp_path: Path) -> None:
    directory = tiny_checkpoint("llama", tmp_path)
    for load in (load_language, load_vision):
        with pytest.raises(InvalidArgument, match="LlamaForCausalLM"):
            load(directory, torch.float32)


def _copy(source: Path, target: Path, stored: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with other weights."""
    copy = target / "copy"
    copy.mkdir()
    for path in _small_files(source):
        (copy / path.name).write_bytes(path.read_bytes())
    save_file(stored, copy / "model.safetensors")
    return copy


def _small_files(source: Path) -> Iterator[Path]:
    return (path for path in source.iterdir() if path.suffix != ".safetensors")
