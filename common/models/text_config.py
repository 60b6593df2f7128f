"""The text side of a config.json: of a text model the file itself, of a vision-language model a part of it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import InvalidArgument


class VisionArchitecture(msgspec.Struct, frozen=True):
    """What a vision-language architecture leaves unsaid in config.json: transformers' own defaults.

    text_type: model_type of the text model when text_config names none. image_token: the field that holds the image
    token's id, and its default.
    """

    text_type: str
    image_token: tuple[str, int]
    mrope: bool = False


VISION_ARCHITECTURES = {
    "LlavaForConditionalGeneration": VisionArchitecture("llama", ("image_token_index", 32000)),
    "Qwen2VLForConditionalGeneration": VisionArchitecture("qwen2_vl_text", ("image_token_id", 151655), mrope=True),
    "Qwen2_5_VLForConditionalGeneration": VisionArchitecture("qwen2_5_vl_text", ("image_token_id", 151655), mrope=True),
    "Qwen3VLForConditionalGeneration": VisionArchitecture("qwen3_vl_text", ("image_token_id", 151655), mrope=True),
    "Idefics3ForConditionalGeneration": VisionArchitecture("llama", ("image_token_id", 128257)),
    "InternVLForConditionalGeneration": VisionArchitecture("qwen2", ("image_token_id", 151667)),
    "Gemma3ForConditionalGeneration": VisionArchitecture("gemma3_text", ("image_token_index", 262144)),
}


def _defaults(
    vocab_size: int, hidden_size: int, layers: int, heads: int, kv_heads: int | None, context: int, **others: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        **others,
    }


# Published checkpoints leave out of text_config what equals these (llava-hf's hold little more than a vocabulary size).
_QWEN2_VL = _defaults(152064, 8192, 80, 64, 8, 32768, sliding_window=4096, eos_token_id=151645)
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _defaults(32000, 4096, 32, 32, None, 2048, eos_token_id=2),
    "mistral": _defaults(32000, 4096, 32, 32, 8, 131072, sliding_window=4096, eos_token_id=2),
    "qwen2": _defaults(151936, 4096, 32, 32, 32, 32768, sliding_window=4096),
    "qwen3": _defaults(151936, 4096, 32, 32, 32, 32768, sliding_window=4096, head_dim=128),
    "gemma3_text": _defaults(262208, 2304, 26, 8, 4, 131072, sliding_window=4096, head_dim=256, eos_token_id=1),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": _defaults(151936, 4096, 32, 32, 32, 128000, head_dim=128),
}
_WINDOW_OPTIONAL = ("qwen2", "qwen3", "qwen2_vl_text", "qwen2_5_vl_text")  # only with use_sliding_window
_FLAT = ("qwen2_vl", "qwen2_5_vl")  # early checkpoints: the text model's fields beside vision_config


def text_config(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Fields of the text model of a vision-language model, with transformers' defaults for those left out.

    Raises InvalidArgument for a text model whose defaults are not known here.
    """
    found = config.get("text_config")
    if found is None:
        found = config if config.get("model_type") in _FLAT else {}
    if not isinstance(found, Mapping):
        raise InvalidArgument("config.json: text_config must be an object", field="model_dir")
    kind = str(found.get("model_type") or VISION_ARCHITECTURES[architecture].text_type)
    if kind in _FLAT:  # the whole model's type, written into the part
        kind = VISION_ARCHITECTURES[architecture].text_type
    if kind not in TEXT_DEFAULTS:
        raise InvalidArgument(
            f"text model {kind} is not supported; supported are {', '.join(TEXT_DEFAULTS)}", field="model_dir"
        )
    text = TEXT_DEFAULTS[kind] | dict(found) | {"model_type": kind}
    if kind in _WINDOW_OPTIONAL and not text.get("use_sliding_window"):
        text["sliding_window"] = None
    return text


def image_token_id(config: Mapping[str, Any], architecture: str) -> int:
    """The token that stands for one row of an image's embedding; the two names are synonyms."""
    name, default = VISION_ARCHITECTURES[architecture].image_token
    for field in (name, "image_token_id", "image_token_index"):
        if isinstance(config.get(field), int):
            return int(config[field])
    return default


def mrope_section(text: Mapping[str, Any], architecture: str) -> tuple[int, ...]:
    """How many of a head's frequencies turn with time, height and width; empty without M-RoPE."""
    if not VISION_ARCHITECTURES[architecture].mrope:
        return ()
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    default = (24, 20, 20) if architecture.startswith("Qwen3") else (16, 24, 24)
    return tuple(int(count) for count in rope.get("mrope_section") or default)


def embedding_levels(config: Mapping[str, Any], architecture: str) -> int:
    """1, and one more for every deepstack layer of Qwen3-VL."""
    if architecture != "Qwen3VLForConditionalGeneration":
        return 1
    vision = config.get("vision_config") or {}
    return 1 + len(vision.get("deepstack_visual_indexes") or (8, 16, 24))
