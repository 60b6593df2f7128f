"""config.json of vision-language models: what transformers reads, without torch."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from common.engine.settings import EngineSettings, TimedModel
from common.errors import InvalidArgument
from common.models.checkpoint import check_checkpoint
from common.models.config import embedding_layout, kv_layout, read_config
from common.models.text_config import TEXT_DEFAULTS, VISION_ARCHITECTURES


def write(root: Path, config: dict[str, Any]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(config))
    return root


def assert_as_transformers(directory: Path) -> None:
    ours, theirs = read_config(directory, revision="r"), AutoConfig.from_pretrained(directory)
    text = theirs.text_config
    assert (ours.num_layers, ours.hidden_size, ours.vocab_size, ours.max_context) == (
        text.num_hidden_layers,
        text.hidden_size,
        text.vocab_size,
        text.max_position_embeddings,
    )
    assert ours.num_kv_heads == (text.num_key_value_heads or text.num_attention_heads)
    assert ours.head_dim == (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    assert ours.sliding_window == getattr(text, "sliding_window", None)
    assert ours.image_token_id == theirs.image_token_id
    if not (directory / "generation_config.json").is_file():
        eos = GenerationConfig.from_model_config(theirs).eos_token_id
        assert ours.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))


def test_as_transformers_reads_it(checkpoint: Path) -> None:
    assert_as_transformers(checkpoint)
    ours = read_config(checkpoint)
    theirs = AutoConfig.from_pretrained(checkpoint)
    assert ours.vision
    assert ours.embedding_levels == 1 + len(getattr(theirs.vision_config, "deepstack_visual_indexes", ()))
    assert ours.mrope_section == tuple((theirs.text_config.rope_parameters or {}).get("mrope_section", ()))
    assert ours.bidirectional_images == (theirs.model_type == "gemma3")


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_defaults_are_transformers_own(kind: str) -> None:
    theirs = CONFIG_MAPPING[kind].__dataclass_fields__
    for name, value in TEXT_DEFAULTS[kind].items():
        assert theirs[name].default == value, name


@pytest.mark.parametrize("architecture", VISION_ARCHITECTURES)
def test_nothing_said_is_transformers_default(architecture: str, tmp_path: Path) -> None:
    model_type = {
        "LlavaForConditionalGeneration": "llava",
        "Qwen2VLForConditionalGeneration": "qwen2_vl",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
        "Qwen3VLForConditionalGeneration": "qwen3_vl",
        "Idefics3ForConditionalGeneration": "idefics3",
        "InternVLForConditionalGeneration": "internvl",
        "Gemma3ForConditionalGeneration": "gemma3",
    }[architecture]
    assert_as_transformers(write(tmp_path, {"architectures": [architecture], "model_type": model_type}))


@pytest.mark.parametrize(
    "config",
    [
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": 32000,
            "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        },
        {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": {"model_type": "mistral", "vocab_size": 32064, "eos_token_id": [2, 7]},
        },
        {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "eos_token_id": 151645,
            "hidden_size": 1536,
            "max_position_embeddings": 32768,
            "num_attention_heads": 12,
            "num_hidden_layers": 28,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151936,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vision_config": {"depth": 32, "hidden_size": 1536},
        },
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
        {
            "architectures": ["InternVLForConditionalGeneration"],
            "model_type": "internvl",
            "text_config": {"model_type": "qwen2", "hidden_size": 896, "num_attention_heads": 14, "eos_token_id": 9},
        },
    ],
    ids=["llava", "llava mistral", "flat qwen2-vl", "gemma3", "internvl"],
)
def test_published_layouts(config: dict[str, Any], tmp_path: Path) -> None:
    assert_as_transformers(write(tmp_path, config))


def test_text_models_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    directory = write(
        tmp_path, {"architectures": ["LlavaForConditionalGeneration"], "text_config": {"model_type": "mamba"}}
    )
    with pytest.raises(InvalidArgument, match="mamba"):
        read_config(directory, revision="r")


def test_layouts_of_pools(checkpoint: Path) -> None:
    check_checkpoint(checkpoint)
    settings = EngineSettings(model_dir=str(checkpoint), served_name="eyes", dtype="float32")
    kv, images, config = kv_layout(settings), embedding_layout(settings), read_config(checkpoint)
    assert images is not None
    assert (kv.num_layers, kv.num_kv_heads, kv.head_dim) == (3, 2, 16)
    assert (images.model, images.revision, images.dtype) == ("eyes", config.revision, "float32")
    assert (images.hidden_size, images.levels) == (64, 3 if "Qwen3VL" in config.architecture else 1)


def test_a_timed_model_takes_images_when_told() -> None:
    assert embedding_layout(EngineSettings(executor="timed")) is None
    layout = embedding_layout(EngineSettings(executor="timed", timed=TimedModel(image_hidden_size=64)))
    assert layout is not None
    assert (layout.levels, layout.hidden_size, layout.dtype) == (1, 64, "float32")
